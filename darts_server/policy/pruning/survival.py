"""Who survives pruning (ARRoL, survival).

A trajectory that is scored at the detection point with the calibrated chance q is kept with probability

    p = clip(kappa + delta + lambda (rho - q), p_min, p_max),

where delta is such that the mean of p over recent q is kappa. A trajectory that ends before the detection point is
never pruned.

Delta and rho stand in it as a sum, and delta is solved for: whatever rho is, delta takes it back. So the paper's form
always prunes those more that are likely right, which pulls towards rho only while more than rho are right, and away
from it else. `Pruning.aimed` is a form of ours that heeds rho: the slope -lambda becomes one from -lambda to lambda,

    p = clip(kappa + delta + slope (q - rho), p_min, p_max),    slope = clip(kappa (rho - m) / v, -lambda, lambda),

with m and v the mean and variance of the recent q. Without clipping the survivors' mean q is m + slope v / kappa, so
this slope brings it to rho, or as near as lambda allows; far above rho it is the paper's form. Taken over the q of one
group rather than of all prompts, it keeps the right ones of a hard prompt and the wrong ones of an easy one.

The paper takes the mean of p over labelled trajectories. These are survivors, whose q differ from those of all that are
scored, so the keep ratio comes out off. Give the q of all scored ones, or the labelled ones with the weights of
`calibration.inverse_propensity`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BISECTIONS = 64
"""Halvings of an interval of a few units: what is left is below what a float can tell apart."""
LEAST_VARIANCE = 1e-12
"""Of q that are all alike: then no slope moves their mean."""


class Chances(Protocol):
    """A numpy ``Generator``, or what stands for one."""

    def random(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Pruning:
    """The paper's values by default.

    ``keep_ratio``: kappa. ``target_positive_ratio``: rho. ``balance_strength``: lambda. ``min_survival``,
    ``max_survival``: p_min and p_max; p_min is above 0, so that every trajectory may still be labelled. ``aimed``: the
    form that heeds rho; the paper's is without.
    """

    keep_ratio: float = 0.5
    target_positive_ratio: float = 0.5
    balance_strength: float = 0.5
    min_survival: float = 0.1
    max_survival: float = 0.9
    aimed: bool = False

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
        """How to prune after these recent q: their mean survival is the keep ratio. Without any, delta is 0.

        The mean never falls as delta rises, from p_min to p_max, and the keep ratio is between these: bisection finds
        delta. Where a whole range of delta meets it, all of them give the same p.

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

    def _slope(self, q: Floats, w: Floats) -> float:
        mean = float(q @ w)
        variance = float((q - mean) ** 2 @ w)
        if variance < LEAST_VARIANCE:
            return 0.0
        steep = self.keep_ratio * (self.target_positive_ratio - mean) / variance
        return min(max(steep, -self.balance_strength), self.balance_strength)


@dataclass(frozen=True, slots=True)
class SurvivalCurve:
    """Survival as it is at present. ``slope``: of p in q, -lambda in the paper's form. ``shift``: delta."""

    pruning: Pruning
    slope: float
    shift: float

    def survival(self, quality: float) -> float:
        """p of a trajectory with the chance ``quality`` (q)."""
        rule = self.pruning
        pull = rule.keep_ratio + self.shift + self.slope * (quality - rule.target_positive_ratio)
        return min(max(pull, rule.min_survival), rule.max_survival)


@dataclass(frozen=True, slots=True)
class Draw:
    """``survival``: the probability with which it was kept, as its label must know it. ``kept``: how the draw fell."""

    survival: float
    kept: bool


def draw(survivals: Sequence[float], spare: int, rng: Chances) -> list[Draw]:
    """Keep or prune the trajectories of one group, in the order in which they reach the detection point.

    ``survivals``: p of each. ``spare``: how many may be pruned, that is, those that can still be returned less M. Once
    so many were pruned the others are kept for sure, with probability 1, which is then what their labels know: given
    all that was drawn before, each probability told is the true one, and inverse propensity weights stay unbiased.

    One number is taken from ``rng`` for each, whatever comes of it: the same numbers give the same decisions, also if
    the group is drawn in several calls.
    """
    drawn = []
    for p in survivals:
        lot = rng.random()
        told = p if spare > 0 else 1.0
        drawn.append(Draw(told, lot < told))
        spare -= not drawn[-1].kept
    return drawn
