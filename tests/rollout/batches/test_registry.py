"""Durable batches, which run on without their caller and are kept."""

import asyncio

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import Conflict, GroupAborted, InvalidRequest, NotFound, ServerStopping
from darts_server.rollout.batches.events import BatchDone, BatchFailed
from darts_server.rollout.batches.registry import BatchRetention
from darts_server.rollout.batches.run import AnswerFormat
from darts_server.rollout.batches.submission import BatchRequest
from darts_server.types import Outcome, PromptSpec
from tests.rollout.batches.streams import (
    batch_request,
    idempotency_key,
    new_registry,
    play,
    read_events,
    run_on_stepped_clock,
    token_stream,
)
from tests.rollout.helpers import Harness, lengths
from tests.rollout.joining.joining import SteppedLoop

RETENTION = BatchRetention(resume_seconds=60, kept_seconds=600, kept_batches=2)
WHOLE = AnswerFormat()


async def pass_time(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)
    loop.now += seconds
    await settle()


def test_the_same_key_gives_the_same_batch_while_it_runs_and_afterwards() -> None:
    async def scenario() -> None:
        harness = Harness(lengths(5))
        registry = new_registry(harness, "shortest", RETENTION)
        first, second = await asyncio.gather(
            *(registry.open(batch_request(2), WHOLE, idempotency_key()) for _ in range(2))
        )
        assert first is second
        await harness.engine.run()
        done = await first.wait()
        assert len(done.results) == 2
        assert await registry.open(batch_request(2), WHOLE, idempotency_key()) is first
        assert registry.find(first.batch_id) is first
        assert harness.recorder.started == 12

    run_on_stepped_clock(scenario())


def test_a_key_belongs_to_one_caller_and_one_body() -> None:
    async def scenario() -> None:
        registry = new_registry(Harness(lengths(5)), "shortest", RETENTION)
        first = await registry.open(batch_request(1), WHOLE, idempotency_key())
        with pytest.raises(Conflict) as refused:
            await registry.open(batch_request(2), WHOLE, idempotency_key(body=b"other"))
        assert refused.value.field == "Idempotency-Key"
        assert await registry.open(batch_request(1), WHOLE, idempotency_key(owner=b"other")) is not first

    run_on_stepped_clock(scenario())


def test_a_refused_batch_leaves_its_key_free() -> None:
    async def scenario() -> None:
        registry = new_registry(Harness(lengths(5)), "shortest", RETENTION)
        wrong = BatchRequest([PromptSpec(text="x")], 4)
        refused = await asyncio.gather(
            *(registry.open(wrong, WHOLE, idempotency_key()) for _ in range(2)), return_exceptions=True
        )
        assert [type(one) for one in refused] == [InvalidRequest, InvalidRequest]
        await registry.open(batch_request(1), WHOLE, idempotency_key(body=b"right"))

    run_on_stepped_clock(scenario())


def test_a_durable_batch_is_cancelled_if_its_caller_does_not_come_back() -> None:
    async def scenario() -> None:
        harness = Harness(lengths(50))
        registry = new_registry(harness, "shortest", RETENTION)
        batch = await registry.open(batch_request(2), WHOLE, idempotency_key())
        await pass_time(50)
        with batch.listen():
            await pass_time(100)
        assert batch.end is None
        await pass_time(59)
        assert len(harness.engine.running) == 12
        await pass_time(2)
        assert not harness.engine.running
        assert [record.outcome for record in harness.recorder.records] == [Outcome.CANCELLED] * 2
        with pytest.raises(NotFound):
            registry.find(batch.batch_id)
        assert await registry.open(batch_request(2), WHOLE, idempotency_key()) is not batch

    run_on_stepped_clock(scenario())


def test_a_batch_without_a_key_is_cancelled_with_its_caller_and_not_kept() -> None:
    async def scenario() -> None:
        harness = Harness(lengths(50))
        registry = new_registry(harness, "shortest", RETENTION)
        batch = await registry.open(batch_request(2), WHOLE)
        with pytest.raises(NotFound):
            registry.find(batch.batch_id)
        with batch.listen():
            await settle()
            assert len(harness.engine.running) == 12
        await settle()
        assert not harness.engine.running
        assert harness.rollouts.running == 0
        with pytest.raises(NotFound):
            registry.cancel(batch.batch_id)

    run_on_stepped_clock(scenario())


def test_a_caller_that_leaves_in_its_first_turn_cancels_the_batch() -> None:
    async def scenario() -> None:
        harness = Harness(lengths(50))
        batch = await new_registry(harness, "cut", RETENTION).open(batch_request(3), WHOLE)
        with batch.listen():
            pass
        await settle()
        assert not harness.engine.running
        assert harness.rollouts.running == 0
        assert len(harness.recorder.cohorts) == 1

    run_on_stepped_clock(scenario())


def test_ended_batches_are_kept_for_a_time_and_the_oldest_are_dropped_first() -> None:
    async def scenario() -> None:
        harness = Harness(lengths(5))
        registry = new_registry(harness, "shortest", RETENTION)
        opened = []
        for name in "abc":
            batch = await registry.open(batch_request(1), WHOLE, idempotency_key(name))
            await harness.engine.run()
            await pass_time(1)
            opened.append(batch.batch_id)
        with pytest.raises(NotFound):
            registry.find(opened[0])
        await pass_time(598.5)
        with pytest.raises(NotFound):
            registry.find(opened[1])
        assert registry.find(opened[2]).end is not None
        await pass_time(1)
        with pytest.raises(NotFound):
            registry.find(opened[2])
        assert (await registry.open(batch_request(1), WHOLE, idempotency_key("c"))).batch_id not in opened

    run_on_stepped_clock(scenario())


def test_cancelling_stops_a_batch_once_and_raises_in_its_callers() -> None:
    async def scenario() -> None:
        harness = Harness(lengths(50))
        registry = new_registry(harness, "shortest", RETENTION)
        for ours_claim in (idempotency_key(), None):
            batch = await registry.open(batch_request(2), WHOLE, ours_claim)
            with batch.listen():
                waiting = asyncio.ensure_future(batch.wait())
                await settle()
                assert registry.cancel(batch.batch_id)
                with pytest.raises(GroupAborted):
                    await waiting
            await settle()
            assert not harness.engine.running
        assert not registry.cancel(
            registry.find((await registry.open(batch_request(2), WHOLE, idempotency_key())).batch_id).batch_id
        )
        with pytest.raises(NotFound):
            registry.cancel(batch.batch_id)

    run_on_stepped_clock(scenario())


def test_a_batch_that_ends_without_a_listener_can_be_replayed_later() -> None:
    async def scenario() -> None:
        harness = Harness(lengths(5))
        registry = new_registry(harness, "shortest", RETENTION)
        batch = await registry.open(batch_request(2), token_stream(), idempotency_key())
        await harness.engine.run()
        events = await play(harness, asyncio.ensure_future(read_events(registry.find(batch.batch_id))))
        assert isinstance(events[-1][1], BatchDone)
        assert [number for number, _ in events] == list(range(1, len(events) + 1))

    run_on_stepped_clock(scenario())


def test_draining_cancels_batches_without_a_listener() -> None:
    async def scenario() -> None:
        harness = Harness(lengths(5))
        registry = new_registry(harness, "shortest", RETENTION)
        alone, attended = [await registry.open(batch_request(2), WHOLE, idempotency_key(key)) for key in ("a", "b")]
        with attended.listen():
            registry.drain()
            with pytest.raises(GroupAborted, match="stopping"):
                await alone.wait()
            await harness.engine.run()
            assert len((await attended.wait()).results) == 2

    run_on_stepped_clock(scenario())


def test_failing_ends_streams_with_the_error_and_answers_the_others() -> None:
    async def scenario() -> None:
        harness = Harness(lambda prompt, _: Script(5 if prompt == "0" else 5000))
        registry, error = new_registry(harness, "shortest", RETENTION), ServerStopping("the server is stopping", 30)
        stream, whole = (
            await registry.open(batch_request(2), token_stream(), None),
            await registry.open(batch_request(2), WHOLE, None),
        )
        with whole.listen():
            hearing = asyncio.ensure_future(read_events(stream))
            for _ in range(10):
                await harness.engine.step()
            registry.fail(error)
            harness.rollouts.fail_all(error)
            events = await hearing
            assert events[-1][1] == BatchFailed(error)
            done = await whole.wait()
            assert [result.error for result in sorted(done.results, key=lambda r: r.number)] == [None, error]
        await settle()
        assert not harness.engine.running

    run_on_stepped_clock(scenario())
