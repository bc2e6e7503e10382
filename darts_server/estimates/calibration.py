"""Calibrate quality scores: map a score to the probability of a correct answer (ARRoL, calibration).

Scores s' in [0, 1] of recent labelled trajectories are counted in B equal bins, right and wrong trajectories
separately. With Laplace smoothing alpha and the prior pi, the share of right trajectories,

    P(b | right) = (right_b + alpha) / (sum right + alpha B),        the same for wrong,
    q = pi P(b | right) / (pi P(b | right) + (1 - pi) P(b | wrong)).

Two things are added to the paper's form. With two or three labels in a bin, q jumps from bin to bin and predicts worse
than the score. So isotonic regression makes q non-decreasing, which needs less smoothing. And pruned trajectories have
no labels. So each label is weighted by 1 / (probability to survive), scaled to mean one.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from darts_server.estimates.isotonic import Floats, fit_isotonic

BINS = 128
COLD_STEPS = 20
"""The paper's values. In the first steps the meaning of a score changes fast."""
SMOOTHING = 0.25
"""The paper has 1; monotone q needs less. With synthetic scores of four kinds and 300 to 4096 labels, the error was at
most 1.5 times that of the best value."""
COLD_LABELS = 256
"""Fewer labels are outweighed by the 2 alpha B labels of the paper's smoothing."""
BUFFER = 4096
"""Labels of a few steps, so that labels of old weights are soon forgotten."""
MAX_WEIGHT = 10.0
"""1 / p_min of the paper: no weight is clipped unless p_min is set lower."""


class CalibrationStatus(StrEnum):
    """Whether scores are calibrated. With any status but ``READY``, every q is the prior."""

    READY = "ready"
    NO_LABELS = "no_labels"
    COLD = "cold"
    """In the first steps, which only collect labels."""
    FEW_LABELS = "few_labels"
    ONE_CLASS = "one_class"
    """All labels are right, or all are wrong."""


@dataclass(frozen=True, slots=True)
class Label:
    """A scored trajectory with a reward.

    ``score``: s' in [0, 1]. ``target``: 1 if right, 0 if wrong, or between. ``survival``: probability in (0, 1] with
    which the trajectory was kept; 1 if it could not be pruned.
    """

    score: float
    target: float
    survival: float = 1.0

    def __post_init__(self) -> None:
        for name in ("score", "target"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        if not 0 < self.survival <= 1:
            raise ValueError(f"survival must be in (0, 1], got {self.survival}")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Options of a calibration.

    ``bins``: B. ``buffer``: number of kept labels. ``cold_steps``, ``cold_labels``: steps and labels before calibration
    begins.
    """

    bins: int = BINS
    buffer: int = BUFFER
    cold_steps: int = COLD_STEPS
    cold_labels: int = COLD_LABELS


class Calibrator:
    """Calibrates the scores of a kind at a detection point.

    Args:
        labels: saved labels, oldest first.
        steps: number of training steps so far.
    """

    def __init__(self, calibration: Calibration, labels: Iterable[Label] = (), steps: int = 0) -> None:
        self.calibration = calibration
        self.labels: deque[Label] = deque(labels, maxlen=calibration.buffer)
        self.steps = steps
        # The result of `_fit`, or None after a new label.
        self._cached: tuple[float, bool, Floats] | None = None

    def add(self, label: Label) -> None:
        self.labels.append(label)
        self._cached = None

    @property
    def status(self) -> CalibrationStatus:
        if self.labels and self.steps < self.calibration.cold_steps:
            return CalibrationStatus.COLD
        return self.labels_status

    @property
    def labels_status(self) -> CalibrationStatus:
        """Status without regard to the number of steps."""
        if not self.labels:
            return CalibrationStatus.NO_LABELS
        if len(self.labels) < self.calibration.cold_labels:
            return CalibrationStatus.FEW_LABELS
        _, has_one_class, _ = self._fit()
        return CalibrationStatus.ONE_CLASS if has_one_class else CalibrationStatus.READY

    @property
    def prior(self) -> float:
        """Share of right labels (pi), or a half without labels."""
        if not self.labels:
            return 0.5
        prior, _, _ = self._fit()
        return prior

    def probability(self, score: float) -> float:
        """Return the probability q of a correct answer, or the prior while the labels are not ready."""
        if self.labels_status is not CalibrationStatus.READY:
            return self.prior
        _, _, q_of_bins = self._fit()
        bins = len(q_of_bins)
        return float(q_of_bins[min(bins - 1, math.floor(bins * score))])

    def _fit(self) -> tuple[float, bool, Floats]:
        """Return the prior, whether all labels have the same class, and q of each bin."""
        if self._cached is not None:
            return self._cached
        bins = self.calibration.bins
        scores = np.asarray([label.score for label in self.labels])
        targets = np.asarray([label.target for label in self.labels])
        weights = inverse_propensity_weights([label.survival for label in self.labels])

        # Weights of right and wrong labels in each bin of scores.
        bin_of = np.minimum((bins * scores).astype(np.int64), bins - 1)
        right = np.bincount(bin_of, weights=weights * targets, minlength=bins)
        wrong = np.bincount(bin_of, weights=weights * (1 - targets), minlength=bins)
        has_one_class = not right.any() or not wrong.any()

        # Bayes' rule with smoothed bins, made monotone in the score.
        prior = float(right.sum() / (right.sum() + wrong.sum()))
        joint_right = prior * (right + SMOOTHING) / (right.sum() + SMOOTHING * bins)
        joint_wrong = (1 - prior) * (wrong + SMOOTHING) / (wrong.sum() + SMOOTHING * bins)
        masses = np.asarray(right + wrong + 2 * SMOOTHING, dtype=np.float64)
        q = fit_isotonic(joint_right / (joint_right + joint_wrong), masses)
        self._cached = (prior, has_one_class, q)
        return self._cached


def inverse_propensity_weights(survivals: Sequence[float] | Floats, max_weight: float = MAX_WEIGHT) -> Floats:
    """Compute the weights min(1 / survival, ``max_weight``), scaled to mean one. Clipping trades noise for bias."""
    weights: Floats = np.minimum(1 / np.asarray(survivals, dtype=np.float64), max_weight)
    if weights.size:
        weights /= weights.mean()
    return weights
