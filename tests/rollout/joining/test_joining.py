"""Groups put together from single requests: each sentence of the contract by itself."""

import asyncio
import logging
import re

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import EngineDead, EngineRefused, ServerStopping
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.records import CohortRecord
from darts_server.rollout.joining import WINDOW
from darts_server.rollout.plan import Limits
from darts_server.types import Outcome
from tests.rollout.helpers import lengths
from tests.rollout.joining.joining import (
    NAMED_WAIT,
    POLICIES,
    SAMPLED,
    SHORTEST,
    WAIT,
    Caller,
    JoiningHarness,
    SignedOutput,
    by_caller,
    finish,
    same_group,
)

pytestmark = pytest.mark.anyio
CUT = Shaping(redundancy=1.5, num_longest=1, deadline=Deadline())
TRIALS = 50
"""Draws of one of four seats: enough that each way of falling is seen, but once in a million runs."""
LONG_TAIL = 5
"""A seed of tail_seed with which one of the last two of six candidates is the first to be drawn."""


# --- seats, and when groups are closed -------------------------------------------


async def test_every_request_starts_a_candidate_of_its_own_at_once() -> None:
    harness = JoiningHarness(lengths(9), SHORTEST)
    for number in range(1, 4):
        caller = harness.send(f"c{number}")
        await settle()
        assert [c.request for c in harness.engine.running] == [f"p:c{i}" for i in range(1, number + 1)]
        assert {c.index for c in harness.engine.running} == {0}
        assert caller.group_id == "group-c1"
        await harness.engine.step()
    for caller in harness.callers:
        caller.disconnect()
    await harness.assert_empty()


async def test_the_last_request_closes_the_group_and_starts_the_extra_candidates() -> None:
    harness = JoiningHarness(lengths(9), SHORTEST)
    callers = await harness.send_all()
    assert harness.recorder.started == 6
    extras = [(c.request, c.index) for c in harness.engine.started[4:]]
    assert extras == [("p:c0", 4), ("p:c0", 5)], "of the first request, beyond its own and those of the others"
    await finish(harness, callers)
    assert all(c.is_answered for c in callers)
    assert same_group(callers)
    assert harness.record("group-c0").outcome is Outcome.COMPLETED


async def test_the_timeout_closes_the_group_early_and_each_request_restarts_the_timeout() -> None:
    harness = JoiningHarness(lengths(9), SHORTEST)
    for name in ("c0", "c1", "c2"):
        harness.send(name)
        await settle()
        await harness.advance_clock(WAIT - 0.5)
    assert harness.recorder.started == 3
    await harness.advance_clock(0.5)
    assert harness.recorder.started == 5, "1.5 times those who came"
    await finish(harness, harness.callers)
    assert len({c.result for c in harness.callers}) == 3
    assert harness.record("group-c0").size == 3


# --- missing callers -------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_single_caller_gets_its_own_candidate(policy: str) -> None:
    def script(request: str, index: int) -> Script:
        return Script(30 if index == 0 else 2)

    harness = JoiningHarness(script, POLICIES[policy])
    [caller] = await harness.send_all(1)
    await harness.advance_clock()
    await finish(harness, [caller])
    assert (caller.result.request, caller.result.index, caller.result.tokens) == ("p:c0", 0, 30)
    assert harness.recorder.started == 1
    assert harness.record("group-c0").size == 1


# --- callers that hang up ----------------------------------------------------------


@pytest.mark.parametrize(("come", "window"), [(2, 0.0), (4, 1.0), (4, 0.0)], ids=["gathers", "allocates", "runs"])
async def test_when_all_callers_disconnect_all_candidates_stop_at_once(come: int, window: float) -> None:
    harness = JoiningHarness(lengths(50), POLICIES["adaptive"], window=window)
    callers = await harness.send_all(come)
    await harness.engine.step()
    for caller in callers:
        caller.disconnect()
    await settle()
    assert harness.engine.running == []
    await harness.advance_clock(window)
    await harness.assert_empty()
    assert len(harness.recorder.cohorts) == (1 if come == 4 and not window else 0)
    [record] = harness.recorder.records
    assert record.outcome is Outcome.CANCELLED
    assert all(c.tokens <= 1 for c in record.candidates)


# --- late callers -------------------------------------------------------------------


async def test_a_late_caller_takes_the_vacant_seat_and_gets_its_trajectory() -> None:
    fell = 0
    for _ in range(TRIALS):
        harness = by_caller(3, 10, 11, 12, 50)
        gone, *rest = await harness.send_all()
        gone.disconnect()
        await harness.steps(4)
        fell_to_it = not any(c.task.done() for c in rest)
        late = harness.send("c4")
        await settle()
        assert late.task.done() == fell_to_it
        fell += fell_to_it
        await finish(harness, [*rest, late])
        assert late.group_id == "group-c0"
        assert sorted(c.result.tokens for c in [*rest, late]) == [3, 10, 11, 12]
        record = harness.record("group-c0")
        assert record.outcome is Outcome.COMPLETED
        assert record.request_ids == ("c0", "c1", "c2", "c3", "c4")
        assert harness.recorder.started == 6, "it starts no candidate"
    assert 0 < fell < TRIALS


async def test_a_trajectory_whose_caller_leaves_in_that_turn_is_kept_for_a_late_caller() -> None:
    for leaver in range(4):
        harness = by_caller(3, 10, 11, 12, 50)
        callers = await harness.send_all()
        await harness.steps(2)
        # In the turn in which a trajectory falls to somebody, before that one has taken it.
        harness.engine.now += 1
        for candidate in harness.engine.running:
            candidate.step(harness.engine.now)
        [[group]] = harness.rollouts.joiner.groups.values()
        while not any(seat.output for seat in group.seats):
            await asyncio.sleep(0)
        [seat] = [place for place, seat in enumerate(group.seats) if seat.output]
        callers[seat].disconnect()
        await settle()
        assert callers[seat].task.cancelled()
        late = harness.send(f"late{leaver}")
        await settle()
        assert late.result.tokens == 3
        await finish(harness, [c for c in callers if c is not callers[seat]])


async def test_a_late_caller_gets_no_seat_in_a_group_that_has_ended() -> None:
    # The group has its record already, without the late request, though a cut trajectory is still to be delivered.
    for _ in range(8):
        harness = JoiningHarness(
            lambda request, index: Script(60 if index else 2 + int(request[-1])), CUT, tail_seed=LONG_TAIL
        )
        gone, *rest = await harness.send_all()
        gone.disconnect()
        harness.runs["group-c0"].set_deadline(9)
        for candidate in harness.engine.started:
            candidate.stop_lag = 300
        await harness.steps(9)
        [record] = harness.recorder.records
        late = harness.send("late")
        await settle()
        assert late.group_id == "group-late"
        for _ in range(25):  # turns in which the engine answers the stops
            await settle()
        await harness.advance_clock()
        await finish(harness, [*rest, late])
        assert late.name not in record.request_ids
        assert {c.result.tokens for c in rest} < {2, 3, 4, 9}


# --- which group ------------------------------------------------------------------


async def test_requests_with_different_prompts_or_names_join_different_groups() -> None:
    harness = JoiningHarness(lengths(9), SHORTEST)
    wanted: dict[tuple[str, str | None], list[Caller]] = {}
    for number in range(4):
        for prompt in ("p", "q"):
            for name in (None, "mine", "yours"):
                wanted.setdefault((prompt, name), []).append(harness.send(f"{prompt}{name}{number}", prompt, name))
    await finish(harness, harness.callers)
    for (prompt, _), callers in wanted.items():
        assert same_group(callers)
        assert {c.result.prompt for c in callers} == {prompt}
        assert len({c.result for c in callers}) == 4
    assert len(harness.recorder.records) == 6


async def test_the_record_of_a_group_has_its_requests_and_its_callers_name_for_it() -> None:
    harness = JoiningHarness(lengths(9), SHORTEST)
    await finish(harness, [harness.send(f"c{i}", name="step 3") for i in range(4)])
    assert harness.record("group-c0").request_ids == ("step 3", "c0", "c1", "c2", "c3")


async def test_groups_that_are_closed_together_are_allocated_together() -> None:
    harness = JoiningHarness(lengths(9), POLICIES["adaptive"])
    for number in range(4):
        for prompt in range(9):
            harness.send(f"{prompt}/{number}", f"p{prompt}")
    await finish(harness, harness.callers)
    [batch] = harness.recorder.cohorts
    assert isinstance(batch, CohortRecord)
    assert (batch.groups, batch.mean_candidates) == (9, 6)


# --- requests that come one after another, as from a pool of trajectories of limited size ---


def observed(harness: JoiningHarness) -> list[bool]:
    """Whether each group was full when it was closed."""
    closed: list[bool] = []
    harness.rollouts.observers.group_closed.add(closed.append)
    return closed


@pytest.mark.parametrize(("name", "wait"), [(None, WAIT), ("uid", WAIT), ("uid", 2 * NAMED_WAIT)])
async def test_a_named_group_is_not_closed_by_the_short_timeout(name: str | None, wait: float) -> None:
    """Its trajectories may all be in their environments."""
    harness = JoiningHarness(lengths(9), SAMPLED, wait=wait)
    closed = observed(harness)
    for number in range(4):
        harness.send(f"c{number}", name=name)
        await settle()
        await harness.advance_clock(0.9 * max(wait, NAMED_WAIT))
    await harness.engine.run()
    assert len({caller.group_id for caller in harness.callers}) == (4 if name is None else 1)
    assert closed == ([False] * 4 if name is None else [True])


async def test_a_named_group_does_not_wait_for_ever() -> None:
    """As where the pool is smaller than the group: the others come only after an answer."""
    harness = JoiningHarness(lengths(9), SAMPLED)
    closed = observed(harness)
    harness.send("c0", name="uid")
    harness.send("c1", name="uid")
    await settle()
    for others in range(6):
        assert closed == [False] * others
        harness.send(f"other {others}", prompt=f"p{others}")
        await settle()
        await harness.advance_clock(NAMED_WAIT / 6)
    assert closed == [False] * 7
    assert harness.callers[0].group_id == harness.callers[1].group_id
    await harness.engine.run()
    assert all(caller.is_answered for caller in harness.callers)
    await harness.assert_empty()


async def test_frequent_groups_with_missing_requests_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    report = JoiningHarness(lengths(9), SAMPLED).rollouts.joiner.report_group_closed
    with caplog.at_level(logging.WARNING):
        for number in range(3 * WINDOW):
            report(is_full=number % 3 > 0, planned_size=8)
        assert len(caplog.records) == 1
        assert "closed with fewer than 8 requests" in caplog.text


@pytest.mark.parametrize(
    ("session", "name"),
    [("uid_3", "uid"), ("a_b_12", "a_b"), ("uid", None), ("uid_x", None), ("_1", None), (None, None)],
)
def test_a_session_names_its_group_if_it_matches_the_pattern(session: str | None, name: str | None) -> None:
    assert Limits(8, group_pattern=re.compile("(.+)_[0-9]+")).group_name_of_session(session) == name
    assert Limits(8).group_name_of_session(session) is None


# --- the engine, the store or our own code fails: every caller gets an error at once ---


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("error", [EngineDead, EngineRefused])
async def test_a_refusing_engine_fails_every_caller_at_once(count: int, error: type[Exception]) -> None:
    harness = JoiningHarness(lengths(9), SAMPLED)
    harness.engine.start_error = error("no")
    callers = [harness.send(f"c{i}") for i in range(count)]
    await harness.assert_empty()  # without waiting for the timeout
    assert [type(c.task.exception()) for c in callers] == [error] * count
    assert [r.outcome for r in harness.recorder.records] == [Outcome.FAILED]
    assert harness.engine.started == []


async def test_a_failing_store_fails_every_caller() -> None:
    harness = JoiningHarness(lengths(9), POLICIES["adaptive"])

    def broken(kind: str, key: str) -> None:
        raise OSError("the disk is gone")

    harness.store.get = broken  # type: ignore[method-assign]  # to fail
    callers = [harness.send(f"c{i}") for i in range(4)]
    await harness.assert_empty()
    assert [str(c.task.exception()) for c in callers] == ["the disk is gone"] * 4
    assert harness.recorder.records == []


async def test_aborting_a_request_answers_its_caller_alone_and_keeps_its_seat() -> None:
    harness = by_caller(3, 10, 11, 12, 50)
    callers = await harness.send_all()
    harness.rollouts.abort("c2")
    await settle()
    assert callers[2].result == SignedOutput("p:c2", 0, 0), "its own candidate's tokens so far"
    late = harness.send("late")
    await finish(harness, [c for c in [*callers, late] if c is not callers[2]])
    assert late.group_id == "group-c0"
    assert sorted(c.result.tokens for c in [*callers, late] if c is not callers[2]) == [3, 10, 12, 50]


@pytest.mark.parametrize("closed", [False, True])
async def test_aborting_a_group_answers_all_callers_at_once(closed: bool) -> None:
    harness = JoiningHarness(lengths(9), SAMPLED)
    callers = await harness.send_all(4 if closed else 3)
    await harness.steps(3)
    harness.rollouts.abort("group-c0")
    late = harness.send("late")
    await settle()
    assert [c.result for c in callers] == [SignedOutput(f"p:c{i}", 0, 3) for i in range(len(callers))]
    assert late.group_id == "group-late"
    harness.rollouts.abort("late")
    await harness.assert_empty()


async def test_a_group_that_fails_while_it_waits_for_its_allocation_leaves_its_cohort() -> None:
    harness = JoiningHarness(lengths(9), POLICIES["adaptive"], window=1.0)
    callers = await harness.send_all()
    harness.engine.kill()
    await settle()
    assert len(harness.recorder.records) == 1
    await harness.advance_clock(1.0)
    await harness.assert_empty()
    assert [type(c.task.exception()) for c in callers] == [EngineDead] * 4
    assert len(harness.recorder.cohorts) == 1


# --- the server stops --------------------------------------------------------


async def test_draining_closes_groups_with_the_requests_that_have_arrived() -> None:
    harness = JoiningHarness(lengths(9), SHORTEST)
    there = [harness.send("c0"), harness.send("c1")]
    await settle()
    harness.rollouts.joiner.drain()
    late = harness.send("c2")
    await settle()
    await finish(harness, [*there, late])
    assert harness.recorder.started == 3, "more would only make them wait"
    assert all(caller.is_answered for caller in (*there, late))
    assert same_group(there)
    assert late.group_id != there[0].group_id


async def test_failing_all_groups_gives_an_error_to_every_caller() -> None:
    harness = JoiningHarness(lengths(9), SHORTEST)
    callers = [*await harness.send_all(), harness.send("alone")]
    await settle()
    error = ServerStopping("the server is stopping", 30)
    harness.rollouts.fail_all(error)
    assert await finish(harness, callers) == [error] * 5
