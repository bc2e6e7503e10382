"""Measure how good scores are: calibration error, Brier score and AUC, in plain numpy.

All take ``targets`` in [0, 1] (1 right, 0 wrong; one in between counts as that much of each) and ``weights``, 1 each by
default. With the weights of `calibration.inverse_propensity_weights` a figure over trajectories that survived pruning
estimates the figure over all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RELIABILITY_BINS = 15
"""Usual for a calibration error: of a few hundred labels, each bin holds some dozens."""


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """One bin of a reliability diagram: mean predicted probability and observed share, over ``weight`` labels."""

    predicted: float
    observed: float
    weight: float


def reliability(
    probabilities: Sequence[float] | Floats,
    targets: Sequence[float] | Floats,
    weights: Sequence[float] | Floats | None = None,
    bins: int = RELIABILITY_BINS,
) -> list[ReliabilityBin]:
    """Compute a reliability diagram over ``bins`` equal intervals of [0, 1]; empty ones are left out.

    Raises:
        ValueError: lengths differ, a probability or target is outside [0, 1], or a weight is negative or not finite.
    """
    q, y, w = _checked(probabilities, targets, weights)
    bin_of = np.minimum((q * bins).astype(np.int64), bins - 1)
    mass = np.bincount(bin_of, weights=w, minlength=bins)
    predicted = np.bincount(bin_of, weights=w * q, minlength=bins)
    observed = np.bincount(bin_of, weights=w * y, minlength=bins)
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
    """Compute the expected calibration error: the weighted mean of |predicted - observed| over the bins.

    ``None`` without labels.

    Raises:
        ValueError: as `reliability`.
    """
    diagram = reliability(probabilities, targets, weights, bins)
    mass = sum(bar.weight for bar in diagram)
    return sum(bar.weight * abs(bar.predicted - bar.observed) for bar in diagram) / mass if diagram else None


def brier_score(
    probabilities: Sequence[float] | Floats, targets: Sequence[float], weights: Sequence[float] | None = None
) -> float | None:
    """Compute the mean of (probability - target)²: 0 is perfect, 1/4 is that of a constant half.

    ``None`` without labels.

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
    """Compute the probability that a right trajectory scores above a wrong one; ties count half.

    ``None`` without right ones or without wrong ones. It is exact: all pairs are counted, by one sort. Only the order
    of ``scores`` matters, which may be any finite numbers.

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
        raise ValueError(f"there must be equally many, got {q.size} values, {y.size} targets and {w.size} weights")
    for name, x in (("probabilities", q), ("targets", y)):
        if not ((x >= 0) & (x <= 1)).all():
            raise ValueError(f"{name} must be in [0, 1]")
    if not (np.isfinite(w) & (w >= 0)).all():
        raise ValueError("weights must be finite and at least 0")
    return q, y, w
