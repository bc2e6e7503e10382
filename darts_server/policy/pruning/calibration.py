"""From a quality score to the chance to end correct (ARRoL, calibration).

Scores s' in [0, 1] of recent labelled trajectories are counted in B equal bins, right and wrong apart. With Laplace
smoothing alpha and the prior pi, the share of right ones,

    P(b | right) = (right_b + alpha) / (sum right + alpha B),        the same for wrong,
    q = pi P(b | right) / (pi P(b | right) + (1 - pi) P(b | wrong)).

Of a few hundred labels a bin holds two or three. So this q jumps from bin to bin, and tells less than the score that it
is made from. A score rises with the chance to end correct, or it is none; so q is made monotone (an addition of ours):
where it falls from one bin to the next these are pooled, each by what was counted in it, until it falls nowhere
(isotonic regression, by pooling adjacent violators). That alone tells noise from what was seen, so less smoothing is
needed; and a score that tells nothing, or the wrong way round, ends close to the prior everywhere.

A pruned trajectory never gets a reward. So labels are missing, and not at random: pruning spares wrong ones where most
are right. The prior of the survivors is off, and so is q wherever survival was decided by more than the score at hand:
by an earlier detection point, or by the head as it was then. Each label knows the probability with which its trajectory
survived; counted with the weight 1 / probability the survivors stand for the pruned ones as well (inverse propensity
weighting, an addition of ours; the paper counts each as one). Weights are scaled to mean one, so that smoothing weighs
as much against them as it would against as many plain labels.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.isotonic import fit_isotonic

Floats = NDArray[np.float64]

BINS = 128
COLD_STEPS = 20
"""The paper's values."""
SMOOTHING = 0.25
"""The paper's is 1. Monotone q bears less: the stronger the score, the less is best. Over synthetic scores of four
kinds and 300 to 4096 labels, the error with this was at most half as much again as with the best of 1/64 to 1."""
COLD_LABELS = 256
"""With fewer, the paper's 2 alpha B imagined labels outweigh the real ones, and its q says little but the prior."""
BUFFER = 4096
"""Labels: some steps of a usual batch, so that an old policy's are soon forgotten."""
MAX_WEIGHT = 10.0
"""One over the paper's least survival probability: nothing is clipped unless that is set lower."""
UNKNOWN = 0.5
"""The prior while there are no labels."""


class CalibrationStatus(StrEnum):
    """Whether scores are calibrated and, where not, why: then every q is the prior."""

    READY = "ready"
    NO_LABELS = "no_labels"
    """No reward was ever reported."""
    COLD = "cold"
    """The first steps, which learn only."""
    FEW_LABELS = "few_labels"
    ONE_CLASS = "one_class"
    """All labels are right, or all are wrong."""


@dataclass(frozen=True, slots=True)
class Label:
    """A scored trajectory whose reward is known.

    ``score``: s' in [0, 1]. ``target``: 1 right, 0 wrong, or in between. ``survival``: the probability, in (0, 1], with
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
    """``bins``: B. ``smoothing``: alpha. ``buffer``: labels that are remembered. ``monotone``: q never falls as the
    score rises. ``corrected``: inverse propensity weights of at most ``max_weight``. ``cold_steps``, ``cold_labels``:
    scores are not calibrated before so many steps were made and so many labels are known.
    """

    bins: int = BINS
    smoothing: float = SMOOTHING
    buffer: int = BUFFER
    monotone: bool = True
    corrected: bool = True
    max_weight: float = MAX_WEIGHT
    cold_steps: int = COLD_STEPS
    cold_labels: int = COLD_LABELS

    def __post_init__(self) -> None:
        if self.bins < 1:
            raise ValueError(f"bins must be at least 1, got {self.bins}")
        if not 0 < self.smoothing < math.inf:
            raise ValueError(f"smoothing must be finite and above 0, got {self.smoothing}")
        if not 1 <= self.max_weight < math.inf:
            raise ValueError(f"max_weight must be finite and at least 1, got {self.max_weight}")
        if self.cold_steps < 0:
            raise ValueError(f"cold_steps must be at least 0, got {self.cold_steps}")
        if not 0 <= self.cold_labels <= self.buffer:
            raise ValueError(f"cold_labels must be in [0, buffer = {self.buffer}], got {self.cold_labels}")

    @property
    def as_published(self) -> Self:
        """The same without what was added here."""
        return replace(self, smoothing=1.0, monotone=False, corrected=False)


@dataclass(frozen=True, slots=True)
class CalibrationState:
    """What a `Calibrator` has learned. Plain fields: ``CalibrationState(**json)`` restores it.

    ``labels``: (score, target, survival) of the remembered ones, oldest first. ``steps``: how many were made.
    """

    labels: tuple[tuple[float, float, float], ...] = ()
    steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple((s, y, p) for s, y, p in self.labels))  # JSON knows lists only
        for label in self.labels:
            Label(*label)
        if self.steps < 0:
            raise ValueError(f"steps must be at least 0, got {self.steps}")


@dataclass(frozen=True, slots=True)
class _Table:
    """What the buffer says at present. ``chances``: q of each bin, by the formulas above."""

    prior: float
    one_class: bool
    chances: Floats


class Calibrator:
    """Learns from labels what a score is worth. One for each kind of score and each position it is taken at."""

    def __init__(self, calibration: Calibration | None = None, state: CalibrationState | None = None) -> None:
        state = state or CalibrationState()
        self.calibration = calibration or Calibration()
        self._labels: deque[Label] = deque((Label(*x) for x in state.labels), maxlen=self.calibration.buffer)
        self._steps = state.steps
        self._known: _Table | None = None

    @property
    def state(self) -> CalibrationState:
        return CalibrationState(tuple((x.score, x.target, x.survival) for x in self._labels), self._steps)

    def step(self) -> None:
        """One more step of the trainer was made."""
        self._steps += 1

    def add(self, label: Label) -> None:
        self._labels.append(label)
        self._known = None

    @property
    def status(self) -> CalibrationStatus:
        if not self._labels:
            return CalibrationStatus.NO_LABELS
        if self._steps < self.calibration.cold_steps:
            return CalibrationStatus.COLD
        if len(self._labels) < self.calibration.cold_labels:
            return CalibrationStatus.FEW_LABELS
        return CalibrationStatus.ONE_CLASS if self._table().one_class else CalibrationStatus.READY

    @property
    def prior(self) -> float:
        """Pi: the share of right ones among the labels; a half while there are none."""
        return self._table().prior if self._labels else UNKNOWN

    def probability(self, score: float) -> float:
        """The chance q that a trajectory with this score ends correct; the prior unless the status is ``READY``.

        Raises:
            ValueError: ``score`` is outside [0, 1].
        """
        if not 0 <= score <= 1:
            raise ValueError(f"score must be in [0, 1], got {score}")
        if self.status is not CalibrationStatus.READY:
            return self.prior
        return float(self._table().chances[bin_index(score, self.calibration.bins)])

    def _table(self) -> _Table:
        if self._known is None:
            self._known = _table(self._labels, self.calibration)
        return self._known


def label_from_reward(reward: float, threshold: float | None = None) -> float:
    """What a reward says as a label: 1 from ``threshold`` on and 0 below it; without one the reward, held to [0, 1].

    Raises:
        ValueError: ``reward`` is not finite.
    """
    if not math.isfinite(reward):
        raise ValueError(f"reward must be finite, got {reward}")
    return min(max(reward, 0.0), 1.0) if threshold is None else float(reward >= threshold)


def bin_index(score: float, bins: int) -> int:
    """The bin of a score: min(B - 1, floor(B s'))."""
    return min(bins - 1, math.floor(bins * score))


def inverse_propensity_weights(survivals: Sequence[float] | Floats, most: float = MAX_WEIGHT) -> Floats:
    """Weights min(1 / survival, ``most``), scaled to mean one.

    What is clipped no longer stands for all of those it should: less noise, at the price of some bias.

    Raises:
        ValueError: a survival probability is outside (0, 1].
    """
    p = np.asarray(survivals, dtype=np.float64)
    if not ((p > 0) & (p <= 1)).all():
        raise ValueError("survival probabilities must be in (0, 1]")
    weights = np.minimum(1 / p, most)
    return weights / weights.mean() if p.size else weights


def _table(labels: Sequence[Label] | deque[Label], calibration: Calibration) -> _Table:
    bins, alpha = calibration.bins, calibration.smoothing
    places = np.asarray([bin_index(x.score, bins) for x in labels])
    targets = np.asarray([x.target for x in labels])
    weights = np.ones(targets.size)
    if calibration.corrected:
        weights = inverse_propensity_weights([x.survival for x in labels], calibration.max_weight)
    right = np.bincount(places, weights=weights * targets, minlength=bins)
    wrong = np.bincount(places, weights=weights * (1 - targets), minlength=bins)
    prior = float(right.sum() / (right.sum() + wrong.sum()))
    if_right = prior * (right + alpha) / (right.sum() + alpha * bins)
    if_wrong = (1 - prior) * (wrong + alpha) / (wrong.sum() + alpha * bins)
    chances = if_right / (if_right + if_wrong)
    if calibration.monotone:
        chances = fit_isotonic(chances, np.asarray(right + wrong + 2 * alpha, dtype=np.float64))
    return _Table(prior, not right.any() or not wrong.any(), chances)
