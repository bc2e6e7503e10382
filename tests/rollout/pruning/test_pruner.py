"""Trajectories are scored by what rewards taught; while no score can be trusted, all are kept and a status says why."""

import math
from dataclasses import replace

import numpy as np
import pytest

from darts_server.engine.port import HiddenState
from darts_server.estimates.calibration import Calibration, CalibrationStatus
from darts_server.group.events import Scored
from darts_server.policy.survival import Pruning
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.pruning.pruner import (
    MISSING_STATE_TOKENS,
    SCORE_BYTES,
    STATUS_REASONS,
    STEP_GROUPS,
    reduce_precision,
)
from darts_server.rollout.pruning.scoring import ScoreKind, ScoringSettings
from darts_server.types import DiscardReason, FinishReason, Outcome, PruningStatus, SelectedAs
from tests.quality.synthetic import WIDTH, SyntheticTask
from tests.rollout.helpers import Documents
from tests.rollout.pruning.bench import FAST, Bench

pytestmark = pytest.mark.anyio


async def test_after_the_cold_start_probably_correct_candidates_are_pruned_more_and_the_keep_ratio_is_met() -> None:
    """And metrics show that qualities are calibrated."""
    bench = Bench().warm(6)
    assert bench.pruner.status is PruningStatus.READY
    before = dict(bench.counter.counts)
    given = [scored for scores, _ in bench.step(64) for scored in scores]
    likely = [x.survival for x in given if x.quality > 0.7]
    unlikely = [x.survival for x in given if x.quality < 0.3]
    assert min(len(likely), len(unlikely)) > 50
    assert np.mean(likely) < np.mean(unlikely) - 0.15
    decided = {name: bench.counter.counts[name] - before[name] for name in ("kept", "pruned")}
    assert sum(decided.values()) == 64 * 8
    assert decided["kept"] / (64 * 8) == pytest.approx(0.5, abs=0.08)
    assert np.mean([x.survival for x in given]) == pytest.approx(0.5, abs=0.03)
    scores, calibrated = bench.pruner.score_metrics(), bench.pruner.calibrated_metrics()
    assert scores == bench.head.report.metrics
    assert (scores.auc or 0) > 0.85
    assert (calibrated.auc or 0) > 0.8
    assert calibrated.calibration_error is not None
    assert calibrated.calibration_error < 0.1


async def test_labels_hold_the_survival_probability_over_all_decisions() -> None:
    bench = Bench(replace(FAST, detect_at=(10, 20)))
    hidden = np.ones(WIDTH)
    for tokens, survival in ((10, 0.5), (20, 0.125)):
        bench.score("g", 0, hidden, tokens)
        bench.pruner.record_kept((None, "g"), 0, survival)
    bench.pruner.learn_reward((None, "g"), 0, True)
    assert bench.head.trainer._replay._survivals[:2].tolist() == [0.125, 0.125]
    assert bench.counter.counts["labels"] == 1


async def test_labels_of_a_sampled_tail_stand_for_all_candidates_of_the_tail() -> None:
    bench = Bench()
    hidden = np.ones(WIDTH)
    for index in range(3):
        bench.score("g", index, hidden)
        bench.pruner.record_kept((None, "g"), index, 0.5)
    record = create_record(*[(20, 0.5)] * 4)
    places = (SelectedAs.SHORT, SelectedAs.LONG, None, SelectedAs.LONG)
    candidates = [replace(c, selected_as=place) for c, place in zip(record.candidates, places, strict=True)]
    bench.pruner.group_ended(replace(record, candidates=candidates, tail_share=0.25))
    for index in range(4):
        bench.pruner.learn_reward((None, "g"), index, True)
    assert bench.head.trainer._replay._survivals[:3].tolist() == [0.5, 0.125, 0.5]


async def test_each_detection_point_has_its_own_calibration() -> None:
    bench = Bench(replace(FAST, detect_at=(10, 20))).warm(4)
    assert bench.pruner.status is PruningStatus.READY
    early, late = bench.pruner._points.values()
    assert len(early.calibrator.labels) > 64
    assert not late.calibrator.labels
    assert bench.score("g", 0, np.ones(WIDTH), 27).survival == 1.0  # past the second point, which has no labels
    assert bench.score("g", 1, np.ones(WIDTH), 19).survival < 1.0


# --- without a score to trust --------------------------------------------------


def assert_all_are_kept(bench: Bench, status: PruningStatus, groups: int = 3) -> None:
    given = [scored for _ in range(groups) for scored in bench.group()[0]]
    assert {scored.survival for scored in given} == {1.0}
    assert all(0 < scored.quality < 1 for scored in given)
    assert bench.pruner.status is status
    assert "pruned" not in bench.counter.counts


def is_logged(caplog: pytest.LogCaptureFixture, status: PruningStatus) -> bool:
    return f"pruning by quality is {status}" in caplog.text and STATUS_REASONS[status] in caplog.text


async def test_no_head_is_created_before_a_trajectory_is_scored(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.pruner.learn_reward((None, "g"), 0, True)
    bench.pruner.record_rewarded_group()
    assert bench.pruner.status.value == "unused"
    assert bench.heads == []
    assert caplog.text == ""
    bench.pruner.start()
    assert bench.head.started
    assert bench.pruner.status is PruningStatus.NO_LABELS
    bench.pruner.close()
    assert bench.head.closed


async def test_all_candidates_are_kept_without_rewards(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    for number, (hidden, _) in enumerate(SyntheticTask().trajectories(300)):
        assert bench.score(f"g{number}", 0, hidden) == Scored(0, 0.5, 1.0)
        bench.pruner.record_kept((None, f"g{number}"), 0, 1.0)
    assert bench.pruner.status is PruningStatus.NO_LABELS
    assert caplog.text.count("pruning by quality") == 1, "logged once, not for each trajectory"


async def test_all_candidates_are_kept_in_the_first_steps_and_with_few_labels(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(replace(FAST, calibration=Calibration(cold_steps=2, cold_labels=160, bins=16)))
    assert_all_are_kept(bench, PruningStatus.FEW_LABELS)  # the head has 24
    assert_all_are_kept(bench, PruningStatus.FEW_LABELS, 5)  # it is ready, and no label so far had a score
    assert_all_are_kept(bench, PruningStatus.COLD, 1)
    bench.version += 1
    assert_all_are_kept(bench, PruningStatus.COLD)
    bench.version += 1
    assert_all_are_kept(bench, PruningStatus.FEW_LABELS, 1)
    bench.warm(2)
    assert bench.pruner.status is PruningStatus.READY
    for status in (PruningStatus.NO_LABELS, PruningStatus.COLD, PruningStatus.FEW_LABELS, PruningStatus.READY):
        assert is_logged(caplog, status)


async def test_all_candidates_are_kept_with_labels_of_one_class() -> None:
    bench = Bench(task=SyntheticTask(offset=0.0, sharpness=0.0))
    bench.task.trajectories = lambda count: iter([(np.ones(WIDTH), 1.0)] * count)  # type: ignore[method-assign]  # of one class
    bench.warm(2)
    assert_all_are_kept(bench, PruningStatus.ONE_CLASS)
    assert bench.group()[0][0].quality > 0.9, "it is the prior"


async def test_a_trajectory_whose_hidden_state_is_not_finite_is_kept_and_not_learned() -> None:
    bench = Bench().warm(4)
    labels, hidden = bench.counter.counts["labels"], np.ones(WIDTH)
    hidden[3] = math.nan
    scored = bench.score("bad", 0, hidden)
    assert scored.survival == 1.0
    assert 0 < scored.quality < 1
    bench.pruner.record_kept((None, "bad"), 0, 1.0)
    bench.pruner.learn_reward((None, "bad"), 0, True)
    assert bench.counter.counts["labels"] == labels
    assert bench.counter.counts["unusable"] == 1
    assert bench.pruner.status is PruningStatus.READY
    assert bench.score("good", 0, np.ones(WIDTH)).survival < 1


async def test_all_candidates_are_kept_when_the_trainer_or_the_probe_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench().warm(3)
    bench.head.is_lost = True
    assert {scored.survival for scored in bench.group()[0]} == {1.0}
    assert bench.pruner.status is PruningStatus.TRAINER_LOST
    bench.width = None
    bench.pruner.group_ended(create_record())
    assert bench.pruner.uses_hidden_states
    assert is_logged(caplog, PruningStatus.PROBE_LOST)


async def test_in_the_cold_start_scores_that_prune_nothing_are_calibrated_and_others_are_the_prior() -> None:
    bench = Bench(replace(FAST, calibration=Calibration(cold_steps=100, cold_labels=64, bins=16))).warm()
    assert bench.pruner.status is PruningStatus.COLD
    assert len({scored.quality for scored in bench.group()[0]}) == 1
    bench.pruning = Pruning(keep_ratio=1.0)
    scores = bench.group(32)[0]
    assert len({scored.quality for scored in scores}) > 2
    assert {scored.survival for scored in scores} == {1.0}


async def test_each_status_of_a_calibration_is_a_status_of_pruning_with_a_reason() -> None:
    assert {PruningStatus(status.value) for status in CalibrationStatus} <= set(STATUS_REASONS) == set(PruningStatus)


# --- log-probs ------------------------------------------------------------------


async def test_scores_from_log_probs_are_calibrated_without_a_head() -> None:
    bench, rng = Bench(replace(FAST, kind=ScoreKind.LOWEST_LOGPROB), width=None), np.random.default_rng(0)
    assert not bench.pruner.uses_hidden_states
    given = []
    for number in range(600):
        right = rng.random() < 0.5
        logprobs = tuple((-rng.random(12) * (0.2 if right else 1.0)).tolist())
        given.append((bench.pruner.score((None, "g"), number, None, logprobs, bench.pruning), right))
        bench.pruner.record_kept((None, "g"), number, 1.0)
        bench.pruner.learn_reward((None, "g"), number, right)
        bench.version = number // 100
        bench.pruner.record_rewarded_group()
    assert bench.heads == []
    assert bench.pruner.status is PruningStatus.READY
    assert np.mean([x.quality for x, right in given[300:] if right]) > 0.8
    assert np.mean([x.quality for x, right in given[300:] if not right]) < 0.2
    assert (bench.pruner.score_metrics().auc or 0) > 0.95


# --- targets, steps, memory -----------------------------------------------------


async def test_the_head_learns_from_hidden_states_and_log_probs_together() -> None:
    bench = Bench(replace(FAST, kind=ScoreKind.HEAD_LOGPROB))
    assert bench.pruner.uses_hidden_states
    assert bench.pruner.uses_logprobs
    rng, blank = np.random.default_rng(0), HiddenState(10, np.zeros(WIDTH, np.float32))
    for index in range(448):  # the states carry no information, the lowest log-prob carries all
        right = bool(rng.random() < 0.5)
        logprobs = (*[-0.1] * 9, -0.2 if right else -2.5)
        bench.pruner.score((None, "g"), index, blank, logprobs, Pruning())
        bench.pruner.learn_reward((None, "g"), index, right)
    assert bench.head.width == WIDTH + 2
    assert (bench.pruner.score_metrics().auc or 0) > 0.95


async def test_states_without_log_probs_are_not_scored_by_a_head_that_needs_both() -> None:
    bench = Bench(replace(FAST, kind=ScoreKind.HEAD_LOGPROB)).warm(1)
    assert bench.counter.counts["unusable"] > 0
    assert "usable" not in bench.counter.counts
    assert bench.pruner.status is PruningStatus.NO_LABELS


@pytest.mark.parametrize("correct", [False, True])
async def test_the_target_of_a_label_is_whether_the_trajectory_is_correct(correct: bool) -> None:
    bench = Bench(ScoringSettings())
    bench.score("g", 0, np.ones(WIDTH), 512)
    bench.pruner.learn_reward((None, "g"), 0, correct)
    assert bench.head.trainer._replay._targets[0] == correct


async def test_a_step_is_a_change_of_the_weights_or_many_groups() -> None:
    bench = Bench()
    bench.group()
    [point] = bench.pruner._points.values()
    assert point.calibrator.steps == 0
    for version, steps in ((0, 0), (1, 1), (1, 1), (2, 2)):
        bench.version = version
        bench.pruner.record_rewarded_group()
        assert point.calibrator.steps == steps
    for _ in range(STEP_GROUPS - 1):
        bench.pruner.record_rewarded_group()
    assert point.calibrator.steps == 2
    bench.pruner.record_rewarded_group()
    assert point.calibrator.steps == 3


async def test_hidden_states_are_stored_at_half_precision_if_their_values_fit() -> None:
    assert reduce_precision(np.asarray([1.5, -2.0], np.float32)).dtype == np.float16
    wide = np.asarray([1.5, 1e6], np.float32)
    assert reduce_precision(wide).dtype == np.float32
    assert reduce_precision(wide).tolist() == wide.tolist()


async def test_memory_is_bounded_and_released() -> None:
    size = SCORE_BYTES + 2 * WIDTH
    bench = Bench(replace(FAST, max_bytes=14 * size))
    for number in range(50):
        bench.score(f"g{number}", 0, np.zeros(WIDTH))
    assert bench.counter.counts["dropped"] == 36
    assert bench.pruner._pending.weight == 14 * size
    for number in range(50):
        bench.pruner.record_dropped((None, f"g{number}"), 0)
    assert bench.pruner._pending.weight == bench.pruner._pending.size == 0


async def test_scores_of_one_caller_push_out_none_of_another() -> None:
    size = SCORE_BYTES + 2 * WIDTH
    bench = Bench(replace(FAST, max_bytes=5 * size))
    for owner, count in (("victim", 1), ("flooder", 20)):
        for number in range(count):
            state = HiddenState(10, np.zeros(WIDTH, np.float32))
            bench.pruner.score((owner, f"g{number}"), 0, state, (), bench.pruning)
    bench.pruner.learn_reward(("victim", "g0"), 0, True)
    assert bench.counter.counts["labels"] == 1


async def test_a_reused_group_id_belongs_to_the_newer_group() -> None:
    bench = Bench()
    bench.score("g", 0, np.zeros(WIDTH))
    bench.pruner.record_kept((None, "g"), 0, 0.5)
    bench.score("g", 0, np.ones(WIDTH))
    bench.pruner.learn_reward((None, "g"), 0, True)
    assert bench.head.trainer._replay._features[0, :3].tolist() == [1.0, 1.0, 1.0]
    assert bench.head.trainer._replay._survivals[0] == 1.0


async def test_two_callers_with_the_same_group_id_reward_their_own_candidates() -> None:
    bench = Bench()
    for owner, value in (("one", 1.0), ("other", 2.0)):
        hidden = np.full(WIDTH, value, np.float32)
        bench.pruner.score((owner, "g"), 0, HiddenState(10, hidden), (), bench.pruning)
    bench.pruner.learn_reward(("one", "g"), 0, True)
    assert bench.head.trainer._replay._features[0, :3].tolist() == [1.0, 1.0, 1.0]
    assert bench.counter.counts["labels"] == bench.pruner._pending.size == 1


async def test_missing_hidden_states_are_counted_for_policies_that_prune() -> None:
    bench = Bench()
    last = 10 + MISSING_STATE_TOKENS
    bench.pruner.group_ended(create_record((last, None), (last + 1, None), (last + 1, 0.5)))
    assert bench.counter.counts == {"states missing": 1}


def create_record(*candidates: tuple[int, float | None]) -> GroupRecord:
    records = [
        CandidateRecord(i, tokens, FinishReason.STOP, None, DiscardReason.MIDDLE, False, 0.0, 1.0, 0, 0, quality)
        for i, (tokens, quality) in enumerate(candidates)
    ]
    return GroupRecord("g", "p", "arrol", 1, Outcome.COMPLETED, records, 0.0, 1.0, None)


# --- the store --------------------------------------------------------------------


async def test_a_restart_continues_with_what_was_learned() -> None:
    store = Documents()
    bench = Bench(store=store).warm(4)
    bench.pruner.close()
    restarted = Bench(store=store, task=SyntheticTask(seed=0), version=3)
    restarted.pruner.start()
    assert restarted.pruner.status is PruningStatus.READY
    one, other = (each.score("x", 0, np.full(WIDTH, 101.0)) for each in (bench, restarted))
    assert one.quality == other.quality
    assert other.survival < 1


async def test_a_restore_of_the_store_is_loaded_while_it_runs() -> None:
    store = Documents()
    bench = Bench(store=store).warm(4)
    bench.pruner._save_soon.run_pending()
    saved = dict(store.kept)
    steps = bench.head.report.steps
    bench.now += 100
    bench.warm(2)
    bench.pruner._save_soon.run_pending()
    assert bench.head.report.steps > steps
    store.kept = dict(saved)
    bench.now += 2
    bench.score("x", 0, np.ones(WIDTH))
    [point] = bench.pruner._points.values()
    assert point.calibrator.steps == 3
    assert bench.head.report.steps < steps + 30
    store.kept = {}
    bench.now += 2
    assert bench.score("y", 0, np.ones(WIDTH)).survival == 1.0
    assert bench.head.report.steps == 0


async def test_a_head_and_calibration_of_another_model_are_not_loaded(caplog: pytest.LogCaptureFixture) -> None:
    store = Documents()
    bench = Bench(store=store).warm(2)
    bench.pruner.close()
    other = Bench(store=store, width=WIDTH + 1)
    other.pruner.start()
    assert other.pruner.status is PruningStatus.NO_LABELS
    assert f"is of hidden states of width {WIDTH}, not {WIDTH + 1}" in caplog.text
    assert "the saved quality head is not used" in caplog.text
    assert other.score("g", 0, np.ones(WIDTH + 1)).survival == 1.0
