"""Measure how good scores are: calibration error, Brier score and AUC, in plain numpy.

All functions take ``targets`` in [0, 1] (1 right, 0 wrong, a fraction counts in parts as both), and ``weights``, by
default 1. With `inverse_propensity_weights`, they estimate figures over all trajectories from survivors of pruning. All
return None without labels.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from darts_server.estimates.calibration import Label, inverse_propensity_weights
from darts_server.estimates.isotonic import Floats

Numbers = Sequence[float] | Floats

RELIABILITY_BINS = 15
"""Usual for a calibration error: a few hundred labels put some dozens into each bin."""
WINDOW = 1024
"""Number of labels behind a metric: several training steps with a usual batch size."""


def calibration_error(probabilities: Numbers, targets: Numbers, weights: Numbers | None = None) -> float | None:
    """Compute the expected calibration error: the weighted mean of |predicted - observed| over equal bins."""
    q, y, w = _to_arrays(probabilities, targets, weights)
    mass = w.sum()
    if not mass:
        return None
    bin_of = np.minimum((q * RELIABILITY_BINS).astype(np.int64), RELIABILITY_BINS - 1)
    # Within a bin, errors of both signs cancel.
    errors = np.bincount(bin_of, weights=w * (q - y))
    return float(np.abs(errors).sum() / mass)


def brier_score(probabilities: Numbers, targets: Numbers, weights: Numbers | None = None) -> float | None:
    """Compute the mean of (probability - target)². 0 is perfect, a constant half has 1/4."""
    q, y, w = _to_arrays(probabilities, targets, weights)
    mass = w.sum()
    if not mass:
        return None
    return float((w * (q - y) ** 2).sum() / mass)


def auc(scores: Numbers, targets: Numbers, weights: Numbers | None = None) -> float | None:
    """Compute the probability that a right trajectory has a higher score than a wrong trajectory; ties count half.

    None unless there are right and wrong trajectories. ``scores``: any finite numbers; only their order matters.
    """
    s, y, w = _to_arrays(scores, targets, weights)
    # Weights of right and wrong trajectories at each level of scores, from the lowest level.
    _, level = np.unique(s, return_inverse=True)
    right = np.bincount(level, weights=w * y)
    wrong = np.bincount(level, weights=w * (1 - y))
    pairs = right.sum() * wrong.sum()
    if not pairs:
        return None
    wrong_below = np.cumsum(wrong) - wrong
    return float((right * (wrong_below + wrong / 2)).sum() / pairs)


@dataclass(frozen=True, slots=True)
class ScoreMetrics:
    """``labels``: their number. A metric is None if there are too few."""

    labels: int
    auc: float | None
    brier: float | None
    calibration_error: float | None


def evaluate(labels: Collection[Label]) -> ScoreMetrics:
    """Compute the metrics of labels, whose scores were made before anything was trained on them (prequential)."""
    scores = [label.score for label in labels]
    targets = [label.target for label in labels]
    weights = inverse_propensity_weights([label.survival for label in labels])
    return ScoreMetrics(
        labels=len(scores),
        auc=auc(scores, targets, weights),
        brier=brier_score(scores, targets, weights),
        calibration_error=calibration_error(scores, targets, weights),
    )


def _to_arrays(values: Numbers, targets: Numbers, weights: Numbers | None) -> tuple[Floats, Floats, Floats]:
    x = np.asarray(values, dtype=np.float64)
    if weights is None:
        weights = np.ones(x.size)
    return x, np.asarray(targets, dtype=np.float64), np.asarray(weights, dtype=np.float64)
