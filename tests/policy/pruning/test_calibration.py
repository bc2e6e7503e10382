"""Calibration: the paper's formulas, when they apply, and what pruning does to them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from darts_server.policy.isotonic import fit_isotonic
from darts_server.policy.pruning.calibration import (
    MAX_WEIGHT,
    Calibration,
    CalibrationStatus,
    Calibrator,
    Label,
    inverse_propensity_weights,
)
from darts_server.policy.pruning.score_metrics import auc, calibration_error
from darts_server.policy.pruning.survival import Pruning

CHANCES = st.sampled_from([0.0, 0.5, 127 / 128, 1.0]) | st.floats(0, 1)
LABELS = st.lists(
    st.builds(Label, CHANCES, st.sampled_from([0.0, 1.0]), st.sampled_from([1.0, 0.9, 0.4, 0.1, 0.05])),
    min_size=2,
    max_size=40,
)
OURS = Calibration(cold_steps=0, cold_labels=0)
PLAIN = OURS.as_published
CORRECTED = replace(PLAIN, corrected=True)


def learned(calibration: Calibration, labels: list[Label]) -> Calibrator:
    calibrator = Calibrator(calibration)
    for label in labels:
        calibrator.add(label)
    return calibrator


def transcribed(labels: list[Label], score: float, bins: int, alpha: float, weights: list[float]) -> float:
    """The paper's formulas, one by one."""
    b = min(bins - 1, math.floor(bins * score))
    c_plus, c_minus = [0.0] * bins, [0.0] * bins
    for label, weight in zip(labels, weights, strict=True):
        counter = c_plus if label.target == 1 else c_minus
        counter[min(bins - 1, math.floor(bins * label.score))] += weight
    p_right = (c_plus[b] + alpha) / (sum(c_plus) + alpha * bins)
    p_wrong = (c_minus[b] + alpha) / (sum(c_minus) + alpha * bins)
    pi = sum(c_plus) / (sum(c_plus) + sum(c_minus))
    return pi * p_right / (pi * p_right + (1 - pi) * p_wrong)


# --- the formulas -----------------------------------------------------------


def test_the_published_form_has_none_of_our_additions() -> None:
    assert OURS.as_published == replace(OURS, smoothing=1.0, monotone=False, corrected=False)


@given(LABELS, CHANCES, st.sampled_from([1, 7, 128]), st.sampled_from([0.5, 1.0]))
def test_the_plain_form_is_the_papers(labels: list[Label], score: float, bins: int, alpha: float) -> None:
    two_classes = [Label(0.3, 1.0), Label(0.6, 0.0), *labels]
    calibrator = learned(replace(PLAIN, bins=bins, smoothing=alpha), two_classes)
    expected = transcribed(two_classes, score, bins, alpha, [1.0] * len(two_classes))
    assert calibrator.status is CalibrationStatus.READY
    assert calibrator.probability(score) == pytest.approx(expected, abs=1e-12)


@given(LABELS, CHANCES)
def test_corrected_labels_count_by_the_inverse_of_their_survival(labels: list[Label], score: float) -> None:
    two_classes = [Label(0.3, 1.0), Label(0.6, 0.0), *labels]
    weights = [min(1 / x.survival, MAX_WEIGHT) for x in two_classes]
    scaled = [w * len(weights) / sum(weights) for w in weights]
    expected = transcribed(two_classes, score, 128, 1.0, scaled)
    assert learned(CORRECTED, two_classes).probability(score) == pytest.approx(expected, abs=1e-12)


def test_a_target_in_between_counts_as_that_much_of_each() -> None:
    soft = learned(PLAIN, [Label(0.2, 0.25)] * 4 + [Label(0.8, 1.0)])
    hard = learned(PLAIN, [Label(0.2, 1.0)] + [Label(0.2, 0.0)] * 3 + [Label(0.8, 1.0)])
    assert soft.probability(0.2) == pytest.approx(hard.probability(0.2))
    assert soft.prior == pytest.approx(hard.prior) == pytest.approx(0.4)


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
def test_isotonic_values_are_the_nearest_that_never_fall(pairs: list[tuple[float, float]]) -> None:
    """Against the closed form: the largest over first ends of the least over last ends of the mean between them."""
    values, weights = (np.asarray(each) for each in zip(*pairs, strict=True))
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
def test_monotone_calibration_of_a_few_hundred_labels_keeps_the_scores_auc() -> None:
    rng = np.random.default_rng(0)
    scores = rng.beta(4.0, 3.0, 4300)  # each is the true chance
    right = (rng.random(4300) < scores).astype(np.float64)
    labels = [Label(*each) for each in zip(scores[:300].tolist(), right[:300].tolist(), strict=True)]
    chances = [[learned(form, labels).probability(s) for s in scores[300:]] for form in (PLAIN, OURS)]
    best, (plain, ours) = auc(scores[300:], right[300:]), [auc(q, right[300:]) for q in chances]
    assert best is not None
    assert plain is not None
    assert ours is not None
    assert best - ours < 0.02 < 0.06 < best - plain
    errors = [calibration_error(q, right[300:]) or 0.0 for q in chances]
    assert errors[1] < 0.06 < errors[0]


# --- when it applies --------------------------------------------------------


def test_a_new_calibrator_returns_the_prior_and_says_why() -> None:
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
    wrong = learned(PLAIN, [Label(0.4, 0.0)])
    assert (wrong.status, wrong.probability(0.4)) == (CalibrationStatus.ONE_CLASS, 0.0)


def test_a_calibrator_continues_with_the_labels_and_steps_of_another() -> None:
    calibrator = Calibrator(CORRECTED)
    for i in range(9):
        calibrator.add(Label(i / 9, float(i % 2), 1 / (i + 1)))
        calibrator.steps += 1
    restored = Calibrator(CORRECTED, calibrator.labels, calibrator.steps)
    assert restored.steps == 9
    assert [restored.probability(i / 20) for i in range(21)] == [calibrator.probability(i / 20) for i in range(21)]


# --- labels that are missing not at random ----------------------------------


@pytest.mark.untraced
@pytest.mark.parametrize(("strength", "off"), [(0.5, 0.045), (1.0, 0.09), (2.0, 0.11)])
def test_under_pruning_plain_labels_are_biased_and_corrected_ones_are_not(strength: float, off: float) -> None:
    """Pruned by the score at one detection point, calibrated at the next; six in ten are right.

    Both scores carry information that the other does not. Errors are over all trajectories, pruned ones too.
    """
    rng = np.random.default_rng(0)
    seen_early, seen_late = rng.normal(0, 1.5, (2, 30_000))
    right = (rng.random(30_000) < sigmoid(seen_early + seen_late + 0.7)).astype(np.float64)
    early, late = sigmoid(seen_early + 0.7), sigmoid(seen_late + 0.7)
    pruning = Pruning(balance_strength=strength)
    aim = pruning.fit(early)
    survivals = [aim.survival(q) for q in early]
    kept = rng.random(30_000) < survivals
    labels = [Label(s, y, p) for s, y, p, k in zip(late, right, survivals, kept, strict=True) if k]
    plain, corrected = (learned(replace(form, buffer=30_000), labels) for form in (PLAIN, CORRECTED))
    errors = [calibration_error([c.probability(s) for s in late], right) or 0.0 for c in (plain, corrected)]
    assert errors[0] > off
    assert errors[1] < 0.015
    assert plain.prior < right.mean() - off
    assert corrected.prior == pytest.approx(right.mean(), abs=0.015)


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-x)), dtype=np.float64)


@pytest.mark.parametrize("wrong", [(1.5, 1.0, 1.0), (math.nan, 1.0, 1.0), (0.5, -1.0, 1.0), (0.5, 1.0, 0.0)])
def test_a_label_out_of_range_is_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be in"):
        Label(*wrong)
