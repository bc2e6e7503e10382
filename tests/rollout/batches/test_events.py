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
    GroupResult,
    TokenDelta,
    TrajectorySelected,
)
from darts_server.rollout.batches.run import BatchRun
from tests.rollout.batches.streams import (
    GROUPS,
    POLICIES,
    Events,
    batch_request,
    by_candidate,
    idempotency_key,
    new_registry,
    play,
    random_script,
    read_events,
    run_on_stepped_clock,
    token_stream,
)
from tests.rollout.helpers import Harness, lengths
from tests.rollout.joining.joining import SteppedLoop


def check_events_match_answer(events: Events, batch: BatchRun) -> None:
    """Check that the events of the whole batch agree with its answer."""
    assert [number for number, _ in events] == list(range(1, len(events) + 1))
    assert isinstance(events[0][1], BatchStarted)
    done = events[-1][1]
    assert isinstance(done, BatchDone)
    assert done is batch.end
    decided = [event for _, event in events if isinstance(event, GroupResult)]
    assert {id(result) for result in decided} == {id(result) for result in done.results}
    candidates = by_candidate(events)
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
            assert ends[index].logprobs[: len(sample.token_ids)] == sample.logprobs
            end = ends[index].end
            assert isinstance(end, TrajectorySelected)
            assert end.sample is sample
        assert result.record is not None
        actual = {i: (c.end.length, c.end.reason) for i, c in ends.items() if isinstance(c.end, CandidateDiscarded)}
        assert actual == {c.index: (c.tokens, c.reason) for c in result.record.candidates if c.reason is not None}


def replayable(events: Events) -> Events:
    """The events without tokens of discarded candidates, which are not kept."""
    gone = {event.trajectory_id for _, event in events if isinstance(event, CandidateDiscarded)}
    return [(n, e) for n, e in events if not (isinstance(e, TokenDelta) and e.trajectory_id in gone)]


@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(POLICIES),
    faults=st.sampled_from([0.0, 0.0, 0.1, 0.4]),
    chunk=st.sampled_from([1, 2, 4, 100]),
    prompts=st.integers(1, 6),
    pauses=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    enough=st.integers(1, 6) | st.none(),
)
def test_events_match_the_answer_and_can_be_replayed_from_any_number(
    seed: int, policy: str, faults: float, chunk: int, prompts: int, pauses: list[int], enough: int | None
) -> None:
    async def scenario() -> None:
        harness = Harness(random_script(seed, faults))
        num_groups = None if enough is None else min(enough, prompts)
        batch = await new_registry(harness, policy).start_or_find(
            batch_request(prompts, num_groups=num_groups), token_stream(chunk), idempotency_key()
        )
        events = await play(harness, read_events(batch, pauses=pauses))
        check_events_match_answer(events, batch)
        for after in range(len(events) + 1):
            assert await read_events(batch, after) == [each for each in replayable(events) if each[0] > after]
        await harness.engine.run()
        await settle()
        assert not harness.rollouts.runs

    run_on_stepped_clock(scenario())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), policy=st.sampled_from(POLICIES), leave=st.integers(1, 40))
def test_a_listener_that_reconnects_gets_the_remaining_events(seed: int, policy: str, leave: int) -> None:
    async def scenario() -> None:
        harness = Harness(random_script(seed, 0.1))
        batch = await new_registry(harness, policy).start_or_find(batch_request(4), token_stream(2), idempotency_key())
        first: Events = []
        feed = batch.feed
        assert feed is not None
        with batch.listen():
            while len(first) < leave and not (first and isinstance(first[-1][1], BatchDone)):
                with suppress(TimeoutError):
                    async with asyncio.timeout(0):
                        if (found := await feed.next(len(first))) is not None:
                            first.append(found)
                await harness.engine.step()
        rest = await play(harness, read_events(batch, len(first)))
        check_events_match_answer(first + rest, batch)

    run_on_stepped_clock(scenario())


pytestmark = pytest.mark.anyio


async def test_tokens_are_sent_in_chunks_and_the_rest_at_the_end() -> None:
    harness = Harness(lengths(10))
    batch = await new_registry(harness, "off").start_or_find(batch_request(1, size=1), token_stream(4))
    events = await play(harness, read_events(batch))
    deltas = [(e.start, list(e.token_ids)) for _, e in events if isinstance(e, TokenDelta)]
    assert deltas == [(0, [0, 1, 2, 3]), (4, [4, 5, 6, 7]), (8, [8, 9])]


async def test_a_stalled_listener_buffers_nothing_and_then_gets_large_deltas() -> None:
    harness = Harness(lengths(200))
    batch = await new_registry(harness, "off").start_or_find(
        batch_request(3, size=2), token_stream(1), idempotency_key()
    )
    feed = batch.feed
    assert feed is not None
    with batch.listen():
        assert await feed.next(0) is not None
        await harness.steps(190)
        assert len(feed._log) == 1
        events = [await feed.next(number) for number in range(1, 7)]
    assert all(
        found is not None and isinstance(found[1], TokenDelta) and len(found[1].token_ids) >= 180 for found in events
    )


async def test_events_of_a_batch_without_replay_are_not_kept() -> None:
    harness = Harness(lengths(30))
    batch = await new_registry(harness, "off").start_or_find(batch_request(3, size=2), token_stream(1))
    events = await play(harness, read_events(batch))
    assert len(events) > 20
    assert batch.feed is not None
    assert len(batch.feed._log) == 0


async def test_concurrent_listeners_get_the_same_events() -> None:
    harness = Harness(lengths(9, 12, 15, 18))
    batch = await new_registry(harness, "shortest").start_or_find(batch_request(3), token_stream(2), idempotency_key())
    slow = asyncio.ensure_future(read_events(batch, pauses=(3,)))
    events = await play(harness, read_events(batch))
    again = await play(harness, slow)
    assert replayable(again) == replayable(events)
    check_events_match_answer(events, batch)


async def test_a_groups_stream_has_one_event_per_group_as_it_ends() -> None:
    harness = Harness(lambda prompt, index: Script(10 - int(prompt)))
    batch = await new_registry(harness, "shortest").start_or_find(batch_request(3), GROUPS)
    events = await play(harness, read_events(batch))
    assert [e.number for _, e in events if isinstance(e, GroupResult)] == [2, 1, 0]
    assert [type(e) for _, e in events] == [BatchStarted, GroupResult, GroupResult, GroupResult, BatchDone]


async def test_selected_trajectories_are_sent_before_their_group_ends() -> None:
    harness = Harness(lengths(5, 6, 7, 30, 31, 32))
    batch = await new_registry(harness, "longest").start_or_find(batch_request(1), token_stream(100))
    events = await play(harness, read_events(batch))
    order = [type(event) for _, event in events]
    assert order.index(TrajectorySelected) < order.index(GroupResult) - 4


async def test_slow_polls_are_done_less_often() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)

    def slow(output: list[int], start: int) -> TokenSlice:
        loop.now += 1
        return slice_from(output, start)

    harness = Harness(lengths(3, 50))
    harness.engine.tokens_from = slow  # type: ignore[method-assign]  # to be slow
    batch = await new_registry(harness, "longest").start_or_find(batch_request(1), token_stream(1))
    listening = asyncio.ensure_future(read_events(batch))
    await harness.steps(10)
    assert batch.feed is not None
    events = batch.feed.last_number
    assert events > 1
    for seconds, more in ((9.9, False), (0.2, True)):
        loop.now += seconds
        await harness.engine.step()
        assert (batch.feed.last_number > events) == more
    listening.cancel()


async def test_an_error_while_creating_events_is_sent_as_the_last_event(caplog: pytest.LogCaptureFixture) -> None:
    def broken(output: list[int], start: int) -> TokenSlice:
        raise RuntimeError("a fault")

    harness = Harness(lengths(3, 50))
    harness.engine.tokens_from = broken  # type: ignore[method-assign]  # to fail
    batch = await new_registry(harness, "longest").start_or_find(batch_request(1), token_stream(100))
    events = await play(harness, read_events(batch))
    assert isinstance(events[-1][1], BatchFailed)
    assert "the events of batch" in caplog.text
    await settle()
    assert not harness.engine.running
