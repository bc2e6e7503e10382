"""Survival: with which probability a scored trajectory is kept (ARRoL).

A trajectory that is scored at the detection point with the calibrated probability q to end correct is kept with

    p = clip(kappa + delta + lambda (rho - q), p_min, p_max),

where delta is chosen such that the mean of p over recent q is kappa. One that finishes before the detection point is
never pruned.

A derivation that the paper does not make: delta and rho appear only as a sum, delta + lambda rho, and delta is solved
for. So rho cancels out, and there is no parameter for it: likely right trajectories are always pruned more.

The paper takes the mean of p over labelled trajectories. These are survivors, whose q differ from those of all scored
ones, so the keep ratio comes out wrong. Fit to the q of all scored ones, or to labelled ones with the weights of
`calibration.inverse_propensity_weights`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BISECTIONS = 64
"""Halvings of an interval of a few units: the rest is below the precision of a float."""


@dataclass(frozen=True, slots=True)
class Pruning:
    """Parameters of pruning; by default the paper's.

    ``keep_ratio``: kappa. ``balance_strength``: lambda. ``min_survival``, ``max_survival``: p_min and p_max; p_min is
    above 0, so that any kind of trajectory may still be labelled.
    """

    keep_ratio: float = 0.5
    balance_strength: float = 0.5
    min_survival: float = 0.1
    max_survival: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.min_survival <= self.keep_ratio <= self.max_survival <= 1:
            raise ValueError(
                "survival must hold 0 < min_survival <= keep_ratio <= max_survival <= 1, got min_survival = "
                f"{self.min_survival}, keep_ratio = {self.keep_ratio} and max_survival = {self.max_survival}"
            )
        if not 0 <= self.balance_strength <= 100:
            raise ValueError(f"balance_strength must be in [0, 100], got {self.balance_strength}")

    def fit(
        self, qualities: Sequence[float] | Floats, weights: Sequence[float] | Floats | None = None
    ) -> "SurvivalCurve":
        """Fit survival to recent q, such that its mean over them is the keep ratio.

        The mean rises with delta from p_min to p_max, and the keep ratio lies between these, so bisection finds delta.
        Where a whole range of delta gives the keep ratio, all of them give the same p.

        Raises:
            ValueError: there is no q, one is outside [0, 1], or the weights are not one for each, at least 0 and not
                all 0.
        """
        q = np.asarray(qualities, dtype=np.float64)
        w = np.ones(q.size) if weights is None else np.asarray(weights, dtype=np.float64)
        if not ((q >= 0) & (q <= 1)).all():
            raise ValueError("qualities must be in [0, 1]")
        if w.size != q.size or not (np.isfinite(w) & (w >= 0)).all() or not w.any():
            raise ValueError("weights must be one for each quality, finite, at least 0, and not all 0")
        w = w / w.sum()
        pull = self.keep_ratio - self.balance_strength * q
        low, high = self.min_survival - float(pull.max()), self.max_survival - float(pull.min())
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            kept = np.clip(pull + middle, self.min_survival, self.max_survival)
            if float(kept @ w) < self.keep_ratio:
                low = middle
            else:
                high = middle
        return SurvivalCurve(self, (low + high) / 2)


@dataclass(frozen=True, slots=True)
class SurvivalCurve:
    """Survival as a function of quality. ``shift``: delta + lambda rho."""

    pruning: Pruning
    shift: float

    def survival(self, quality: float) -> float:
        """Return the probability p with which to keep a trajectory of this ``quality`` (q)."""
        rule = self.pruning
        pull = rule.keep_ratio + self.shift - rule.balance_strength * quality
        return min(max(pull, rule.min_survival), rule.max_survival)
