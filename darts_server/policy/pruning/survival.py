"""Survival: with which probability a scored trajectory is kept (ARRoL).

A trajectory that is scored at the detection point with the calibrated probability q to end correct is kept with

    p = clip(kappa + delta + lambda (rho - q), p_min, p_max),

where delta is chosen such that the mean of p over recent q is kappa. One that finishes before the detection point is
never pruned.

A derivation that the paper does not make: delta and rho appear only as a sum, delta + lambda rho, and delta is solved
for. So rho cancels out, and there is no parameter for it: likely right trajectories are always pruned more.

The paper takes the mean of p over labelled trajectories. These are survivors, whose q differ from those of all scored
ones, so the keep ratio comes out wrong. So fit to the q of all scored ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


KEEP_RATIO = 0.5
"""The paper's kappa. It reports less accuracy with 0.25, and less speed with 0.75."""
BALANCE_STRENGTH = 0.5
"""The paper's lambda: q changes survival by at most a half, so that bad scores do little harm."""
MIN_SURVIVAL, MAX_SURVIVAL = 0.1, 0.9
"""The paper's p_min and p_max. Any kind of trajectory may still be labelled, with a weight of at most ten."""


@dataclass(frozen=True, slots=True)
class Pruning:
    """Parameters of pruning; by default the paper's.

    ``keep_ratio``: kappa, from p_min to p_max, or 1: trajectories are scored, and none is pruned.
    ``balance_strength``: lambda. ``min_survival``, ``max_survival``: p_min and p_max; p_min is above 0.
    """

    keep_ratio: float = KEEP_RATIO
    balance_strength: float = BALANCE_STRENGTH
    min_survival: float = MIN_SURVIVAL
    max_survival: float = MAX_SURVIVAL

    def __post_init__(self) -> None:
        is_ordered = 0 < self.min_survival <= self.keep_ratio <= self.max_survival <= 1
        if self.prunes and not is_ordered:
            raise ValueError(
                "survival must hold 0 < min_survival <= keep_ratio <= max_survival <= 1, got min_survival = "
                f"{self.min_survival}, keep_ratio = {self.keep_ratio} and max_survival = {self.max_survival}"
            )
        if not 0 <= self.balance_strength <= 100:
            raise ValueError(f"balance_strength must be in [0, 100], got {self.balance_strength}")

    @property
    def prunes(self) -> bool:
        """Whether trajectories are pruned, and not only scored."""
        return self.keep_ratio != 1

    def fit(self, qualities: Sequence[float] | Floats) -> "SurvivalCurve":
        """Fit survival to recent q, at least one, such that its mean over them is the keep ratio.

        The mean rises with delta from p_min to p_max, and the keep ratio lies between these, so bisection finds delta.
        Where a whole range of delta gives the keep ratio, all of them give the same p.
        """
        pull = self.keep_ratio - self.balance_strength * np.asarray(qualities, dtype=np.float64)
        low, high = self.min_survival - float(pull.max()), self.max_survival - float(pull.min())
        for _ in range(64):  # what is left of an interval of a few units is below the precision of a float
            middle = (low + high) / 2
            kept = np.clip(pull + middle, self.min_survival, self.max_survival)
            if float(kept.mean()) < self.keep_ratio:
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
        if not rule.prunes:
            return 1.0
        pull = rule.keep_ratio + self.shift - rule.balance_strength * quality
        return min(max(pull, rule.min_survival), rule.max_survival)


def weight_factor(survivals: Sequence[float], started: int) -> float:
    """Return what the weights 1 / survival of a group are multiplied by where candidates failed.

    ``inf`` if that exceeds the range of floats.

    A candidate that was pruned might have failed later, and one that failed might have been pruned. So the candidates
    that count, all n that were started without the f that are known to have failed, are more than those that would not
    have failed, for which the weights 1 / survival of the survivors stand: weighted means come out too small.

    Let a set D of d of n candidates be doomed to fail at some time, all sets of that size alike: failures do not depend
    on what is generated. Given D, with W = 1 / survival until a candidate ended, and 0 for a pruned one,

    * E[W_i x_i] = x_i, and the product of the W of several candidates has expectation 1: each decision keeps it;
    * so the sum of x over all n, which is n / (n - d) times that over those outside D on average over D, is the
      expectation of g(d) * (sum of W_i x_i over the survivors) with g(d) = n / (n - d);
    * g(d) = sum over k of C(d, k) / C(n - 1, k), its Newton series, and C(d, k) is the expectation of e_k, the sum over
      all k of the failed of the product of their W. Those are other candidates than i, so the products keep their
      expectation.

    Hence each weight 1 / survival times the sum over k of e_k / C(n - 1, k) estimates sums over all n without bias, and
    times (n - f) / n sums over n - f candidates, the number that is reported. Without pruning all of it is 1.

    (n minus the sum of W over the failed estimates n - d without bias, but not its inverse; and it may be negative.)

    It is exact for a fixed number of candidates: if failures left too few, and others were started in place of them, it
    is an estimate.

    Args:
        survivals: of the candidates that failed, fewer than ``started``.
        started: n, with them.
    """
    kept = [survival for survival in survivals if survival < 1]
    k = np.arange(1, len(survivals) + 1)
    others = started - k  # C(n - 1, k) / C(n - 1, k - 1) is others / k
    # The terms e_k / C(n - 1, k) of the candidates so far, first of all with survival 1, for which e_k is a binomial
    # coefficient. Neither e_k nor C(n - 1, k) alone is in the range of floats.
    certain = len(survivals) - len(kept)
    terms = np.cumprod(np.concatenate([[1.0], np.maximum(certain + 1 - k, 0) / others]))
    with np.errstate(over="ignore"):
        for survival in kept:
            terms[1:] += terms[:-1] * (k / others) / survival
        return float(terms.sum()) * (started - len(survivals)) / started
