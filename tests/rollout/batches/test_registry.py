"""Batches that go on without their caller, and are kept."""

import asyncio

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import Conflict, GroupAborted, InvalidRequest, NotFound, ServerStopping
from darts_server.rollout.batches.events import BatchDone, BatchFailed
from darts_server.rollout.batches.registry import BatchRetention
from darts_server.rollout.batches.run import AnswerFormat
from darts_server.rollout.batches.submission import BatchRequest
from darts_server.types import Outcome, PromptSpec
from tests.rollout.batches.streams import ask, batches, claim, hear, on_stepped_time, play, tokens
from tests.rollout.helpers import House, lengths
from tests.rollout.joining.joining import SteppedLoop

KEEPING = BatchRetention(resume_seconds=60, kept_seconds=600, kept_batches=2)
WHOLE = AnswerFormat()


async def pass_time(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)
    loop.now += seconds
    await settle()


def test_the_same_claim_gives_the_same_batch_while_it_runs_and_after() -> None:
    async def scenario() -> None:
        house = House(lengths(5))
        ours = batches(house, "shortest", KEEPING)
        first, second = await asyncio.gather(*(ours.open(ask(2), WHOLE, claim()) for _ in range(2)))
        assert first is second
        await house.engine.run()
        done = await first.wait()
        assert len(done.results) == 2
        assert await ours.open(ask(2), WHOLE, claim()) is first
        assert ours.find(first.batch_id) is first
        assert house.recorder.started == 12

    on_stepped_time(scenario())


def test_a_claim_is_one_callers_and_for_one_body() -> None:
    async def scenario() -> None:
        ours = batches(House(lengths(5)), "shortest", KEEPING)
        first = await ours.open(ask(1), WHOLE, claim())
        with pytest.raises(Conflict) as refused:
            await ours.open(ask(2), WHOLE, claim(body=b"other"))
        assert refused.value.field == "Idempotency-Key"
        assert await ours.open(ask(1), WHOLE, claim(owner=b"other")) is not first

    on_stepped_time(scenario())


def test_a_refused_batch_leaves_its_claim_free() -> None:
    async def scenario() -> None:
        ours = batches(House(lengths(5)), "shortest", KEEPING)
        wrong = BatchRequest([PromptSpec(text="x")], 4)
        refused = await asyncio.gather(*(ours.open(wrong, WHOLE, claim()) for _ in range(2)), return_exceptions=True)
        assert [type(one) for one in refused] == [InvalidRequest, InvalidRequest]
        await ours.open(ask(1), WHOLE, claim(body=b"right"))

    on_stepped_time(scenario())


def test_nobody_waits_for_a_caller_that_does_not_come_back() -> None:
    async def scenario() -> None:
        house = House(lengths(50))
        ours = batches(house, "shortest", KEEPING)
        batch = await ours.open(ask(2), WHOLE, claim())
        await pass_time(50)
        with batch.listen():
            await pass_time(100)
        assert batch.end is None
        await pass_time(59)
        assert len(house.engine.running) == 12
        await pass_time(2)
        assert not house.engine.running
        assert [record.outcome for record in house.recorder.records] == [Outcome.CANCELLED] * 2
        with pytest.raises(NotFound):
            ours.find(batch.batch_id)
        assert await ours.open(ask(2), WHOLE, claim()) is not batch

    on_stepped_time(scenario())


def test_one_without_a_claim_ends_with_its_caller_and_is_not_kept() -> None:
    async def scenario() -> None:
        house = House(lengths(50))
        ours = batches(house, "shortest", KEEPING)
        batch = await ours.open(ask(2), WHOLE)
        with pytest.raises(NotFound):
            ours.find(batch.batch_id)
        with batch.listen():
            await settle()
            assert len(house.engine.running) == 12
        await settle()
        assert not house.engine.running
        assert house.rollouts.running == 0
        with pytest.raises(NotFound):
            ours.cancel(batch.batch_id)

    on_stepped_time(scenario())


def test_a_caller_that_leaves_in_the_turn_it_came_ends_the_batch_too() -> None:
    async def scenario() -> None:
        house = House(lengths(50))
        batch = await batches(house, "cut", KEEPING).open(ask(3), WHOLE)
        with batch.listen():
            pass
        await settle()
        assert not house.engine.running
        assert house.rollouts.running == 0
        assert len(house.recorder.batches) == 1

    on_stepped_time(scenario())


def test_ended_ones_are_kept_for_a_time_and_the_oldest_go_first() -> None:
    async def scenario() -> None:
        house = House(lengths(5))
        ours = batches(house, "shortest", KEEPING)
        opened = []
        for name in "abc":
            batch = await ours.open(ask(1), WHOLE, claim(name))
            await house.engine.run()
            await pass_time(1)
            opened.append(batch.batch_id)
        with pytest.raises(NotFound):
            ours.find(opened[0])
        await pass_time(598.5)
        with pytest.raises(NotFound):
            ours.find(opened[1])
        assert ours.find(opened[2]).end is not None
        await pass_time(1)
        with pytest.raises(NotFound):
            ours.find(opened[2])
        assert (await ours.open(ask(1), WHOLE, claim("c"))).batch_id not in opened

    on_stepped_time(scenario())


def test_cancelling_stops_a_batch_once_and_its_callers_hear_of_it() -> None:
    async def scenario() -> None:
        house = House(lengths(50))
        ours = batches(house, "shortest", KEEPING)
        for ours_claim in (claim(), None):
            batch = await ours.open(ask(2), WHOLE, ours_claim)
            with batch.listen():
                waiting = asyncio.ensure_future(batch.wait())
                await settle()
                assert ours.cancel(batch.batch_id)
                with pytest.raises(GroupAborted):
                    await waiting
            await settle()
            assert not house.engine.running
        assert not ours.cancel(ours.find((await ours.open(ask(2), WHOLE, claim())).batch_id).batch_id)
        with pytest.raises(NotFound):
            ours.cancel(batch.batch_id)

    on_stepped_time(scenario())


def test_a_batch_that_ends_without_a_listener_tells_everything_later() -> None:
    async def scenario() -> None:
        house = House(lengths(5))
        ours = batches(house, "shortest", KEEPING)
        batch = await ours.open(ask(2), tokens(), claim())
        await house.engine.run()
        told = await play(house, asyncio.ensure_future(hear(ours.find(batch.batch_id))))
        assert isinstance(told[-1][1], BatchDone)
        assert [number for number, _ in told] == list(range(1, len(told) + 1))

    on_stepped_time(scenario())


def test_when_the_server_stops_batches_that_nobody_listens_to_are_ended() -> None:
    async def scenario() -> None:
        house = House(lengths(5))
        ours = batches(house, "shortest", KEEPING)
        alone, heard = [await ours.open(ask(2), WHOLE, claim(key)) for key in ("a", "b")]
        with heard.listen():
            ours.drain()
            with pytest.raises(GroupAborted, match="stopping"):
                await alone.wait()
            await house.engine.run()
            assert len((await heard.wait()).results) == 2

    on_stepped_time(scenario())


def test_at_the_end_streams_get_the_error_and_others_what_there_is() -> None:
    async def scenario() -> None:
        house = House(lambda prompt, _: Script(5 if prompt == "0" else 5000))
        ours, error = batches(house, "shortest", KEEPING), ServerStopping("the server is stopping", 30)
        stream, whole = await ours.open(ask(2), tokens(), None), await ours.open(ask(2), WHOLE, None)
        with whole.listen():
            hearing = asyncio.ensure_future(hear(stream))
            for _ in range(10):
                await house.engine.step()
            ours.fail(error)
            house.rollouts.fail_all(error)
            told = await hearing
            assert told[-1][1] == BatchFailed(error)
            done = await whole.wait()
            assert [result.error for result in sorted(done.results, key=lambda r: r.number)] == [None, error]
        await settle()
        assert not house.engine.running

    on_stepped_time(scenario())
