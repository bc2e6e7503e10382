"""How good probabilities are: calibration error, Brier score and AUC, in plain numpy.

All take ``targets`` in [0, 1] (1 right, 0 wrong; one in between counts as that much of each) and ``weights``, one each
by default. With the weights of `calibration.inverse_propensity` a figure over trajectories that survived pruning
estimates the figure over all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RELIABILITY_BINS = 15
"""Usual for a calibration error: wide enough to hold some dozens of a few hundred labels each."""


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """One bar of a reliability diagram: what was predicted and what came, over ``weight`` labels."""

    predicted: float
    observed: float
    weight: float


def reliability(
    probabilities: Sequence[float] | Floats,
    targets: Sequence[float] | Floats,
    weights: Sequence[float] | Floats | None = None,
    bins: int = RELIABILITY_BINS,
) -> list[ReliabilityBin]:
    """Mean probability and share of right ones for each of ``bins`` equal intervals of [0, 1] that holds any.

    Raises:
        ValueError: lengths differ, a probability or target is outside [0, 1], or a weight is negative or not finite.
    """
    q, y, w = _checked(probabilities, targets, weights)
    place = np.minimum((q * bins).astype(np.int64), bins - 1)
    mass = np.bincount(place, weights=w, minlength=bins)
    predicted = np.bincount(place, weights=w * q, minlength=bins)
    observed = np.bincount(place, weights=w * y, minlength=bins)
    return [
        ReliabilityBin(float(predicted[b] / mass[b]), float(observed[b] / mass[b]), float(mass[b]))
        for b in np.flatnonzero(mass)
    ]


def calibration_error(
    probabilities: Sequence[float] | Floats,
    targets: Sequence[float] | Floats,
    weights: Sequence[float] | Floats | None = None,
    bins: int = RELIABILITY_BINS,
) -> float | None:
    """Expected calibration error: mean of |predicted - observed| over the bins, each by its weight; ``None`` of none.

    Raises:
        ValueError: as `reliability`.
    """
    bars = reliability(probabilities, targets, weights, bins)
    mass = sum(bar.weight for bar in bars)
    return sum(bar.weight * abs(bar.predicted - bar.observed) for bar in bars) / mass if bars else None


def brier_score(
    probabilities: Sequence[float] | Floats, targets: Sequence[float], weights: Sequence[float] | None = None
) -> float | None:
    """Mean of (probability - target)², ``None`` of no labels: 0 is perfect, 1/4 what a constant half gets.

    Raises:
        ValueError: as `reliability`.
    """
    q, y, w = _checked(probabilities, targets, weights)
    mass = float(w.sum())
    return float((w * (q - y) ** 2).sum()) / mass if mass else None


def auc(
    scores: Sequence[float] | Floats,
    targets: Sequence[float] | Floats,
    weights: Sequence[float] | Floats | None = None,
) -> float | None:
    """Chance that a right one scores above a wrong one, ties counting half; ``None`` where one of them is missing.

    It is exact: all pairs are counted, by one sort. Only the order of ``scores`` matters, which may be any finite
    numbers.

    Raises:
        ValueError: a score is not finite; else as `reliability`.
    """
    s = np.asarray(scores, dtype=np.float64)
    if not np.isfinite(s).all():
        raise ValueError("scores must be finite")
    _, y, w = _checked(np.zeros(s.size), targets, weights)
    _, level = np.unique(s, return_inverse=True)
    right = np.bincount(level, weights=w * y)
    wrong = np.bincount(level, weights=w * (1 - y))
    pairs = float(right.sum() * wrong.sum())
    below = np.cumsum(wrong) - wrong
    return float((right * (below + wrong / 2)).sum()) / pairs if pairs else None


def _checked(
    probabilities: Sequence[float] | Floats,
    targets: Sequence[float] | Floats,
    weights: Sequence[float] | Floats | None,
) -> tuple[Floats, Floats, Floats]:
    q, y = np.asarray(probabilities, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    w = np.ones(q.size) if weights is None else np.asarray(weights, dtype=np.float64)
    if not q.size == y.size == w.size:
        raise ValueError(f"there must be as many of each, got {q.size} values, {y.size} targets and {w.size} weights")
    for name, x in (("probabilities", q), ("targets", y)):
        if not ((x >= 0) & (x <= 1)).all():
            raise ValueError(f"{name} must be in [0, 1]")
    if not (np.isfinite(w) & (w >= 0)).all():
        raise ValueError("weights must be finite and at least 0")
    return q, y, w
