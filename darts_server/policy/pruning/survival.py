"""Survival: with which probability a scored trajectory is kept (ARRoL).

A trajectory that is scored at the detection point with the calibrated probability q to end correct is kept with

    p = clip(kappa + delta + lambda (rho - q), p_min, p_max),

where delta is chosen such that the mean of p over recent q is kappa. One that finishes before the detection point is
never pruned.

A derivation that the paper does not make: delta and rho appear only as a sum, delta + lambda rho, and delta is solved
for. So rho cancels out. The paper's form always prunes likely right trajectories more, which pulls the share of right
ones towards rho only while more than rho are right, and away from it otherwise. `Pruning.aimed` is our form that
depends on rho: the slope -lambda is replaced by one in [-lambda, lambda],

    p = clip(kappa + delta + slope (q - rho), p_min, p_max),    slope = clip(kappa (rho - m) / v, -lambda, lambda),

with m and v the mean and variance of the recent q. Without clipping the survivors' mean q is E[p q] / E[p] =
m + slope v / kappa, so this slope brings it to rho, or as near as lambda allows; for m far above rho it is the paper's
form. Fitted to the q of one group instead of all prompts, it keeps the right trajectories of a hard prompt and the
wrong ones of an easy one.

The paper takes the mean of p over labelled trajectories. These are survivors, whose q differ from those of all scored
ones, so the keep ratio comes out wrong. Fit to the q of all scored ones, or to labelled ones with the weights of
`calibration.inverse_propensity_weights`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BISECTIONS = 64
"""Halvings of an interval of a few units: the rest is below the precision of a float."""
LEAST_VARIANCE = 1e-12
"""Below it all q are equal, and no slope moves their mean."""


class RecentQualities(Protocol):
    """The qualities that were seen lately at one detection point, over all groups."""

    def survival(self, quality: float, pruning: "Pruning") -> float:
        """Add a trajectory's quality, and return the probability with which to keep the trajectory."""
        ...


class SurvivalRule(Protocol):
    """With which probability each candidate of one group is kept, given that it was kept so far."""

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Numbers of generated tokens, ascending, at which candidates are pruned without a score."""
        ...

    def at_checkpoint(self, index: int, tokens: int) -> float:
        """Return the probability with which to keep a candidate that has come to one of these."""
        ...

    def at_score(self, index: int, tokens: int, quality: float | None, recent: RecentQualities) -> float:
        """Return the probability with which to keep a candidate that was scored after ``tokens`` tokens.

        ``quality``: q, ``None`` while scores are not calibrated.
        """
        ...


@dataclass(frozen=True, slots=True)
class Pruning:
    """Parameters of pruning; by default the paper's.

    ``keep_ratio``: kappa. ``target_positive_ratio``: rho. ``balance_strength``: lambda. ``min_survival``,
    ``max_survival``: p_min and p_max; p_min is above 0, so that any kind of trajectory may still be labelled.
    ``aimed``: use the form that depends on rho.
    """

    keep_ratio: float = 0.5
    target_positive_ratio: float = 0.5
    balance_strength: float = 0.5
    min_survival: float = 0.1
    max_survival: float = 0.9
    aimed: bool = False
    checkpoints: ClassVar[tuple[int, ...]] = ()
    needs_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.min_survival <= self.keep_ratio <= self.max_survival <= 1:
            raise ValueError(
                "survival must hold 0 < min_survival <= keep_ratio <= max_survival <= 1, got min_survival = "
                f"{self.min_survival}, keep_ratio = {self.keep_ratio} and max_survival = {self.max_survival}"
            )
        if not 0 <= self.target_positive_ratio <= 1:
            raise ValueError(f"target_positive_ratio must be in [0, 1], got {self.target_positive_ratio}")
        if not 0 <= self.balance_strength <= 100:
            raise ValueError(f"balance_strength must be in [0, 100], got {self.balance_strength}")

    def fit(
        self, qualities: Sequence[float] | Floats, weights: Sequence[float] | Floats | None = None
    ) -> "SurvivalCurve":
        """Fit survival to recent q, such that its mean over them is the keep ratio. Without any, delta is 0.

        The mean rises with delta from p_min to p_max, and the keep ratio lies between these, so bisection finds delta.
        Where a whole range of delta gives the keep ratio, all of them give the same p.

        Raises:
            ValueError: a q is outside [0, 1], or the weights are not one for each, at least 0 and not all 0.
        """
        q = np.asarray(qualities, dtype=np.float64)
        w = np.ones(q.size) if weights is None else np.asarray(weights, dtype=np.float64)
        if not ((q >= 0) & (q <= 1)).all():
            raise ValueError("qualities must be in [0, 1]")
        if w.size != q.size or not (np.isfinite(w) & (w >= 0)).all() or (q.size and not w.any()):
            raise ValueError("weights must be one for each quality, finite, at least 0, and not all 0")
        if not q.size:
            return SurvivalCurve(self, -self.balance_strength, 0.0)
        w = w / w.sum()
        slope = self._slope(q, w) if self.aimed else -self.balance_strength
        pull = self.keep_ratio + slope * (q - self.target_positive_ratio)
        low, high = self.min_survival - float(pull.max()), self.max_survival - float(pull.min())
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            kept = np.clip(pull + middle, self.min_survival, self.max_survival)
            if float(kept @ w) < self.keep_ratio:
                low = middle
            else:
                high = middle
        return SurvivalCurve(self, slope, (low + high) / 2)

    def for_prompt(self, forecast: Callable[[], object]) -> SurvivalRule:
        """Return the rule of one group: the same for all prompts."""
        return self

    def at_checkpoint(self, index: int, tokens: int) -> float:
        """See `SurvivalRule`; there are none."""
        return 1.0

    def at_score(self, index: int, tokens: int, quality: float | None, recent: RecentQualities) -> float:
        """See `SurvivalRule`."""
        return 1.0 if quality is None else recent.survival(quality, self)

    def _slope(self, q: Floats, w: Floats) -> float:
        mean = float(q @ w)
        variance = float((q - mean) ** 2 @ w)
        if variance < LEAST_VARIANCE:
            return 0.0
        steep = self.keep_ratio * (self.target_positive_ratio - mean) / variance
        return min(max(steep, -self.balance_strength), self.balance_strength)


@dataclass(frozen=True, slots=True)
class SurvivalCurve:
    """Survival as a function of quality. ``slope``: of p in q, -lambda in the paper's form. ``shift``: delta."""

    pruning: Pruning
    slope: float
    shift: float

    def survival(self, quality: float) -> float:
        """Return the probability p with which to keep a trajectory of this ``quality`` (q)."""
        rule = self.pruning
        pull = rule.keep_ratio + self.shift + self.slope * (quality - rule.target_positive_ratio)
        return min(max(pull, rule.min_survival), rule.max_survival)
