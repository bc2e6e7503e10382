"""The events of a batch, on the scripted engine."""

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from darts_server.engine.port import TokenSlice
from darts_server.engine.scripted import Script, settle, slice_from
from darts_server.rollout.batches.events import (
    BatchDone,
    BatchFailed,
    BatchStarted,
    CandidateDiscarded,
    GroupEnded,
    TokenDelta,
    TrajectorySelected,
)
from darts_server.rollout.batches.run import AnswerFormat, BatchRun, StreamMode
from darts_server.types import DiscardReason, GroupRecord
from tests.rollout.batches.streams import (
    POLICIES,
    Told,
    ask,
    batches,
    claim,
    hear,
    heard,
    on_stepped_time,
    play,
    scripted,
    tokens,
)
from tests.rollout.helpers import House, lengths
from tests.rollout.joining.joining import SteppedLoop


def check_against_the_answer(told: Told, batch: BatchRun, shadow: bool) -> None:
    """The events of the whole batch say what its answer says."""
    assert [number for number, _ in told] == list(range(1, len(told) + 1))
    assert isinstance(told[0][1], BatchStarted)
    done = told[-1][1]
    assert isinstance(done, BatchDone)
    assert done is batch.end
    decided = [event.result for _, event in told if isinstance(event, GroupEnded)]
    assert {id(result) for result in decided} == {id(result) for result in done.results}
    candidates = heard(told)
    assert all(candidate.end is not None for candidate in candidates.values())
    for result in done.results:
        if result.error is not None:
            continue
        ends = {
            int(name.rpartition(":")[2]): candidate
            for name, candidate in candidates.items()
            if name.rpartition(":")[0] == result.group_id
        }
        assert {i for i, candidate in ends.items() if isinstance(candidate.end, TrajectorySelected)} == set(
            result.samples
        )
        for index, sample in result.samples.items():
            length = len(sample.token_ids)
            assert ends[index].token_ids[:length] == sample.token_ids
            assert ends[index].logprobs[:length] == sample.logprobs
            end = ends[index].end
            assert isinstance(end, TrajectorySelected)
            assert end.sample is sample
            assert end.cut or length == len(ends[index].token_ids)
        if not shadow:
            assert result.record is not None
            told_off = {
                i: (c.end.length, c.end.reason) for i, c in ends.items() if isinstance(c.end, CandidateDiscarded)
            }
            assert told_off == discarded(result.record)


def discarded(record: GroupRecord) -> dict[int, tuple[int, DiscardReason]]:
    return {c.index: (c.tokens, c.reason) for c in record.candidates if c.reason is not None}


def check_repeats(told: Told, again: Told, after: int) -> None:
    """What is told again is the same, but for tokens of candidates that were discarded."""
    gone = {event.trajectory_id for _, event in told if isinstance(event, CandidateDiscarded)}
    wanted = [(n, e) for n, e in told[after:] if not (isinstance(e, TokenDelta) and e.trajectory_id in gone)]
    assert again == wanted


@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(POLICIES),
    faults=st.sampled_from([0.0, 0.0, 0.1, 0.4]),
    chunk=st.sampled_from([1, 2, 4, 100]),
    prompts=st.integers(1, 6),
    pauses=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    enough=st.integers(1, 6) | st.none(),
)
def test_events_are_the_answer_and_can_be_told_again_from_anywhere(
    seed: int, policy: str, faults: float, chunk: int, prompts: int, pauses: list[int], enough: int | None
) -> None:
    async def scenario() -> None:
        house = House(scripted(seed, faults))
        num_groups = None if enough is None else min(enough, prompts)
        batch = await batches(house, policy).open(ask(prompts, num_groups=num_groups), tokens(chunk), claim())
        told = await play(house, asyncio.ensure_future(hear(batch, pauses=pauses)))
        check_against_the_answer(told, batch, policy == "shadow")
        for after in range(len(told) + 1):
            check_repeats(told, await hear(batch, after), after)
        await house.engine.run()
        await settle()
        assert house.rollouts.running == 0

    on_stepped_time(scenario())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), policy=st.sampled_from(POLICIES), leave=st.integers(1, 40))
def test_one_that_comes_back_in_the_middle_hears_the_rest(seed: int, policy: str, leave: int) -> None:
    async def scenario() -> None:
        house = House(scripted(seed, 0.1))
        batch = await batches(house, policy).open(ask(4), tokens(2), claim())
        first: Told = []
        with batch.listen() as listener:
            while len(first) < leave and not (first and isinstance(first[-1][1], BatchDone)):
                with suppress(TimeoutError):
                    async with asyncio.timeout(0):
                        if (found := await listener.next()) is not None:
                            first.append(found)
                await house.engine.step()
        rest = await play(house, asyncio.ensure_future(hear(batch, len(first))))
        check_against_the_answer(first + rest, batch, policy == "shadow")

    on_stepped_time(scenario())


pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return ("asyncio", {"loop_factory": SteppedLoop})


async def test_tokens_come_in_chunks_and_the_rest_at_the_end() -> None:
    house = House(lengths(10))
    batch = await batches(house, "off").open(ask(1, size=1), tokens(4))
    told = await play(house, asyncio.ensure_future(hear(batch)))
    deltas = [(e.start, list(e.token_ids)) for _, e in told if isinstance(e, TokenDelta)]
    assert deltas == [(0, [0, 1, 2, 3]), (4, [4, 5, 6, 7]), (8, [8, 9])]


async def test_a_listener_that_stalls_makes_nothing_pile_up_and_then_hears_all_at_once() -> None:
    house = House(lengths(200))
    batch = await batches(house, "off").open(ask(3, size=2), tokens(1), claim())
    with batch.listen() as listener:
        assert await listener.next() is not None
        for _ in range(190):
            await house.engine.step()
        assert batch.feed.log_length == 1
        told = [await listener.next() for _ in range(6)]
    assert all(
        found is not None and isinstance(found[1], TokenDelta) and len(found[1].token_ids) >= 180 for found in told
    )


async def test_of_a_batch_that_is_heard_once_nothing_is_written_down() -> None:
    house = House(lengths(30))
    batch = await batches(house, "off").open(ask(3, size=2), tokens(1))
    told = await play(house, asyncio.ensure_future(hear(batch)))
    assert len(told) > 20
    assert batch.feed.log_length == 0


async def test_two_who_listen_at_the_same_time_hear_the_same() -> None:
    house = House(lengths(9, 12, 15, 18))
    batch = await batches(house, "shortest").open(ask(3), tokens(2), claim())
    slow = asyncio.ensure_future(hear(batch, pauses=(3,)))
    told = await play(house, asyncio.ensure_future(hear(batch)))
    again = await play(house, slow)
    gone = {event.trajectory_id for _, event in told if isinstance(event, CandidateDiscarded)}
    assert [
        one for one in told if one in again or not (isinstance(one[1], TokenDelta) and one[1].trajectory_id in gone)
    ] == again
    check_against_the_answer(told, batch, shadow=False)


async def test_groups_alone_are_told_as_they_are_decided() -> None:
    house = House(lambda prompt, index: Script(10 - int(prompt)))
    batch = await batches(house, "shortest").open(ask(3), AnswerFormat(StreamMode.GROUPS))
    told = await play(house, asyncio.ensure_future(hear(batch)))
    assert [e.result.number for _, e in told if isinstance(e, GroupEnded)] == [2, 1, 0]
    assert [type(e) for _, e in told] == [BatchStarted, GroupEnded, GroupEnded, GroupEnded, BatchDone]


async def test_trajectories_are_told_before_their_group_is_decided() -> None:
    house = House(lengths(5, 6, 7, 30, 31, 32))
    batch = await batches(house, "longest").open(ask(1), tokens(100))
    told = await play(house, asyncio.ensure_future(hear(batch)))
    order = [type(event) for _, event in told]
    assert order.index(TrajectorySelected) < order.index(GroupEnded) - 4


async def test_who_listens_to_a_cancelled_batch_hears_an_error_and_the_engine_is_idle() -> None:
    house = House(lengths(50))
    ours = batches(house, "shortest")
    batch = await ours.open(ask(2), tokens(2), claim())
    listening = asyncio.ensure_future(hear(batch))
    for _ in range(5):
        await house.engine.step()
    assert ours.cancel(batch.batch_id)
    told = await listening
    assert isinstance(told[-1][1], BatchFailed)
    await settle()
    assert not house.engine.running
    assert house.rollouts.running == 0
    assert await hear(batch, len(told)) == []


async def test_looking_that_takes_long_is_done_less_often() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)

    def slow(output: list[int], start: int) -> TokenSlice:
        loop.now += 1
        return slice_from(output, start)

    house = House(lengths(3, 50))
    house.engine.tokens_from = slow  # type: ignore[method-assign]
    batch = await batches(house, "longest").open(ask(1), tokens(1))
    listening = asyncio.ensure_future(hear(batch))
    for _ in range(10):
        await house.engine.step()
    told = batch.feed.last_number
    assert told > 1
    for seconds, more in ((9.9, False), (0.2, True)):
        loop.now += seconds
        await house.engine.step()
        assert (batch.feed.last_number > told) == more
    listening.cancel()


async def test_a_fault_in_making_events_is_told_and_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    def broken(output: list[int], start: int) -> TokenSlice:
        raise RuntimeError("a fault")

    house = House(lengths(3, 50))
    house.engine.tokens_from = broken  # type: ignore[method-assign]
    batch = await batches(house, "longest").open(ask(1), tokens(100))
    told = await play(house, asyncio.ensure_future(hear(batch)))
    assert isinstance(told[-1][1], BatchFailed)
    assert "the events of batch" in caplog.text
    await settle()
    assert not house.engine.running
