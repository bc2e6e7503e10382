"""The head learns, follows drift, and returns the prior with a status while it cannot be trusted."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from darts_server.estimates.score_metrics import auc
from darts_server.quality.head import Head, Network, ReplayBuffer
from darts_server.quality.snapshot import Snapshot, Standardiser
from darts_server.quality.types import HeadSettings, Score
from darts_server.types import PruningStatus
from tests.quality.synthetic import QUICK, WIDTH, SyntheticTask, scorer, train_step, trained_head


def unseen_auc(head: Head, task: SyntheticTask) -> float:
    scored = scorer(head)
    seen = [(scored.score(hidden, 512).value, target) for hidden, target in task.trajectories(600)]
    found = auc(*zip(*seen, strict=True))
    assert found is not None
    return found


def test_the_head_separates_unseen_trajectories_and_follows_a_policy_that_drifts() -> None:
    """The best possible AUC here is about 0.94."""
    head, old = trained_head(task := SyntheticTask()), Head(WIDTH, QUICK)
    assert head.status is PruningStatus.READY
    assert unseen_auc(head, task) > 0.85
    old.restore(head.state())
    for _ in range(18):
        task.drift(0.3)
        train_step(head, task)
    metrics = head.report.metrics
    assert unseen_auc(head, task) > 0.8
    assert unseen_auc(old, task) < 0.75
    assert metrics.auc is not None
    assert metrics.auc > 0.8


def test_metrics_are_about_labels_that_were_not_trained_on() -> None:
    """Random labels can be memorised, but not predicted."""
    head = trained_head(SyntheticTask(sharpness=0.0), rounds=10)
    metrics = head.report.metrics
    # Labels before the first training do not count.
    assert metrics.labels == 9 * 64
    assert metrics.auc is not None
    assert 0.4 < metrics.auc < 0.6
    assert metrics.brier is not None
    assert metrics.brier > 0.24


def test_one_head_distinguishes_positions() -> None:
    """Nearly all that are scored late are correct, nearly none that are scored early."""
    head = Head(WIDTH, QUICK)
    rng = np.random.default_rng(0)
    for _ in range(400):
        late = rng.random() < 0.5
        head.learn(rng.normal(size=WIDTH), 512 if late else 128, float(rng.random() < (0.9 if late else 0.1)))
    head.train(150)
    hidden = np.zeros(WIDTH)
    assert scorer(head).score(hidden, 512).value > 0.7
    assert scorer(head).score(hidden, 128).value < 0.3
    assert scorer(head).score(hidden, 513).value == pytest.approx(scorer(head).score(hidden, 512).value, abs=0.02)


def test_weights_of_survivors_stand_for_pruned_trajectories() -> None:
    """Features carry no information, and correct ones survive five times as often: weights give the true share, 1/2."""
    shares = {}
    for corrected in (False, True):
        head = Head(WIDTH, replace(QUICK, capacity=2048))
        rng = np.random.default_rng(0)
        for _ in range(2000):
            right = rng.random() < 0.5
            survival = 0.75 if right else 0.15
            if rng.random() < survival:
                head.learn(np.zeros(WIDTH), 512, float(right), survival if corrected else 1.0)
        head.train(150)
        shares[corrected] = scorer(head).score(np.zeros(WIDTH), 512).value
    assert shares[False] > 0.75
    assert shares[True] == pytest.approx(0.5, abs=0.1)


def test_soft_targets_are_learned_as_probabilities() -> None:
    head = Head(WIDTH, QUICK)
    rng = np.random.default_rng(0)
    for i in range(400):
        head.learn(np.full(WIDTH, i % 2) + 0.01 * rng.normal(size=WIDTH), 512, 0.8 if i % 2 else 0.3)
    head.train(200)
    assert scorer(head).score(np.ones(WIDTH), 512).value == pytest.approx(0.8, abs=0.07)
    assert scorer(head).score(np.zeros(WIDTH), 512).value == pytest.approx(0.3, abs=0.07)


def test_until_the_first_training_the_score_is_the_prior_and_the_status_says_why() -> None:
    head = Head(WIDTH, QUICK)
    hidden = np.zeros(WIDTH)
    assert scorer(head).score(hidden, 512) == Score(0.5, PruningStatus.NO_LABELS)
    assert head.train(5) == 0
    head.learn(hidden, 512, 1.0)
    score = scorer(head).score(hidden, 512)
    assert score.value == pytest.approx(2 / 3)
    assert score.status is PruningStatus.FEW_LABELS
    for i in range(QUICK.min_labels):
        head.learn(hidden + i, 512, float(i % 2))
    assert scorer(head).score(hidden, 512).status is PruningStatus.UNTRAINED
    assert head.train(5) == 5
    assert scorer(head).score(hidden, 512).status is head.status is PruningStatus.READY
    assert head.steps == 5


@pytest.mark.parametrize("target", [0.0, 0.3])
@pytest.mark.parametrize("rounds", [0, 1])
def test_with_labels_of_one_class_the_score_is_the_prior_even_after_training(target: float, rounds: int) -> None:
    head = trained_head(SyntheticTask(), rounds)
    for hidden, _ in SyntheticTask(seed=1).trajectories(QUICK.capacity):
        head.learn(hidden, 512, target)
    assert head.train(5) == 0
    score = scorer(head).score(np.zeros(WIDTH), 512)
    assert score.value == pytest.approx(target, abs=0.01)
    assert score.status is PruningStatus.ONE_CLASS
    train_step(head, SyntheticTask())
    assert head.status is PruningStatus.READY


def test_an_outlier_does_not_cause_a_divergence() -> None:
    head = trained_head(task := SyntheticTask(), rounds=3)
    head.learn(np.full(WIDTH, 1e30), 512, 1.0)
    head.train(30)
    assert head.status is PruningStatus.READY
    for _ in range(3):
        train_step(head, task)
    assert head.report.divergences == 0


def test_a_training_that_diverges_is_undone() -> None:
    task = SyntheticTask()
    head = Head(WIDTH, replace(QUICK, learning_rate=1e36))
    for hidden, target in task.trajectories(64):
        head.learn(hidden, 512, target)
    before = head.state()
    assert head.train(50) == 0
    assert (head.status, head.report.divergences, head.steps) == (PruningStatus.DIVERGED, 1, 0)
    assert head.state() == before
    assert scorer(head).score(np.zeros(WIDTH), 512).value == pytest.approx(0.5, abs=0.2)
    assert head.train(50) == 0
    assert head.report.divergences == 2


def test_a_loss_that_explodes_is_a_divergence_and_the_last_good_weights_stay() -> None:
    """At this learning rate the first step from the initial weights is good, and the second one has too high a loss."""
    head = Head(WIDTH, replace(QUICK, learning_rate=1e4))
    for hidden, target in SyntheticTask(sharpness=0.0).trajectories(64):
        head.learn(hidden, 512, target)
    assert head.train(2) == 0
    # The training counts, so all weights are finite.
    assert head.train(1) == 1
    assert (head.status, head.report.divergences) == (PruningStatus.READY, 1)
    before = head.state()
    assert head.train(1) == 0
    assert head.state() == before
    assert (head.status, head.report.divergences, head.steps) == (PruningStatus.DIVERGED, 2, 1)


def test_training_stops_when_its_time_is_up() -> None:
    ticks = iter(range(1000))
    head = Head(WIDTH, QUICK, clock=lambda: float(next(ticks)))
    for hidden, target in SyntheticTask().trajectories(64):
        head.learn(hidden, 512, target)
    assert head.train(100, seconds=3.5) == 3
    assert head.train(100, seconds=0.0) == 0
    assert head.status is PruningStatus.READY


def test_scores_in_numpy_equal_those_of_the_trained_network() -> None:
    net = Network(5, HeadSettings(hidden=7, learning_rate=1e-2))
    batches = np.random.default_rng(0).normal(size=(21, 16, 5)).astype(np.float32)
    for x in batches[1:]:
        net.fit(x, (x[:, 0] > 0).astype(np.float32), np.ones(16, dtype=np.float32))
    # This standardiser leaves features as they are.
    snapshot = Snapshot(net.arrays(), Standardiser(1, np.zeros(5), np.ones(5)), 0)
    a = {name: torch.from_numpy(x) for name, x in net.arrays().items()}
    for x in batches[0]:
        hidden = torch.relu(a["hidden_weight"] @ torch.from_numpy(x) + a["hidden_bias"])
        expected = torch.sigmoid(a["out_weight"] @ hidden + a["out_bias"]).item()
        assert snapshot.score(x) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("added", [40, 100, 250])
def test_newer_examples_are_sampled_more_often_and_old_ones_are_dropped(added: int) -> None:
    replay = ReplayBuffer(1, HeadSettings(capacity=100, half_life=10.0))
    for n in range(added):
        replay.add(np.asarray([n], dtype=np.float32), n % 2, 1.0)
    sampled = replay.sample(50_000)[0][:, 0]
    assert len(replay) == min(added, 100)
    assert sampled.min() >= added - 100
    newest, older = (float((sampled == n).mean()) for n in (added - 1, added - 11))
    assert newest / older == pytest.approx(2, rel=0.15)


def test_the_prior_is_weighted() -> None:
    replay = ReplayBuffer(1, HeadSettings())
    for target, survival in ((1.0, 1.0), (0.0, 0.5)):
        replay.add(np.zeros(1, dtype=np.float32), target, survival)
    assert replay.prior == pytest.approx((2 / 3 + 1) / 4)
