"""The head learns, follows drift, and returns the prior with a status while it cannot be trusted."""

import math
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from darts_server.policy.pruning.score_metrics import auc
from darts_server.quality.head import Head
from darts_server.quality.types import HeadSettings, HeadStatus, Score, TrainingResult
from tests.quality.synthetic import QUICK, WIDTH, SyntheticTask, train_step, trained_head


def unseen_auc(head: Head, task: SyntheticTask) -> float:
    seen = [(head.score(hidden, 512).value, target) for hidden, target in task.trajectories(600)]
    found = auc(*zip(*seen, strict=True))
    assert found is not None
    return found


# --- learning ---------------------------------------------------------------


def test_it_separates_correct_from_wrong_trajectories_that_it_has_not_seen() -> None:
    """The best possible AUC here is about 0.94."""
    head = trained_head(task := SyntheticTask())
    assert head.status is HeadStatus.READY
    assert unseen_auc(head, task) > 0.85


def test_it_follows_a_policy_that_drifts() -> None:
    head = trained_head(task := SyntheticTask())
    for _ in range(25):
        task.drift(0.25)
        train_step(head, task)
    metrics = head.metrics()
    assert unseen_auc(head, task) > 0.8
    assert unseen_auc(trained_head(SyntheticTask()), task) < 0.75  # without the later trainings
    assert metrics.auc is not None
    assert metrics.auc > 0.8


def test_metrics_are_over_labels_that_were_not_trained_on() -> None:
    """Random labels can be memorised, but not predicted."""
    head = trained_head(SyntheticTask(sharpness=0.0), rounds=16)
    metrics = head.metrics()
    assert metrics.labels == 15 * 64  # none before the first training
    assert metrics.auc is not None
    assert 0.4 < metrics.auc < 0.6
    assert metrics.brier is not None
    assert metrics.brier > 0.24


def test_one_head_distinguishes_positions() -> None:
    """Nearly all that are scored late are correct, nearly none that are scored early."""
    head, rng = Head(WIDTH, QUICK), np.random.default_rng(0)
    for _ in range(400):
        late = rng.random() < 0.5
        head.learn(rng.normal(size=WIDTH), 512 if late else 128, float(rng.random() < (0.9 if late else 0.1)))
    head.train(300)
    hidden = np.zeros(WIDTH)
    assert head.score(hidden, 512).value > 0.7
    assert head.score(hidden, 128).value < 0.3
    assert head.score(hidden, 513).value == pytest.approx(head.score(hidden, 512).value, abs=0.02)


def test_labels_of_survivors_are_weighted_for_the_pruned_ones() -> None:
    """Features carry no information, and correct ones survive five times as often: weights give the true share, 1/2."""
    shares = {}
    for corrected in (False, True):
        head, rng = Head(WIDTH, replace(QUICK, corrected=corrected, capacity=2048)), np.random.default_rng(0)
        for _ in range(2000):
            right = rng.random() < 0.5
            survival = 0.75 if right else 0.15
            if rng.random() < survival:
                head.learn(np.zeros(WIDTH), 512, float(right), survival)
        head.train(300)
        shares[corrected] = head.score(np.zeros(WIDTH), 512).value
    assert shares[False] > 0.75
    assert shares[True] == pytest.approx(0.5, abs=0.1)


def test_soft_targets_are_learned_as_probabilities() -> None:
    head, rng = Head(WIDTH, QUICK), np.random.default_rng(0)
    for i in range(400):
        head.learn(np.full(WIDTH, i % 2) + 0.01 * rng.normal(size=WIDTH), 512, 0.8 if i % 2 else 0.3)
    head.train(400)
    assert head.score(np.ones(WIDTH), 512).value == pytest.approx(0.8, abs=0.07)
    assert head.score(np.zeros(WIDTH), 512).value == pytest.approx(0.3, abs=0.07)


def test_equal_seeds_give_equal_heads() -> None:
    one, other = trained_head(SyntheticTask(), rounds=3), trained_head(SyntheticTask(), rounds=3)
    different = trained_head(SyntheticTask(), rounds=3, settings=replace(QUICK, seed=1))
    assert one.state() == other.state() != different.state()


# --- returning the prior ----------------------------------------------------------


def test_before_the_first_training_the_score_is_the_prior_and_the_status_says_why() -> None:
    head = Head(WIDTH, QUICK)
    hidden = np.zeros(WIDTH)
    assert head.score(hidden, 512) == Score(0.5, HeadStatus.NO_LABELS)
    assert head.train(5) == TrainingResult(0, None)
    head.learn(hidden, 512, 1.0)
    score = head.score(hidden, 512)
    assert score.value == pytest.approx(2 / 3)
    assert score.status is HeadStatus.FEW_LABELS
    for i in range(QUICK.min_labels):
        head.learn(hidden + i, 512, float(i % 2))
    assert head.score(hidden, 512).status is HeadStatus.UNTRAINED
    assert head.train(5).steps == 5
    assert head.score(hidden, 512).status is head.status is HeadStatus.READY
    assert head.steps == 5


@pytest.mark.parametrize("target", [0.0, 1.0, 0.3])
def test_with_labels_of_one_class_the_score_is_the_prior(target: float) -> None:
    head, rng = Head(WIDTH, QUICK), np.random.default_rng(0)
    for _ in range(200):
        head.learn(rng.normal(size=WIDTH), 512, target)
    assert head.train(5) == TrainingResult(0, None)
    score = head.score(np.zeros(WIDTH), 512)
    assert score.value == pytest.approx(target, abs=0.01)
    assert score.status is HeadStatus.ONE_CLASS


def test_a_trained_head_returns_the_prior_while_all_labels_in_the_buffer_are_equal() -> None:
    head = trained_head(SyntheticTask())
    for hidden, _ in SyntheticTask(seed=1).trajectories(QUICK.capacity):
        head.learn(hidden, 512, 1.0)
    assert head.score(np.zeros(WIDTH), 512).status is HeadStatus.ONE_CLASS
    train_step(head, SyntheticTask())
    assert head.status is HeadStatus.READY


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_features_that_are_not_finite_change_nothing(bad: float) -> None:
    head = trained_head(task := SyntheticTask())
    before, hidden = head.state(), np.zeros(WIDTH)
    hidden[3] = bad
    assert not head.learn(hidden, 512, 1.0)
    score = head.score(hidden, 512)
    assert score.status is HeadStatus.BAD_FEATURE
    assert 0 < score.value < 1
    assert head.state() == before
    assert unseen_auc(head, task) > 0.85


def test_an_outlier_does_not_cause_a_divergence() -> None:
    head = trained_head(task := SyntheticTask())
    head.learn(np.full(WIDTH, 1e30), 512, 1.0)
    head.train(30)
    assert head.status is HeadStatus.READY
    for _ in range(12):
        train_step(head, task)
    assert head.divergences == 0


def test_a_training_that_diverges_is_undone() -> None:
    task = SyntheticTask()
    head = Head(WIDTH, replace(QUICK, learning_rate=1e36))
    for hidden, target in task.trajectories(64):
        head.learn(hidden, 512, target)
    before = head.state()
    assert head.train(50) == TrainingResult(0, None)
    assert (head.status, head.divergences, head.steps) == (HeadStatus.DIVERGED, 1, 0)
    assert head.state() == before
    assert head.score(np.zeros(WIDTH), 512).value == pytest.approx(0.5, abs=0.2)
    assert head.train(50) == TrainingResult(0, None)
    assert head.divergences == 2


def test_the_training_after_a_divergence_starts_from_the_last_good_weights() -> None:
    """At this learning rate the first step from the initial weights is good, and the second one diverges."""
    head = Head(WIDTH, replace(QUICK, learning_rate=1e4))
    for hidden, target in SyntheticTask(sharpness=0.0).trajectories(64):
        head.learn(hidden, 512, target)
    assert head.train(2) == TrainingResult(0, None)
    assert head.train(1).steps == 1
    assert (head.status, head.divergences) == (HeadStatus.READY, 1)


def test_a_loss_that_explodes_is_a_divergence_even_if_it_is_finite() -> None:
    head = Head(WIDTH, replace(QUICK, learning_rate=1e4))
    for hidden, target in SyntheticTask(sharpness=0.0).trajectories(64):
        head.learn(hidden, 512, target)
    assert head.train(1).steps == 1  # kept, so all its weights are finite
    assert head.train(1) == TrainingResult(0, None)
    assert (head.status, head.divergences, head.steps) == (HeadStatus.DIVERGED, 1, 1)


# --- time and threads -------------------------------------------------------


def test_training_stops_when_its_time_is_up() -> None:
    ticks = iter(range(1000))
    head = Head(WIDTH, QUICK, clock=lambda: float(next(ticks)))
    for hidden, target in SyntheticTask().trajectories(64):
        head.learn(hidden, 512, target)
    assert head.train(100, seconds=3.5).steps == 3
    assert head.train(100, seconds=0.0) == TrainingResult(0, None)
    assert head.status is HeadStatus.READY


def test_scoring_and_learning_continue_during_a_training() -> None:
    """Each score is from one of the snapshots, none from a half-finished training."""
    task = SyntheticTask()
    head = Head(WIDTH, QUICK)
    for hidden, target in task.trajectories(64):
        head.learn(hidden, 512, target)
    probe, trained = np.full(WIDTH, 101.0), [head.score(np.full(WIDTH, 101.0), 512).value]
    done = threading.Event()

    def train() -> None:
        try:
            for _ in range(40):
                head.train(3)
                trained.append(head.score(probe, 512).value)
        finally:
            done.set()

    thread = threading.Thread(target=train)
    thread.start()
    scores = []
    while not done.wait(0.001):  # without a pause the threads mostly wait for each other's lock
        hidden, target = next(task.trajectories(1))
        head.learn(hidden, 512, target)
        scores.append(head.score(probe, 512))
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert head.steps == 120
    assert {s.value for s in scores if s.status is HeadStatus.READY} <= set(trained)


def test_concurrent_trainings_run_one_after_the_other() -> None:
    head = Head(WIDTH, QUICK)
    for hidden, target in SyntheticTask().trajectories(64):
        head.learn(hidden, 512, target)
    threads = [threading.Thread(target=head.train, args=(20,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for hidden, target in SyntheticTask(seed=1).trajectories(64):
        head.learn(hidden, 512, target)
    for thread in threads:
        thread.join(timeout=60)
    assert (head.steps, head.divergences) == (60, 0)


# --- what is refused --------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "position", "target", "survival"),
    [
        (np.zeros(WIDTH + 1), 512, 1.0, 1.0),
        (np.zeros((1, WIDTH)), 512, 1.0, 1.0),
        (np.zeros(WIDTH), 0, 1.0, 1.0),
        (np.zeros(WIDTH), 512, 1.5, 1.0),
        (np.zeros(WIDTH), 512, math.nan, 1.0),
        (np.zeros(WIDTH), 512, 1.0, 0.0),
    ],
)
def test_arguments_out_of_range_are_refused(
    hidden: np.ndarray[tuple[int, ...], np.dtype[np.float64]], position: int, target: float, survival: float
) -> None:
    head = Head(WIDTH, QUICK)
    with pytest.raises(ValueError, match="must"):
        head.learn(hidden, position, target, survival)
    assert head.status is HeadStatus.NO_LABELS


@pytest.mark.parametrize(
    "wrong", [{"hidden": 0}, {"batch_size": 0}, {"min_labels": 0}, {"capacity": 8}, {"half_life": 0.0}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        HeadSettings(**wrong)
