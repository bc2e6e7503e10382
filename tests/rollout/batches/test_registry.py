"""Durable batches, which run on without their caller and are kept."""

import asyncio

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import (
    Conflict,
    GroupAborted,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuotaReached,
    ServerStopping,
    TooLarge,
)
from darts_server.rollout.batches.batch import BatchRequest
from darts_server.rollout.batches.events import BatchFailed
from darts_server.rollout.batches.registry import BatchRegistry, BatchRetention, kept_bytes
from darts_server.rollout.batches.run import AnswerFormat, BatchRun
from darts_server.types import Outcome, PromptSpec
from tests.rollout.batches.streams import (
    batch_request,
    idempotency_key,
    new_registry,
    read_events,
    token_stream,
)
from tests.rollout.helpers import Harness, lengths
from tests.rollout.joining.joining import SteppedLoop

pytestmark = pytest.mark.anyio

RETENTION = BatchRetention(resume_seconds=60, kept_seconds=600, kept_batches=2)
WHOLE = AnswerFormat()


async def pass_time(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)
    loop.now += seconds
    await settle()


async def test_the_same_key_gives_the_same_batch_while_it_runs_and_afterwards() -> None:
    harness = Harness(lengths(5))
    registry = new_registry(harness, "shortest", RETENTION)
    first, second = await asyncio.gather(*(registry.open(batch_request(2), WHOLE, idempotency_key()) for _ in range(2)))
    assert first is second
    await harness.engine.run()
    done = await first.wait()
    assert len(done.results) == 2
    assert await registry.open(batch_request(2), WHOLE, idempotency_key()) is first
    assert registry.find(first.batch_id) is first
    assert harness.recorder.started == 12


async def test_a_key_belongs_to_one_caller_and_one_body() -> None:
    registry = new_registry(Harness(lengths(5)), "shortest", RETENTION)
    first = await registry.open(batch_request(1), WHOLE, idempotency_key())
    with pytest.raises(Conflict) as refused:
        await registry.open(batch_request(2), WHOLE, idempotency_key(body=b"other"))
    assert refused.value.field == "Idempotency-Key"
    assert await registry.open(batch_request(1), WHOLE, idempotency_key(owner="other")) is not first


async def test_a_refused_batch_leaves_its_key_free() -> None:
    registry = new_registry(Harness(lengths(5)), "shortest", RETENTION)
    wrong = BatchRequest([PromptSpec(text="x")], 4)
    refused = await asyncio.gather(
        *(registry.open(wrong, WHOLE, idempotency_key()) for _ in range(2)), return_exceptions=True
    )
    assert [type(one) for one in refused] == [InvalidRequest, InvalidRequest]
    await registry.open(batch_request(1), WHOLE, idempotency_key(body=b"right"))


async def test_a_durable_batch_is_cancelled_if_its_caller_does_not_come_back() -> None:
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


async def test_a_batch_without_a_key_is_cancelled_with_its_caller_and_not_kept() -> None:
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


async def test_a_caller_that_leaves_in_its_first_turn_cancels_the_batch() -> None:
    harness = Harness(lengths(50))
    batch = await new_registry(harness, "cut", RETENTION).open(batch_request(3), WHOLE)
    with batch.listen():
        pass
    await settle()
    assert not harness.engine.running
    assert harness.rollouts.running == 0
    assert len(harness.recorder.cohorts) == 1


async def test_ended_batches_are_kept_for_a_time_and_the_oldest_are_dropped_first() -> None:
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


async def test_cancelling_stops_a_batch_once_and_raises_in_its_callers() -> None:
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


async def test_draining_cancels_batches_without_a_listener() -> None:
    harness = Harness(lengths(5))
    registry = new_registry(harness, "shortest", RETENTION)
    alone, attended = [await registry.open(batch_request(2), WHOLE, idempotency_key(key)) for key in ("a", "b")]
    with attended.listen():
        registry.drain()
        with pytest.raises(GroupAborted, match="stopping"):
            await alone.wait()
        await harness.engine.run()
        assert len((await attended.wait()).results) == 2


async def test_failing_ends_streams_with_the_error_and_answers_the_others() -> None:
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


# --- bytes ------------------------------------------------------------------

Registry = BatchRegistry[str, list[int]]


def is_kept(registry: Registry, batch: BatchRun) -> bool:
    try:
        return registry.find(batch.batch_id) is batch
    except NotFound:
        return False


def large(size: int) -> BatchRequest:
    return BatchRequest([PromptSpec(text="0", metadata=b"x" * size)], 4)


async def test_ended_batches_are_kept_up_to_a_number_of_bytes_of_which_one_caller_has_half() -> None:
    harness = Harness(lengths(5))
    registry = new_registry(harness, "shortest", BatchRetention(kept_bytes=400_000))

    async def run(key: str, owner: str, size: int) -> BatchRun:
        batch = await registry.open(large(size), WHOLE, idempotency_key(key, owner=owner))
        with batch.listen():
            await harness.engine.run()
            await batch.wait()
        assert size < kept_bytes(batch) < size + 20_000
        return batch

    first, second = await run("1", "a", 80_000), await run("2", "a", 80_000)
    other = await run("1", "b", 80_000)
    assert all(is_kept(registry, batch) for batch in (first, second, other))
    third = await run("3", "a", 80_000)
    assert [is_kept(registry, batch) for batch in (first, second, other, third)] == [False, True, True, True]
    too_large = await run("4", "b", 210_000)
    assert [is_kept(registry, batch) for batch in (second, other, third, too_large)] == [True, False, True, False]
    last = [await run("5", owner, 140_000) for owner in ("b", "c")]
    assert [is_kept(registry, batch) for batch in (second, third, *last)] == [False, True, True, True]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_sampling_parameters_count_however_their_batch_has_ended(is_cancelled: bool) -> None:
    harness = Harness(lengths(5))
    registry = new_registry(harness, "shortest", BatchRetention(kept_bytes=400_000))
    batch = await registry.open(batch_request(1), WHOLE, idempotency_key("1"))
    batch.sampling = {"stop": ["x" * 250_000]}
    if is_cancelled:
        registry.cancel(batch.batch_id)
    else:
        await harness.engine.run()
        await settle()
    assert batch.end is not None
    assert kept_bytes(batch) > 250_000
    assert not is_kept(registry, batch)


async def test_running_batches_count_by_the_size_of_their_requests() -> None:
    harness = Harness(lengths(5))
    registry = new_registry(harness, "shortest", BatchRetention(kept_bytes=400_000))

    async def open_batch(key: str, owner: str, size: int) -> BatchRun:
        return await registry.open(batch_request(1), WHOLE, idempotency_key(key, owner=owner, body_bytes=size))

    with pytest.raises(TooLarge, match="at most 200000 bytes with Idempotency-Key"):
        await open_batch("1", "a", 200_001)
    await open_batch("1", "a", 150_000)
    with pytest.raises(QuotaReached, match="this key's running batches"):
        await open_batch("2", "a", 60_000)
    await open_batch("1", "b", 200_000)
    with pytest.raises(Overloaded, match="all running batches"):
        await open_batch("1", "c", 60_000)
    await harness.engine.run()
    await settle()
    await open_batch("2", "a", 190_000)
    assert harness.recorder.started == 18


async def test_a_batch_that_starts_takes_the_place_of_ended_ones() -> None:
    harness = Harness(lengths(5))
    registry = new_registry(harness, "shortest", BatchRetention(kept_bytes=400_000))
    ended = await registry.open(large(100_000), WHOLE, idempotency_key("1"))
    with ended.listen():
        await harness.engine.run()
        await ended.wait()
    assert is_kept(registry, ended)
    await registry.open(batch_request(1), WHOLE, idempotency_key("2", body_bytes=150_000))
    assert not is_kept(registry, ended)


async def test_a_batch_that_could_not_be_opened_does_not_count_though_its_caller_has_left() -> None:
    registry = new_registry(Harness(lengths(5)), "shortest", BatchRetention(kept_bytes=400_000))
    wrong = BatchRequest([PromptSpec(text="x")], 4)
    leaving = asyncio.create_task(registry.open(wrong, WHOLE, idempotency_key(body_bytes=150_000)))
    await asyncio.sleep(0)
    leaving.cancel()
    await settle()
    await registry.open(batch_request(1), WHOLE, idempotency_key("2", body_bytes=150_000))
