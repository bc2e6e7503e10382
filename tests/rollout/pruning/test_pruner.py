"""Trajectories are judged by what rewards taught; where nothing can be trusted, all are kept, and it is said why."""

import math
from dataclasses import replace

import numpy as np
import pytest

from darts_server.engine.port import Probed
from darts_server.policy.pruning.calibration import Calibration
from darts_server.policy.pruning.calibration import CalibrationStatus as CalibrationStatus
from darts_server.policy.pruning.survival import Pruning
from darts_server.quality.types import HeadStatus
from darts_server.rollout.pruning.detection_point import AIM_EVERY, MOST_RULES, Survival
from darts_server.rollout.pruning.pruner import STEP_GROUPS, UNPROBED_TOKENS
from darts_server.rollout.pruning.score_kinds import STATUS_REASONS, ScoreKind, ScoringSettings
from darts_server.rollout.pruning.scorer import Assessment
from darts_server.types import CandidateRecord, DiscardReason, FinishReason, GroupRecord, Outcome, PruningStatus
from tests.quality.synthetic import QUICK, WIDTH, World
from tests.rollout.helpers import Documents
from tests.rollout.pruning.bench import QUICKLY, Bench

pytestmark = pytest.mark.anyio


async def test_after_the_cold_start_the_likely_right_are_pruned_more_and_the_keep_ratio_is_met() -> None:
    bench = Bench().warm(6)
    assert bench.pruner.status is PruningStatus.READY
    before = dict(bench.counter.counts)
    told = [assessment for assessments, _ in bench.step(64) for assessment in assessments]
    likely = [j.survival for j in told if j.quality > 0.7]
    unlikely = [j.survival for j in told if j.quality < 0.3]
    assert min(len(likely), len(unlikely)) > 50
    assert np.mean(likely) < np.mean(unlikely) - 0.15
    drawn = {fate: bench.counter.counts[fate] - before[fate] for fate in ("kept", "pruned")}
    assert sum(drawn.values()) == 64 * 8
    assert drawn["kept"] / (64 * 8) == pytest.approx(0.5, abs=0.08)
    assert np.mean([j.survival for j in told]) == pytest.approx(0.5, abs=0.03)


async def test_chances_are_calibrated_and_the_figures_say_so() -> None:
    bench = Bench().warm(20)
    scores, chances = bench.pruner.score_metrics(), bench.pruner.calibrated_metrics()
    assert scores.auc is not None
    assert scores.auc > 0.85
    assert chances.auc is not None
    assert chances.auc > 0.8
    assert chances.calibration_error is not None
    assert chances.calibration_error < 0.1
    assert scores == bench.head.report.metrics


async def test_labels_know_the_probability_that_held_over_all_draws() -> None:
    bench = Bench(replace(QUICKLY, detect_at=(10, 20)))
    hidden = np.ones(WIDTH)
    for tokens, survival in ((10, 0.5), (20, 0.25)):
        bench.scored("g", 0, hidden, tokens)
        bench.pruner.record_kept("g", 0, survival)
    bench.pruner.learn_reward("g", 0, 1.0, True)
    assert bench.head._replay._survivals[:2].tolist() == [0.125, 0.125]
    assert bench.counter.counts["labels"] == 1


async def test_each_detection_point_has_a_calibration_of_its_own() -> None:
    bench = Bench(replace(QUICKLY, detect_at=(10, 20))).warm(4)
    assert bench.pruner.status is PruningStatus.READY
    early, late = bench.pruner._points[ScoreKind.HEAD].values()
    assert len(early.calibrator.state.labels) > 64
    assert not late.calibrator.state.labels
    assert bench.scored("g", 0, np.ones(WIDTH), 27).survival == 1.0  # some tokens past the second, which knows nothing
    assert bench.scored("g", 1, np.ones(WIDTH), 19).survival < 1.0


# --- neutral ------------------------------------------------------------------


def neutral(bench: Bench, status: PruningStatus, groups: int = 3) -> None:
    told = [assessment for _ in range(groups) for assessment in bench.group()[0]]
    assert {assessment.survival for assessment in told} == {1.0}
    assert all(0 < assessment.quality < 1 for assessment in told)
    assert bench.pruner.status is status
    assert "pruned" not in bench.counter.counts


def said(caplog: pytest.LogCaptureFixture, status: PruningStatus) -> bool:
    return f"pruning by quality is {status}" in caplog.text and STATUS_REASONS[status] in caplog.text


async def test_nothing_is_made_before_a_trajectory_is_scored(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.pruner.group_ended(a_record("uniform"))
    bench.pruner.learn_reward("g", 0, 1.0, True)
    bench.pruner.record_rewarded_group()
    assert bench.pruner.status.value == "unused"
    assert bench.heads == []
    assert caplog.text == ""
    bench.pruner.begin()
    assert bench.head.started
    assert bench.pruner.status is PruningStatus.NO_LABELS
    bench.pruner.close()
    assert bench.head.closed


async def test_rewards_that_never_come(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    for number, (hidden, _) in enumerate(World().trajectories(300)):
        assert bench.scored(f"g{number}", 0, hidden) == Assessment(0.5, 1.0)
        bench.pruner.record_kept(f"g{number}", 0, 1.0)
    assert bench.pruner.status is PruningStatus.NO_LABELS
    assert said(caplog, PruningStatus.NO_LABELS)
    assert caplog.text.count("pruning by quality") == 1, "said once, not for each"


async def test_the_first_steps_and_the_first_labels_only_teach(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(replace(QUICKLY, calibration=Calibration(cold_steps=2, cold_labels=160, bins=16)))
    neutral(bench, PruningStatus.FEW_LABELS)  # the head has 24
    neutral(bench, PruningStatus.COLD, 6)
    bench.version += 1
    neutral(bench, PruningStatus.COLD)
    bench.version += 1
    neutral(bench, PruningStatus.FEW_LABELS, 1)
    bench.warm(2)
    assert bench.pruner.status is PruningStatus.READY
    for status in (PruningStatus.NO_LABELS, PruningStatus.COLD, PruningStatus.FEW_LABELS, PruningStatus.READY):
        assert said(caplog, status)


async def test_labels_of_one_class(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(world=World(offset=0.0, sharpness=0.0))
    bench.world.trajectories = lambda count: iter([(np.ones(WIDTH), 1.0)] * count)  # type: ignore[method-assign]
    bench.warm(2)
    neutral(bench, PruningStatus.ONE_CLASS)
    assert said(caplog, PruningStatus.ONE_CLASS)
    assert bench.group()[0][0].quality > 0.9, "the prior is told"


async def test_a_head_that_diverges(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(settings=replace(QUICK, learning_rate=1e30)).warm(2)
    neutral(bench, PruningStatus.DIVERGED)
    assert said(caplog, PruningStatus.DIVERGED)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
async def test_hidden_states_that_are_not_finite(bad: float) -> None:
    bench = Bench().warm(4)
    labels, hidden = bench.counter.counts["labels"], np.ones(WIDTH)
    hidden[3] = bad
    assessment = bench.scored("bad", 0, hidden)
    assert assessment.survival == 1.0
    assert 0 < assessment.quality < 1
    bench.pruner.record_kept("bad", 0, 1.0)
    bench.pruner.learn_reward("bad", 0, 1.0, True)
    assert bench.counter.counts["labels"] == labels
    assert bench.counter.counts["unusable"] == 1
    assert bench.pruner.status is PruningStatus.READY
    assert bench.scored("good", 0, np.ones(WIDTH)).survival < 1


async def test_a_trainer_that_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench().warm(4)
    bench.head.lost = True
    assert {assessment.survival for assessment in bench.group()[0]} == {1.0}
    assert bench.pruner.status is PruningStatus.TRAINER_LOST
    assert said(caplog, PruningStatus.TRAINER_LOST)


async def test_an_engine_that_stops_telling_states(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench().warm(4)
    bench.width = None
    bench.pruner.group_ended(a_record("arrol"))
    assert bench.pruner.status is PruningStatus.PROBE_LOST
    assert bench.pruner.uses_hidden_states
    assert said(caplog, PruningStatus.PROBE_LOST)


async def test_an_engine_that_stops_telling_states_can_go_on_with_log_probs() -> None:
    bench = Bench(replace(QUICKLY, fallback=ScoreKind.LOGPROB)).warm(4)
    assert bench.pruner.uses_hidden_states
    bench.width = None
    assert not bench.pruner.uses_hidden_states
    assert bench.pruner.score_logprobs("l", 0, (-0.5,) * 10, bench.pruning) == Assessment(0.5, 1.0)
    assert bench.pruner.status is PruningStatus.NO_LABELS
    bench.pruner.learn_reward("l", 0, 1.0, True)
    assert bench.pruner.status is PruningStatus.COLD


# --- log-probs ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ScoreKind.LOGPROB, ScoreKind.LOWEST_LOGPROB])
async def test_without_a_head_the_models_own_log_probs_are_calibrated(kind: ScoreKind) -> None:
    bench, rng = Bench(replace(QUICKLY, kind=kind), width=None), np.random.default_rng(0)
    assert not bench.pruner.uses_hidden_states
    told = []
    for number in range(600):
        right = rng.random() < 0.5
        logprobs = tuple((-rng.random(12) * (0.2 if right else 1.0)).tolist())
        told.append((bench.pruner.score_logprobs("g", number, logprobs, bench.pruning), right))
        bench.pruner.record_kept("g", number, 1.0)
        bench.pruner.learn_reward("g", number, float(right), right)
        bench.version = number // 100
        bench.pruner.record_rewarded_group()
    assert bench.heads == []
    assert bench.pruner.status is PruningStatus.READY
    assert np.mean([j.quality for j, right in told[300:] if right]) > 0.8
    assert np.mean([j.quality for j, right in told[300:] if not right]) < 0.2
    auc = bench.pruner.score_metrics().auc
    assert auc is not None
    assert auc > 0.95


@pytest.mark.parametrize("logprobs", [(), (math.nan,), (-math.inf, -1.0)])
async def test_log_probs_that_are_no_finite_numbers_are_counted(logprobs: tuple[float, ...]) -> None:
    bench = Bench(replace(QUICKLY, kind=ScoreKind.LOGPROB))
    assert bench.pruner.score_logprobs("g", 0, logprobs, bench.pruning) == Assessment(0.5, 1.0)
    assert bench.counter.counts == {"unusable": 1}


# --- targets, steps, memory -----------------------------------------------------


async def test_hidden_states_and_log_probs_are_learned_from_together() -> None:
    bench = Bench(replace(QUICKLY, kind=ScoreKind.HEAD_LOGPROB))
    assert bench.pruner.uses_hidden_states
    assert bench.pruner.uses_logprobs
    rng, blank = np.random.default_rng(0), Probed(10, np.zeros(WIDTH, np.float32))
    for index in range(600):  # the states say nothing, an unlikely token all
        right = bool(rng.random() < 0.5)
        logprobs = (*[-0.1] * 9, -0.2 if right else -2.5)
        bench.pruner.score_state("g", index, blank, logprobs, Pruning())
        bench.pruner.learn_reward("g", index, float(right), right)
    scores = bench.pruner.score_metrics()
    assert bench.head.width == WIDTH + 2
    assert scores.auc is not None
    assert scores.auc > 0.95


async def test_states_without_log_probs_are_no_scores_where_both_are_wanted() -> None:
    bench = Bench(replace(QUICKLY, kind=ScoreKind.HEAD_LOGPROB)).warm(4)
    assert bench.counter.counts["unusable"] > 0
    assert "usable" not in bench.counter.counts
    assert bench.pruner.status is PruningStatus.NO_LABELS


@pytest.mark.parametrize(
    ("judging", "target"),
    [(ScoringSettings(), 1.0), (ScoringSettings(reward_threshold=0.8), 0.0), (ScoringSettings(soft=True), 0.75)],
)
async def test_what_a_reward_says(judging: ScoringSettings, target: float) -> None:
    bench = Bench(judging)
    bench.scored("g", 0, np.ones(WIDTH), 512)
    bench.pruner.learn_reward("g", 0, 0.75, True)
    assert bench.head._replay._targets[0] == target


async def test_a_step_is_a_change_of_the_weights_or_many_groups() -> None:
    bench = Bench()
    bench.group()
    [point] = bench.pruner._points[ScoreKind.HEAD].values()
    assert point.calibrator.state.steps == 0
    for version, steps in ((0, 0), (1, 1), (1, 1), (2, 2)):
        bench.version = version
        bench.pruner.record_rewarded_group()
        assert point.calibrator.state.steps == steps
    for _ in range(STEP_GROUPS - 1):
        bench.pruner.record_rewarded_group()
    assert point.calibrator.state.steps == 2
    bench.pruner.record_rewarded_group()
    assert point.calibrator.state.steps == 3


async def test_trajectories_whose_rewards_do_not_come_are_forgotten_and_counted() -> None:
    bench = Bench(replace(QUICKLY, most_bytes=10_000))
    for number in range(100):
        bench.scored(f"g{number}", 0, np.ones(WIDTH))
    kept = len(bench.pruner._pending)
    assert bench.counter.counts["forgotten"] == 100 - kept
    bench.pruner.learn_reward("g0", 0, 1.0, True)
    assert "labels" not in bench.counter.counts
    bench.pruner.learn_reward("g99", 0, 1.0, True)
    assert bench.counter.counts["labels"] == 1


async def test_a_group_id_that_is_used_again_is_of_the_newer_group() -> None:
    bench = Bench()
    bench.scored("g", 0, np.zeros(WIDTH))
    bench.pruner.record_kept("g", 0, 0.5)
    bench.scored("g", 0, np.ones(WIDTH))
    bench.pruner.learn_reward("g", 0, 1.0, True)
    assert bench.head._replay._features[0, :3].tolist() == [1.0, 1.0, 1.0]
    assert bench.head._replay._survivals[0] == 1.0


async def test_states_that_never_came_are_counted_for_policies_that_prune() -> None:
    bench = Bench()
    late = 10 + UNPROBED_TOKENS
    for policy in ("arrol", "uniform"):
        bench.pruner.group_ended(a_record(policy, (late, None), (late + 1, None), (late + 1, 0.5)))
    assert bench.counter.counts == {"states missing": 1}


def a_record(policy: str, *candidates: tuple[int, float | None]) -> GroupRecord:
    made = [
        CandidateRecord(i, tokens, FinishReason.STOP, None, DiscardReason.MIDDLE, False, 0.0, 1.0, 0, 0, quality)
        for i, (tokens, quality) in enumerate(candidates)
    ]
    return GroupRecord("g", "p", policy, 1, Outcome.COMPLETED, made, 0.0, 1.0, None)


# --- what is kept ---------------------------------------------------------------


async def test_a_restart_goes_on_where_it_was() -> None:
    store = Documents()
    bench = Bench(store=store).warm(6)
    bench.pruner.close()
    again = Bench(store=store, world=World(seed=0), version=3)
    again.pruner.begin()
    assert again.pruner.status is PruningStatus.READY
    probed = Probed(10, np.full(WIDTH, 101.0, np.float32))
    one, other = (b.pruner.score_state("x", 0, probed, (), Pruning()) for b in (bench, again))
    assert one.quality == other.quality
    assert other.survival < 1


async def test_a_restart_in_the_cold_start_goes_on_with_it(caplog: pytest.LogCaptureFixture) -> None:
    store = Documents()
    judging = replace(QUICKLY, calibration=Calibration(cold_steps=3, cold_labels=64, bins=16))
    bench = Bench(judging, store).warm(2)
    bench.group()
    bench.pruner.close()
    again = Bench(judging, store, world=World(seed=0))
    neutral(again, PruningStatus.COLD)
    assert said(caplog, PruningStatus.COLD)
    for point in again.pruner._points[ScoreKind.HEAD].values():
        assert point.calibrator.state.steps == 2
    again.version += 1
    again.group()
    assert again.group()[0][0].survival < 1


async def test_what_is_put_into_the_store_while_it_runs_is_taken() -> None:
    store = Documents()
    bench = Bench(store=store).warm(4)
    bench.pruner._keep.run_pending()
    saved = dict(store.kept)
    steps = bench.head.steps
    bench.now += 100
    bench.warm(4)
    bench.pruner._keep.run_pending()
    assert bench.head.steps > steps
    store.kept = dict(saved)
    bench.now += 2
    bench.scored("x", 0, np.ones(WIDTH))
    [point] = bench.pruner._points[ScoreKind.HEAD].values()
    assert point.calibrator.state.steps == 3
    assert bench.head.steps < steps + 30
    store.kept = {}
    bench.now += 2
    assert bench.scored("y", 0, np.ones(WIDTH)).survival == 1.0
    assert bench.head.steps == 0


async def test_what_was_learned_of_another_model_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    store = Documents()
    bench = Bench(store=store).warm(4)
    bench.pruner.close()
    other = Bench(store=store, width=WIDTH + 1)
    other.pruner.begin()
    assert other.pruner.status is PruningStatus.NO_LABELS
    assert f"is of hidden states of width {WIDTH}, not {WIDTH + 1}" in caplog.text
    assert "the kept quality head is not taken" in caplog.text
    assert other.pruner.score_state("g", 0, Probed(10, np.ones(WIDTH + 1, np.float32)), (), Pruning()).survival == 1.0


# --- survival at one point --------------------------------------------------------


def test_survival_is_aimed_by_the_chances_scored_last_and_kept_for_some_ways_to_prune() -> None:
    survival, rng = Survival(), np.random.default_rng(0)
    assert survival.of(0.3, Pruning()) == pytest.approx(0.5), "the first is kept with the keep ratio"
    chances = rng.random(2000)
    told = [survival.of(float(q), Pruning(keep_ratio=0.4)) for q in chances]
    assert np.mean(told[-1000:]) == pytest.approx(0.4, abs=0.02)
    recent = np.asarray(survival._recent)
    assert told[-1] == pytest.approx(Pruning(keep_ratio=0.4).fit(recent).survival(float(chances[-1])), abs=0.02)
    for i in range(3 * MOST_RULES):
        survival.of(0.5, Pruning(keep_ratio=0.3 + i / 1000))
    assert len(survival._aims) == MOST_RULES
    assert len(recent) > AIM_EVERY


def test_names_of_the_status_cover_those_of_head_and_calibration() -> None:
    for status in (*CalibrationStatus, *(status for status in HeadStatus if status is not HeadStatus.BAD_FEATURE)):
        assert PruningStatus(status.value) in STATUS_REASONS
    assert set(STATUS_REASONS) == set(PruningStatus)
