"""Calibration error, Brier score and AUC, against definitions written out pair by pair and bin by bin."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.estimates.calibration import Label
from darts_server.estimates.score_metrics import (
    RELIABILITY_BINS,
    ScoreMetrics,
    auc,
    brier_score,
    calibration_error,
    evaluate,
)

CHANCES = st.sampled_from([0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 1.0]) | st.floats(0, 1)
LABELS = st.lists(st.tuples(CHANCES, st.sampled_from([0.0, 1.0, 0.25]), st.integers(0, 5)), max_size=25)


@given(LABELS)
def test_the_auc_counts_every_pair_and_half_of_every_tie(labels: list[tuple[float, float, int]]) -> None:
    won = pairs = 0.0
    for s, y, w in labels:
        for t, z, v in labels:
            both = w * y * v * (1 - z)
            pairs += both
            won += both * (1.0 if s > t else 0.5 if s == t else 0.0)
    found = auc(*columns(labels))
    assert found == (pytest.approx(won / pairs) if pairs else None)


@given(LABELS)
def test_the_calibration_error_is_the_mean_gap_of_the_bins(labels: list[tuple[float, float, int]]) -> None:
    bins = RELIABILITY_BINS
    held: dict[int, list[tuple[float, float, int]]] = {}
    for s, y, w in labels:
        held.setdefault(min(bins - 1, math.floor(s * bins)), []).append((s, y, w))
    gaps = [abs(sum(w * (s - y) for s, y, w in labels_of_bin)) for labels_of_bin in held.values()]
    mass = sum(w for _, _, w in labels)
    assert calibration_error(*columns(labels)) == (pytest.approx(sum(gaps) / mass) if mass else None)


@given(LABELS)
def test_the_brier_score_is_the_mean_squared_error(labels: list[tuple[float, float, int]]) -> None:
    mass = sum(w for _, _, w in labels)
    squares = sum(w * (s - y) ** 2 for s, y, w in labels)
    assert brier_score(*columns(labels)) == (pytest.approx(squares / mass) if mass else None)


def columns(labels: list[tuple[float, float, int]]) -> tuple[list[float], list[float], list[float]]:
    return [s for s, _, _ in labels], [y for _, y, _ in labels], [float(w) for _, _, w in labels]


def test_weights_are_one_by_default() -> None:
    scores = [0.2, 0.9, 0.6]
    targets = [0.0, 1.0, 1.0]
    for metric in (auc, brier_score, calibration_error):
        assert metric(scores, targets) == metric(scores, targets, [1.0] * 3)


def test_survivors_are_weighted_for_pruned_trajectories() -> None:
    """Two in three right and all wrong trajectories survive. With weights, the Brier score is the score of all."""
    labels = [Label(0.5, 1.0, 2 / 3)] * 2 + [Label(0.6, 0.0)] * 3
    plain = evaluate([replace(label, survival=1.0) for label in labels])
    corrected = evaluate(labels)
    assert (plain.labels, plain.auc) == (5, 0.0)
    assert plain.brier == pytest.approx((2 * 0.25 + 3 * 0.36) / 5)
    assert corrected.brier == pytest.approx((3 * 0.25 + 3 * 0.36) / 6)
    assert plain.calibration_error == pytest.approx((2 * 0.5 + 3 * 0.6) / 5)
    assert evaluate([]) == ScoreMetrics(0, None, None, None)
