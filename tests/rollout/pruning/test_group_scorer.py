"""Groups whose candidates are scored while they run, on the scripted engine."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from darts_server.engine.port import HiddenState, RunningCandidate
from darts_server.engine.scripted import Script, ScriptedEngine, settle
from darts_server.exceptions import CandidateFailed, InvalidRequest
from darts_server.group.events import Scored
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, build_policies
from darts_server.policy.survival import Pruning
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.batches.batch import BatchRequest, prepare_batch
from darts_server.rollout.batches.carried import CarriedPrompts
from darts_server.rollout.batches.run import AnswerFormat, BatchRun
from darts_server.rollout.plan import Limits, Planner
from darts_server.rollout.pruning.group_scorer import GroupScorer
from darts_server.rollout.spec import GroupSpec, JoinRequest
from darts_server.types import DiscardReason, PromptSpec, RequestOptions, SelectedAs
from tests.rollout.batches.test_batch import play
from tests.rollout.helpers import Harness, Texts, lengths
from tests.rollout.pruning.fake_scorer import EarlyStateEngine, FakeScorer, create_script

pytestmark = pytest.mark.anyio
SHAPINGS = build_policies(Shaping(), Deadline(), Pruning())
PRUNED, KEPT = 0.0, 1.0
LOGPROBS_ONLY = {"uses_hidden_states": False, "uses_logprobs": True}


def create_house(
    scorer: FakeScorer | None, lengths: list[int], scores: Mapping[int, tuple[float, float]], lag: int = 0
) -> Harness:
    harness = Harness(create_script(lengths, scores, lag), SHAPINGS, scorer=scorer)
    harness.engine.probe_width = 2
    return harness


async def run_group(harness: Harness, size: int = 2, policy: str = "arrol") -> list[CandidateRecord]:
    run = harness.run(size, policy)
    trajectories = await harness.group(run)
    record = harness.record("g")
    assert len(trajectories) == len(record.selected) == size
    return list(record.candidates)


# --- by hidden states -------------------------------------------------------


async def test_a_candidate_that_does_not_survive_its_score_is_stopped() -> None:
    scorer, ended = FakeScorer(4), list[GroupRecord]()
    harness = create_house(scorer, [20], {0: (0.9, PRUNED), 2: (0.25, KEPT)})
    harness.rollouts.observers.scored_group_ended.add(ended.append)
    candidates = await run_group(harness)
    [unsampled] = [c.index for c in candidates if c.reason is DiscardReason.MIDDLE]
    assert candidates[0].reason is DiscardReason.PRUNED
    assert (candidates[0].tokens, candidates[0].finish_reason) == (4, None)
    assert candidates[0].quality == pytest.approx(0.9)
    assert [c.survival for c in candidates] == [0.0, 1.0, 1.0, 1.0]
    assert {c.selected_as for c in candidates} == {None, SelectedAs.SURVIVOR}
    assert sorted(scorer.kept) == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert sorted(scorer.dropped) == [0, unsampled]
    assert ended == [harness.record("g")]


async def test_the_latest_score_counts_and_survival_multiplies() -> None:
    scorer = FakeScorer(2, 6)

    def script(_: str, index: int) -> Script:
        return Script(20, hidden=lambda n: (n / 10, 1.0 if index else n / 8))

    harness = Harness(script, SHAPINGS, scorer=scorer)
    harness.engine.probe_width = 2
    candidates = await run_group(harness)
    assert [c.quality for c in candidates[1:]] == pytest.approx([0.6, 0.6, 0.6])
    assert scorer.scored_states[:4] == [(i, 2) for i in range(4)]
    assert candidates[0].survival in (pytest.approx(2 / 8), pytest.approx(2 / 8 * 6 / 8))
    assert [index for index, _ in scorer.kept].count(1) == 2


async def test_a_score_of_an_ended_candidate_does_not_prune_it_and_is_recorded_while_the_group_runs() -> None:
    scorer = FakeScorer(4)
    harness = create_house(scorer, [5, 20], {0: (0.25, PRUNED)}, lag=3)
    candidates = await run_group(harness)
    assert (candidates[0].quality, candidates[0].survival) == (0.25, 1.0)
    assert 0 not in {index for index, _ in scorer.kept}


async def test_after_the_groups_end_only_returned_candidates_are_scored() -> None:
    scorer = FakeScorer(4)
    harness = create_house(scorer, [5], {}, lag=3)
    candidates = await run_group(harness)
    assert not scorer.scored_states
    await harness.steps(3)
    returned = [(c.index, 4) for c in candidates if c.selected_as is not None]
    assert scorer.scored_states == returned
    assert sorted([*scorer.dropped, *(index for index, _ in returned)]) == [0, 1, 2, 3]


async def test_a_state_that_comes_before_the_candidate_is_marked_as_started_waits() -> None:
    scorer = FakeScorer(4)
    harness = Harness(create_script([20], {0: (0.9, PRUNED)}), SHAPINGS, scorer=scorer, engine=EarlyStateEngine)
    harness.engine.probe_width = 2
    candidates = await run_group(harness)
    assert (candidates[0].reason, candidates[0].tokens) == (DiscardReason.PRUNED, 0)


async def test_failed_stopped_and_cancelled_candidates_are_dropped() -> None:
    scorer = FakeScorer(4)

    def script(_: str, index: int) -> Script:
        return Script(6, error=CandidateFailed("broken")) if index == 0 else Script(20, hidden=lambda _: (0.5, 1.0))

    harness = Harness(script, SHAPINGS, scorer=scorer)
    harness.engine.probe_width = 2
    run = harness.run(2, "arrol")
    await settle()
    await harness.steps(7)
    assert scorer.dropped == []
    run.cancel()
    assert sorted(scorer.dropped) == [0, 1, 2, 3]


async def test_candidates_of_policies_that_do_not_prune_are_not_probed() -> None:
    scorer = FakeScorer(4)
    harness = create_house(scorer, [20], dict.fromkeys(range(6), (0.5, PRUNED)))
    candidates = await run_group(harness, policy="darts")
    assert all(started.probe is None for started in harness.engine.started)
    assert [(c.quality, c.survival) for c in candidates] == [(None, 1.0)] * len(candidates)
    assert (scorer.scored_states, scorer.kept, scorer.dropped) == ([], [], [])


# --- by hidden states and log-probs ----------------------------------------------------------------


async def test_a_state_is_scored_with_the_log_probs_of_its_tokens() -> None:
    scorer = FakeScorer(4, 8, uses_logprobs=True)
    harness = create_house(scorer, [20], {0: (0.9, PRUNED), 2: (0.25, KEPT)})
    candidates = await run_group(harness)
    assert candidates[0].reason is DiscardReason.PRUNED
    assert sum(c.reason is DiscardReason.MIDDLE for c in candidates) == 1
    assert sorted(scorer.scored_states) == [(0, 4), *((i, tokens) for i in (1, 2, 3) for tokens in (4, 8))]


async def test_a_state_that_comes_after_the_end_has_no_log_probs_and_no_score() -> None:
    scorer = FakeScorer(4, uses_logprobs=True)
    candidates = await run_group(create_house(scorer, [5, 20], dict.fromkeys(range(4), (0.5, KEPT)), lag=3))
    assert [c.quality is None for c in candidates] == [True, False, False, False]
    assert sorted(index for index, _ in scorer.scored_states) == [1, 2, 3]


async def test_a_state_waits_until_its_candidate_runs_and_its_log_probs_are_there() -> None:
    scorer = FakeScorer(4, uses_logprobs=True)
    script = create_script([20], dict.fromkeys(range(4), (0.5, KEPT)))
    running: dict[int, RunningCandidate[list[int]]] = {}
    received: list[Scored] = []
    group_scorer = GroupScorer(scorer, (None, "g"), Pruning(), running, received.append)
    probe = group_scorer.create_probe(0)
    assert (probe.detect_at, probe.logprobs) == ((4,), True)
    probe.on_state(HiddenState(4, np.asarray([0.5, 1.0], dtype=np.float32)))
    assert (group_scorer.poll(), received) == ([], [])
    engine = ScriptedEngine(script)
    running[0] = await engine.start("g", 0)
    group_scorer.begin_reporting(0)
    await engine.step()
    assert group_scorer.poll() == [], "the engine has reported fewer tokens"
    for _ in range(4):
        await engine.step()
    assert [scored.index for scored in group_scorer.poll()] == [0]
    assert group_scorer.poll() == []


# --- by log-probs -----------------------------------------------------------


async def test_log_probs_are_scored_once_per_point_for_exactly_the_tokens_up_to_it() -> None:
    scorer = FakeScorer(4, 6, **LOGPROBS_ONLY, survival=1.0)
    harness = Harness(lengths(20), SHAPINGS, scorer=scorer)
    await run_group(harness)
    assert sorted(scorer.scored_logprobs) == [(i, n) for i in range(4) for n in (4, 6)]
    assert all(c.probe is not None and c.probe.logprobs and not c.probe.detect_at for c in harness.engine.started)
    assert sorted(scorer.kept) == [(i, 1.0) for i in range(4) for _ in (4, 6)]


async def test_a_late_poll_scores_all_points_that_were_passed() -> None:
    scorer = FakeScorer(2, 3, 9, **LOGPROBS_ONLY, survival=1.0)
    harness = Harness(lengths(20), SHAPINGS, scorer=scorer)
    run = harness.run(2, "arrol")
    await settle()
    for candidate in harness.engine.started:
        candidate.generated = 5
    run.poll()
    assert scorer.scored_logprobs == [(i, n) for i in range(4) for n in (2, 3)]
    run.cancel()


# --- groups of single requests ----------------------------------------------


async def test_single_requests_are_scored_at_once_and_pruned_when_the_group_is_complete() -> None:
    scorer = FakeScorer(2)
    harness = create_house(scorer, [30], {0: (0.5, PRUNED)})
    plan = harness.rollouts.plan(1, RequestOptions("arrol", group_size=2))
    assert plan is not None

    async def call(name: str) -> list[int]:
        joining = JoinRequest("p", name, plan, "p", "p", harness.rollouts.admission.admit(1))
        return await harness.rollouts.joiner.join(joining, lambda _: None)

    first = asyncio.create_task(call("a"))
    await settle()
    await harness.steps(4)
    assert scorer.scored_states == [(0, 2)]
    assert harness.engine.started[0].is_running
    second = asyncio.create_task(call("b"))
    await settle()
    assert not harness.engine.started[0].is_running
    await harness.engine.run()
    assert [len(await task) for task in (first, second)] == [30, 30]


# --- refusals ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (None, "'arrol' prunes by quality, which this server cannot score; use another policy"),
        (FakeScorer(4), "'arrol' prunes by hidden states, which this engine does not report; .* --quality logprob"),
    ],
)
async def test_pruning_is_refused_where_nothing_can_be_scored(scorer: FakeScorer | None, message: str) -> None:
    harness = Harness(lengths(5), SHAPINGS, scorer=scorer)
    with pytest.raises(InvalidRequest, match=message) as refused:
        harness.plan(2, "arrol")
    assert refused.value.field == "policy"
    with pytest.raises(InvalidRequest, match=message):
        await submit_under(harness, "arrol")
    assert harness.plan(2, "darts").policy == "darts"


# --- all survivors ----------------------------------------------------------


async def submit_under(harness: Harness, policy: str, **options: Any) -> BatchRun:
    planner, kept = Planner(SHAPINGS, policy, Limits(64)), CarriedPrompts()
    batch = BatchRequest([PromptSpec(text="5")], 2, **options)
    harness.rollouts.planner = planner
    prepared = await prepare_batch(batch, harness.rollouts, Texts(), lambda _: planner, kept)
    return BatchRun(prepared, harness.rollouts, Texts(), kept, AnswerFormat())


@pytest.mark.parametrize("policy", ["arrol", "darts+arrol"])
@pytest.mark.parametrize("pruned", [0, 1, 4])
async def test_a_caller_who_wants_all_survivors_gets_them_and_at_least_one(policy: str, pruned: int) -> None:
    harness = create_house(FakeScorer(4), [20], dict.fromkeys(range(pruned), (0.5, PRUNED)))
    [result] = await play(harness, await submit_under(harness, policy, survivors=True, budget=4))
    assert result.record is not None
    pruned_ones = [c.index for c in result.record.candidates if c.reason is DiscardReason.PRUNED]
    assert pruned_ones == list(range(min(pruned, 3)))
    assert list(result.samples) == [i for i in range(4) if i not in pruned_ones]
    assert result.record.candidates[3].survival == 1.0, "the true probability, as it was kept or needed"


@pytest.mark.parametrize(
    ("policy", "survivors", "size"),
    [("arrol", None, 3), ("arrol", False, 2), ("darts+arrol", None, 2), ("darts", None, 2)],
)
async def test_a_batch_has_all_survivors_by_default_under_arrol_alone(
    policy: str, survivors: bool | None, size: int
) -> None:
    harness = create_house(FakeScorer(4), [20], {0: (0.5, PRUNED)})
    [result] = await play(harness, await submit_under(harness, policy, survivors=survivors))
    assert len(result.samples) == size


async def test_survivors_of_a_policy_that_does_not_prune_are_refused() -> None:
    harness = create_house(FakeScorer(4), [20], {})
    with pytest.raises(InvalidRequest, match="'darts' does not prune; leave it out") as refused:
        await submit_under(harness, "darts", survivors=True)
    assert refused.value.field == "survivors"


async def test_a_stream_of_tokens_yields_survivors_when_all_have_ended() -> None:
    harness = create_house(FakeScorer(4), [10, 20], {1: (0.5, PRUNED)})
    plan = harness.plan(2, "arrol")
    plan = replace(plan, shaping=replace(plan.shaping, return_survivors=True))
    spec = GroupSpec(plan, "p", "g", tail_seed=(7,), delivers_early=True)
    run = harness.rollouts.start(spec, Allocation(4))
    trajectories = await harness.group(run)
    assert [(t.index, t.last) for t in trajectories] == [(0, False), (2, False), (3, True)]
    assert run.has_ended
