"""Measure how good scores are: calibration error, Brier score and AUC, in plain numpy.

All take ``targets`` in [0, 1] (1 right, 0 wrong; one in between counts as that much of each) and ``weights``, 1 each by
default. With the weights of `calibration.inverse_propensity_weights` a figure over trajectories that survived pruning
estimates the figure over all of them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_server.estimates.calibration import MAX_WEIGHT, Label, inverse_propensity_weights

Floats = NDArray[np.float64]
Numbers = Sequence[float] | Floats

RELIABILITY_BINS = 15
"""Usual for a calibration error: of a few hundred labels, each bin holds some dozens."""
WINDOW = 1024
"""Labels that metrics are over: those of several training steps with a usual batch size."""


def calibration_error(probabilities: Numbers, targets: Numbers, weights: Numbers | None = None) -> float | None:
    """Compute the expected calibration error: the weighted mean of |predicted - observed| over equal bins.

    ``None`` without labels.
    """
    q, y, w = _arrays(probabilities, targets, weights)
    mass = float(w.sum())
    bins = np.minimum((q * RELIABILITY_BINS).astype(np.int64), RELIABILITY_BINS - 1)
    gaps = np.bincount(bins, weights=w * (q - y))
    return float(np.abs(gaps).sum()) / mass if mass else None


def brier_score(probabilities: Numbers, targets: Numbers, weights: Numbers | None = None) -> float | None:
    """Compute the mean of (probability - target)²: 0 is perfect, 1/4 is that of a constant half.

    ``None`` without labels.
    """
    q, y, w = _arrays(probabilities, targets, weights)
    mass = float(w.sum())
    return float((w * (q - y) ** 2).sum()) / mass if mass else None


def auc(scores: Numbers, targets: Numbers, weights: Numbers | None = None) -> float | None:
    """Compute the probability that a right trajectory scores above a wrong one; ties count half.

    ``None`` without right ones or without wrong ones. It is exact: all pairs are counted, by one sort. Only the order
    of ``scores`` matters, which may be any finite numbers.
    """
    s, y, w = _arrays(scores, targets, weights)
    _, level = np.unique(s, return_inverse=True)
    right = np.bincount(level, weights=w * y)
    wrong = np.bincount(level, weights=w * (1 - y))
    pairs = float(right.sum() * wrong.sum())
    below = np.cumsum(wrong) - wrong
    return float((right * (below + wrong / 2)).sum()) / pairs if pairs else None


@dataclass(frozen=True, slots=True)
class ScoreMetrics:
    """Metrics over the last ``labels`` labels; ``None`` where there are too few.

    With inverse propensity weights they are estimates for all trajectories, the pruned ones included.
    """

    labels: int
    auc: float | None
    brier: float | None
    calibration_error: float | None


def evaluate(labels: Collection[Label], max_weight: float = MAX_WEIGHT) -> ScoreMetrics:
    """Compute the metrics of labels whose scores are from before anything was trained on them (prequential evaluation).

    ``max_weight``: maximum of the inverse propensity weights.
    """
    scores, targets = [x.score for x in labels], [x.target for x in labels]
    weights = inverse_propensity_weights([x.survival for x in labels], max_weight)
    return ScoreMetrics(
        labels=len(scores),
        auc=auc(scores, targets, weights),
        brier=brier_score(scores, targets, weights),
        calibration_error=calibration_error(scores, targets, weights),
    )


def _arrays(values: Numbers, targets: Numbers, weights: Numbers | None) -> tuple[Floats, Floats, Floats]:
    x, y = np.asarray(values, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    return x, y, np.ones(x.size) if weights is None else np.asarray(weights, dtype=np.float64)
