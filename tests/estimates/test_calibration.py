"""Calibration: compared with the formulas of the paper, its status, and its bias under pruning."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from darts_server.estimates.calibration import (
    SMOOTHING,
    Calibration,
    CalibrationStatus,
    Calibrator,
    Label,
    inverse_propensity_weights,
)
from darts_server.estimates.isotonic import Floats, fit_isotonic
from darts_server.estimates.score_metrics import auc, calibration_error
from darts_server.policy.survival import Pruning

CHANCES = st.sampled_from([0.0, 0.5, 127 / 128, 1.0]) | st.floats(0, 1)
LABELS = st.lists(
    st.builds(Label, CHANCES, st.sampled_from([0.0, 1.0]), st.sampled_from([1.0, 0.9, 0.4, 0.1, 0.05])),
    min_size=2,
    max_size=40,
)
OURS = Calibration(cold_steps=0, cold_labels=0)


def learned(calibration: Calibration, labels: list[Label]) -> Calibrator:
    calibrator = Calibrator(calibration)
    for label in labels:
        calibrator.add(label)
    return calibrator


def bin_of(score: float, bins: int) -> int:
    return min(bins - 1, math.floor(bins * score))


def published(labels: list[Label], weights: Floats | None = None, bins: int = 128, alpha: float = 1.0) -> Floats:
    """Return q of each bin in the form of the ARRoL paper (arXiv 2603.24840, "Calibration"), formula by formula.

    The paper has 128 bins, alpha = 1, and counts each label once.
    """
    if weights is None:
        weights = np.ones(len(labels))
    c_plus = np.zeros(bins)
    c_minus = np.zeros(bins)
    for label, weight in zip(labels, weights.tolist(), strict=True):
        counter = c_plus if label.target == 1 else c_minus
        counter[bin_of(label.score, bins)] += weight
    p_right = (c_plus + alpha) / (c_plus.sum() + alpha * bins)
    p_wrong = (c_minus + alpha) / (c_minus.sum() + alpha * bins)
    pi = c_plus.sum() / (c_plus.sum() + c_minus.sum())
    return np.asarray(pi * p_right / (pi * p_right + (1 - pi) * p_wrong))


def prior_of(labels: list[Label]) -> float:
    return sum(label.target for label in labels) / len(labels)


# --- the formulas -----------------------------------------------------------


@given(LABELS, CHANCES, st.sampled_from([1, 7, 128]))
def test_q_is_the_formula_of_the_paper_with_weights_and_less_smoothing_made_monotone(
    labels: list[Label], score: float, bins: int
) -> None:
    two_classes = [Label(0.3, 1.0), Label(0.6, 0.0), *labels]
    weights = inverse_propensity_weights([label.survival for label in two_classes])
    counted = np.full(bins, 2 * SMOOTHING)
    for label, weight in zip(two_classes, weights.tolist(), strict=True):
        counted[bin_of(label.score, bins)] += weight
    expected = fit_isotonic(published(two_classes, weights, bins, SMOOTHING), counted)
    calibrator = learned(replace(OURS, bins=bins), two_classes)
    assert calibrator.status is CalibrationStatus.READY
    assert calibrator.probability(score) == pytest.approx(expected[bin_of(score, bins)], abs=1e-12)


def test_a_label_counts_by_the_inverse_of_its_survival() -> None:
    pruned = learned(OURS, [Label(0.2, 1.0, 0.5), *[Label(0.8, 0.0)] * 2])
    twice = learned(OURS, [*[Label(0.2, 1.0)] * 2, *[Label(0.8, 0.0)] * 2])
    assert pruned.prior == twice.prior == 0.5


def test_only_the_last_labels_count() -> None:
    calibration = Calibration(buffer=3, cold_steps=0, cold_labels=0)
    recent = [Label(0.1, 0.0), Label(0.9, 1.0), Label(0.8, 1.0)]
    assert list(learned(calibration, [Label(0.1, 1.0)] * 5 + recent).labels) == recent


def test_weights_have_mean_one_and_are_clipped() -> None:
    assert inverse_propensity_weights([1.0, 0.5]).tolist() == pytest.approx([2 / 3, 4 / 3])
    assert inverse_propensity_weights([1.0, 0.001], max_weight=3).tolist() == pytest.approx([0.5, 1.5])
    assert inverse_propensity_weights([]).tolist() == []


# --- made monotone ----------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.5, 1.0, 7.0])), min_size=1, max_size=12))
def test_isotonic_values_are_the_nearest_values_that_never_fall(pairs: list[tuple[float, float]]) -> None:
    """Compare with the closed form: the maximum over starts of the minimum over ends of the mean between them."""
    values, weights = (np.asarray(column) for column in zip(*pairs, strict=True))
    places = range(values.size)

    def mean(first: int, last: int) -> float:
        return float(np.average(values[first : last + 1], weights=weights[first : last + 1]))

    nearest = [max(min(mean(j, k) for k in places[i:]) for j in places[: i + 1]) for i in places]
    assert fit_isotonic(values, weights).tolist() == pytest.approx(nearest, abs=1e-12)


@given(LABELS, CHANCES, CHANCES)
def test_a_higher_score_never_has_a_lower_chance(labels: list[Label], one: float, other: float) -> None:
    calibrator = learned(OURS, [Label(0.3, 1.0), Label(0.6, 0.0), *labels])
    low, high = sorted((one, other))
    assert 0 < calibrator.probability(low) <= calibrator.probability(high) < 1


@pytest.mark.untraced
def test_monotone_calibration_of_a_few_hundred_labels_keeps_the_auc_of_the_score() -> None:
    rng = np.random.default_rng(0)
    scores = rng.beta(4.0, 3.0, 4300)  # each is the true chance
    right = (rng.random(4300) < scores).astype(np.float64)
    labels = [Label(score, target) for score, target in zip(scores[:300].tolist(), right[:300].tolist(), strict=True)]
    tested = scores[300:]
    paper = published(labels)[[bin_of(score, 128) for score in tested]]
    calibrator = learned(OURS, labels)
    ours = np.asarray([calibrator.probability(score) for score in tested])

    best, auc_of_paper, auc_of_ours = (auc(q, right[300:]) for q in (tested, paper, ours))
    assert best is not None
    assert auc_of_paper is not None
    assert auc_of_ours is not None
    assert best - auc_of_ours < 0.02 < 0.06 < best - auc_of_paper
    errors = [calibration_error(q, right[300:]) or 0.0 for q in (paper, ours)]
    assert errors[1] < 0.06 < errors[0]


# --- when it applies --------------------------------------------------------


def test_a_new_calibrator_returns_the_prior_and_its_status_shows_the_reason() -> None:
    calibrator = Calibrator(Calibration(cold_steps=2, cold_labels=3))
    assert (calibrator.status, calibrator.probability(0.9)) == (CalibrationStatus.NO_LABELS, 0.5)
    calibrator.add(Label(0.9, 1.0))
    calibrator.add(Label(0.9, 1.0))
    assert (calibrator.status, calibrator.probability(0.9)) == (CalibrationStatus.COLD, 1.0)
    statuses = []
    for _ in range(2):
        calibrator.steps += 1
        statuses.append(calibrator.status)
    assert statuses == [CalibrationStatus.COLD, CalibrationStatus.FEW_LABELS]
    calibrator.add(Label(0.8, 1.0))
    assert (calibrator.status, calibrator.probability(0.1)) == (CalibrationStatus.ONE_CLASS, 1.0)
    calibrator.add(Label(0.1, 0.0))
    assert (calibrator.status, calibrator.prior) == (CalibrationStatus.READY, 0.75)
    assert calibrator.probability(0.1) < calibrator.prior < calibrator.probability(0.9)
    wrong = learned(OURS, [Label(0.4, 0.0)])
    assert (wrong.status, wrong.probability(0.4)) == (CalibrationStatus.ONE_CLASS, 0.0)


def test_a_calibrator_continues_with_the_labels_and_steps_of_another() -> None:
    calibrator = Calibrator(OURS)
    for i in range(9):
        calibrator.add(Label(i / 9, float(i % 2), 1 / (i + 1)))
        calibrator.steps += 1
    restored = Calibrator(OURS, calibrator.labels, calibrator.steps)
    assert restored.steps == 9
    assert [restored.probability(i / 20) for i in range(21)] == [calibrator.probability(i / 20) for i in range(21)]


# --- labels that are missing not at random ----------------------------------


@pytest.mark.untraced
def test_under_pruning_the_papers_calibration_is_biased_and_ours_is_not() -> None:
    """Trajectories are pruned by the score at a detection point, and calibrated at the next. Six in ten are right.

    Each score has information that the other lacks. Errors are over all trajectories, including pruned trajectories.
    """
    off = 0.045
    rng = np.random.default_rng(0)
    seen_early, seen_late = rng.normal(0, 1.5, (2, 30_000))
    right = (rng.random(30_000) < sigmoid(seen_early + seen_late + 0.7)).astype(np.float64)
    early = sigmoid(seen_early + 0.7)
    late = sigmoid(seen_late + 0.7)
    curve = Pruning().fit(early)
    survivals = [curve.survival(q) for q in early]
    kept = rng.random(30_000) < survivals
    labels = [Label(s, y, p) for s, y, p, k in zip(late, right, survivals, kept, strict=True) if k]
    paper = published(labels)[[bin_of(score, 128) for score in late]]
    corrected = learned(replace(OURS, buffer=30_000), labels)
    ours = [corrected.probability(score) for score in late]

    assert (calibration_error(paper, right) or 0.0) > off
    assert (calibration_error(ours, right) or 1.0) < 0.015
    assert prior_of(labels) < right.mean() - off
    assert corrected.prior == pytest.approx(right.mean(), abs=0.015)


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-x)), dtype=np.float64)


@pytest.mark.parametrize("wrong", [(1.5, 1.0, 1.0), (math.nan, 1.0, 1.0), (0.5, -1.0, 1.0), (0.5, 1.0, 0.0)])
def test_a_label_out_of_range_is_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be in"):
        Label(*wrong)
