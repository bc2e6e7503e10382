"""Aborted groups: their callers get what was generated, and nothing is started for them."""

import asyncio
from random import Random

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import CandidateFailed, GroupAborted
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec, OnAbort
from darts_server.types import DiscardReason, FinishReason, Outcome
from tests.rollout.helpers import Harness, collect, lengths
from tests.rollout.joining.joining import POLICIES, JoiningHarness, SigningCandidate, SteppedLoop

pytestmark = pytest.mark.anyio
MOMENTS = [*range(50), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(50, 1000))]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {"loop_factory": SteppedLoop}


def start(harness: Harness, size: int, policy: str = "shortest", *, early: bool = False) -> GroupRun[str, list[int]]:
    plan = harness.plan(size, policy)
    spec = GroupSpec(plan, "p", "g", "p", (7,), delivers_early=early, on_abort=OnAbort.ANSWER)
    return harness.rollouts.start(spec, Allocation(plan.shaping.candidates(size)))


async def test_an_abort_returns_partial_outputs_of_the_candidates_that_started_first() -> None:
    harness = Harness(lengths(3, 9, 4, 30, 5, 50))
    waiting = await harness.begin(start(harness, 4), steps=4)
    harness.rollouts.abort_all("an update")
    trajectories = await waiting
    assert [(t.index, len(t.output)) for t in trajectories] == [(0, 3), (1, 4), (2, 4), (3, 4)]
    assert [t.last for t in trajectories] == [False, False, False, True]
    await settle()
    assert harness.engine.running == []
    assert len(harness.engine.started) == 6
    [record] = harness.recorder.records
    assert record.outcome is Outcome.CANCELLED
    assert {c.reason for c in record.candidates} == {DiscardReason.CANCELLED}
    assert harness.recorder.started == len(record.candidates) == 6
    assert not harness.rollouts.runs
    harness.rollouts.abort_all("a second sweep")
    harness.rollouts.abort("g")


async def test_aborted_candidates_that_have_not_reached_the_engine_are_empty_and_never_reach_it() -> None:
    harness = Harness(lengths(50))
    run = start(harness, 4)
    run.abort()
    assert [t.output for t in await collect(run)] == [[], [], [], []]
    await settle()
    assert harness.engine.running == []
    assert harness.engine.started == []


async def test_a_candidate_that_fails_during_an_abort_is_empty() -> None:
    harness = Harness(lengths(50))
    run = start(harness, 2)
    harness.engine.start_error = CandidateFailed("no memory")
    await asyncio.sleep(0)
    run.abort()
    assert [t.output for t in await collect(run)] == [[], []]


async def test_an_abort_keeps_delivered_trajectories_and_returns_the_other_candidates_partially() -> None:
    harness = Harness(lengths(3, 9, 4, 30, 5, 50))
    run = start(harness, 4, early=True)
    waiting = await harness.begin(run, steps=6)
    run.abort()
    assert sorted((t.index, len(t.output)) for t in await waiting) == [(0, 3), (1, 6), (2, 4), (4, 5)]
    [record] = harness.recorder.records
    assert {c.index for c in record.candidates if c.selected_as} == {0, 2, 4}


async def test_an_aborted_group_that_waits_for_its_restart_returns_no_output() -> None:
    harness = Harness(lengths(50))
    waiting = await harness.begin(start(harness, 2))
    await harness.rollouts.suspend()
    harness.rollouts.abort_all("an update")
    with pytest.raises(GroupAborted, match="an update"):
        await waiting
    harness.rollouts.resume()
    await settle()
    assert harness.engine.running == []


async def test_a_group_can_be_aborted_after_its_restart() -> None:
    harness = Harness(lengths(50))
    waiting = await harness.begin(start(harness, 2), steps=1)
    await harness.rollouts.suspend()
    harness.rollouts.resume()
    await settle()
    await harness.steps(2)
    harness.rollouts.abort_all("an update")
    assert [(t.index, len(t.output)) for t in await waiting] == [(3, 2), (4, 2)]


async def test_an_aborted_request_gets_its_candidate_and_its_group_continues() -> None:
    harness = JoiningHarness(lambda *_: Script(9), POLICIES["shortest"])
    callers = await harness.send_all(4)
    await harness.steps(3)
    harness.rollouts.abort("c1")
    await settle()
    assert (callers[1].result.request, callers[1].result.tokens) == ("p:c1", 3)
    assert not any(caller.task.done() for caller in callers if caller is not callers[1])
    harness.rollouts.abort("c1")
    await harness.steps(9)
    assert sorted(c.result.tokens for c in callers) == [3, 9, 9, 9]
    assert len(harness.engine.started) == 6, "none was started in its place: the others are enough"
    [record] = harness.recorder.records
    assert (record.candidates[1].tokens, record.candidates[1].reason, record.num_eligible) == (
        3,
        DiscardReason.ABORTED,
        5,
    )
    await harness.assert_empty()


async def test_an_aborted_request_whose_candidate_has_not_started_gets_an_empty_output() -> None:
    harness = JoiningHarness(lambda *_: Script(9), POLICIES["shortest"])
    callers = [harness.send(f"c{number}") for number in range(4)]
    while not harness.rollouts.runs:
        await asyncio.sleep(0)
    harness.rollouts.abort("c0")
    await settle()
    await harness.steps(9)
    assert sorted(caller.result.tokens for caller in callers) == [0, 9, 9, 9]
    assert ("p:c0", 0) not in [(each.request, each.index) for each in harness.engine.started]
    await harness.assert_empty()


async def test_a_request_whose_candidate_finishes_during_the_abort_gets_an_empty_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = JoiningHarness(lambda *_: Script(4), POLICIES["shortest"])
    callers = await harness.send_all(4)
    await harness.steps(3)
    # Its last token is under way when the engine gets the abort.
    monkeypatch.setattr(SigningCandidate, "stop", lambda self: self.count_tokens() or 0)
    harness.rollouts.abort("c1")
    await settle()
    await harness.steps(1)
    assert [caller.result.tokens for caller in callers] == [4, 0, 4, 4]
    await harness.assert_empty()


@pytest.mark.parametrize("seed", MOMENTS)
async def test_aborts_at_random_moments_answer_every_caller_once_and_leave_nothing_running(seed: int) -> None:
    rng = Random(seed)
    scripts: dict[tuple[str, int], Script] = {}

    def script(request: str, index: int) -> Script:
        error = CandidateFailed("unlucky") if rng.random() < 0.05 else None
        reason = rng.choice([FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH])
        made = Script(rng.randint(1, 30), rng.choice([0, 0, 5]), reason, error, aborted=rng.random() < 0.05)
        return scripts.setdefault((request, index), made)

    harness = JoiningHarness(script, POLICIES[rng.choice(list(POLICIES))], window=rng.choice([0, 0.02]))
    sent = 0
    for _ in range(60):
        match rng.randrange(8):
            case 0 | 1 | 2 if sent < 24:
                harness.send(f"c{sent}", rng.choice("pq"))
                sent += 1
            case 3 if sent:
                harness.rollouts.abort(f"c{rng.randrange(sent)}")
            case 4 if rng.random() < 0.2:
                harness.rollouts.abort_all("a sweep")
            case 5 if harness.callers and rng.random() < 0.3:
                rng.choice(harness.callers).disconnect()
            case 6:
                await harness.advance_clock(rng.choice([0.02, 5]))
            case _:
                await harness.engine.step()
        if rng.random() < 0.7:
            await settle()
    await settle()  # the last caller has arrived
    started = len(harness.engine.started)
    harness.rollouts.abort_all("the last sweep")
    harness.rollouts.abort_all("and again")
    await settle()
    assert len(harness.engine.started) == started, "nothing is started anew"
    await harness.advance_clock()
    assert all(caller.task.done() for caller in harness.callers)
    await harness.assert_empty()
    records = harness.recorder.records
    assert len({record.group_id for record in records}) == len(records)
    assert harness.recorder.started == sum(len(record.candidates) for record in records)
    taken = [(c.result.request, c.result.index) for c in harness.callers if c.is_answered and c.result.tokens]
    assert len(set(taken)) == len(taken), "a candidate was given twice"
