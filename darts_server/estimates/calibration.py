"""Calibrate quality scores: from a score to the probability to end correct (ARRoL, calibration).

Scores s' in [0, 1] of recent labelled trajectories are counted in B equal bins, right and wrong ones separately. With
Laplace smoothing alpha and the prior pi, the share of right ones,

    P(b | right) = (right_b + alpha) / (sum right + alpha B),        the same for wrong,
    q = pi P(b | right) / (pi P(b | right) + (1 - pi) P(b | wrong)).

Two things are added to the paper's form. The tests compare the result with the paper's form.

Monotone q: of a few hundred labels a bin holds two or three, so this q jumps from bin to bin and is a worse predictor
than the score it is made from. A useful score rises with the probability to end correct, so q is made non-decreasing by
isotonic regression, each bin weighted by what was counted in it. That alone separates noise from evidence, so less
smoothing is needed; and the q of a score that says nothing, or is reversed, ends close to the prior everywhere.

Inverse propensity weights: a pruned trajectory never gets a reward, so labels are missing, and not at random. The prior
of the survivors is biased, and so is q wherever survival was decided by more than the score at hand: by an earlier
detection point, or by the head as it was then. Each label records the probability with which its trajectory survived.
Weighted by 1 / probability the survivors represent the pruned ones as well. Weights are scaled to mean one, so that
smoothing counts as much against them as against as many plain labels.
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
"""The paper's values. In the first steps the head and the model change fast, so a score soon means something else."""
SMOOTHING = 0.25
"""The paper's is 1. Monotone q needs less; the better the score, the less is best. Over synthetic scores of four kinds
and 300 to 4096 labels, the error with this was at most half as much again as with the best of 1/64 to 1."""
COLD_LABELS = 256
"""With fewer, the 2 alpha B labels that the paper's smoothing adds outweigh the real ones: q is close to the prior."""
BUFFER = 4096
"""Labels of a few steps of a usual size, so that labels of old weights are soon forgotten."""
MAX_WEIGHT = 10.0
"""1 / p_min of the paper: no weight is clipped unless p_min is set lower."""


class CalibrationStatus(StrEnum):
    """Whether scores are calibrated and, if not, why. Then every q is the prior."""

    READY = "ready"
    NO_LABELS = "no_labels"
    """No reward was reported."""
    COLD = "cold"
    """The first steps, which only collect labels."""
    FEW_LABELS = "few_labels"
    ONE_CLASS = "one_class"
    """All labels are right, or all are wrong."""


@dataclass(frozen=True, slots=True)
class Label:
    """A scored trajectory with a reward.

    ``score``: s' in [0, 1]. ``target``: 1 right, 0 wrong, or in between. ``survival``: the probability in (0, 1] with
    which it was kept; 1 if it could not be pruned.
    """

    score: float
    target: float
    survival: float = 1.0

    def __post_init__(self) -> None:
        for name, x in (("score", self.score), ("target", self.target)):
            if not 0 <= x <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {x}")
        if not 0 < self.survival <= 1:
            raise ValueError(f"survival must be in (0, 1], got {self.survival}")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Options of a calibration.

    ``bins``: B. ``buffer``: how many labels are kept. ``cold_steps``, ``cold_labels``: numbers of steps and of labels
    before which scores are not calibrated.
    """

    bins: int = BINS
    buffer: int = BUFFER
    cold_steps: int = COLD_STEPS
    cold_labels: int = COLD_LABELS


class Calibrator:
    """Learn from labels what a score is worth. Use one for each kind of score and each detection point.

    ``labels``, oldest first, and ``steps`` of the trainer: those of an earlier one, which this one continues.
    """

    def __init__(self, calibration: Calibration | None = None, labels: Iterable[Label] = (), steps: int = 0) -> None:
        self.calibration = calibration or Calibration()
        self.labels: deque[Label] = deque(labels, maxlen=self.calibration.buffer)
        self.steps = steps
        self._cached: tuple[float, bool, Floats] | None = None

    def add(self, label: Label) -> None:
        self.labels.append(label)
        self._cached = None

    @property
    def status(self) -> CalibrationStatus:
        """Whether scores are calibrated well enough to prune by them."""
        if self.labels and self.steps < self.calibration.cold_steps:
            return CalibrationStatus.COLD
        return self.labels_status

    @property
    def labels_status(self) -> CalibrationStatus:
        """Whether the labels suffice to calibrate scores, in the first steps too."""
        if not self.labels:
            return CalibrationStatus.NO_LABELS
        if len(self.labels) < self.calibration.cold_labels:
            return CalibrationStatus.FEW_LABELS
        return CalibrationStatus.ONE_CLASS if self._fit()[1] else CalibrationStatus.READY

    @property
    def prior(self) -> float:
        """Share of right ones among the labels (pi); a half without any."""
        return self._fit()[0] if self.labels else 0.5

    def probability(self, score: float) -> float:
        """Return the probability q that a trajectory with this score ends correct; the prior without enough labels."""
        if self.labels_status is not CalibrationStatus.READY:
            return self.prior
        bins = self.calibration.bins
        return float(self._fit()[2][min(bins - 1, math.floor(bins * score))])

    def _fit(self) -> tuple[float, bool, Floats]:
        """Return the prior, whether all labels are of one class, and q of each bin."""
        if self._cached is not None:
            return self._cached
        bins = self.calibration.bins
        bin_of = np.minimum((bins * np.asarray([x.score for x in self.labels])).astype(np.int64), bins - 1)
        targets = np.asarray([x.target for x in self.labels])
        weights = inverse_propensity_weights([x.survival for x in self.labels])
        right = np.bincount(bin_of, weights=weights * targets, minlength=bins)
        wrong = np.bincount(bin_of, weights=weights * (1 - targets), minlength=bins)
        prior = float(right.sum() / (right.sum() + wrong.sum()))
        if_right = prior * (right + SMOOTHING) / (right.sum() + SMOOTHING * bins)
        if_wrong = (1 - prior) * (wrong + SMOOTHING) / (wrong.sum() + SMOOTHING * bins)
        chances = if_right / (if_right + if_wrong)
        chances = fit_isotonic(chances, np.asarray(right + wrong + 2 * SMOOTHING, dtype=np.float64))
        self._cached = prior, not right.any() or not wrong.any(), chances
        return self._cached


def inverse_propensity_weights(survivals: Sequence[float] | Floats, max_weight: float = MAX_WEIGHT) -> Floats:
    """Compute the weights min(1 / survival, ``max_weight``), scaled to mean one.

    Clipping trades noise for bias: a clipped label no longer represents all the pruned trajectories like it.
    """
    weights = np.minimum(1 / np.asarray(survivals, dtype=np.float64), max_weight)
    return weights / weights.mean() if weights.size else weights
