"""Survival: with which probability a scored trajectory is kept (ARRoL).

A trajectory with the calibrated probability q of a correct answer at the detection point is kept with

    p = clip(kappa + delta + lambda (rho - q), p_min, p_max),

where delta is chosen such that the mean of p over recent q is kappa. A trajectory that finishes earlier is not pruned.

Delta and rho appear only in the sum delta + lambda rho, and delta is solved for, so there is no parameter rho. The
paper takes the mean of p over labelled trajectories. They are survivors, so the keep ratio would be wrong. Here the
mean is over all scored trajectories.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from darts_server.estimates.isotonic import Floats

KEEP_RATIO = 0.5
"""The paper's kappa. It reports less accuracy with 0.25, and less speed with 0.75."""
BALANCE_STRENGTH = 0.5
"""The paper's lambda: q changes survival by at most a half, so that bad scores do little harm."""
MIN_SURVIVAL = 0.1
MAX_SURVIVAL = 0.9
"""The paper's p_min and p_max. The weight of a label is at most ten."""
BISECTIONS = 64
"""Enough to narrow an interval of a few units to the precision of a float."""


@dataclass(frozen=True, slots=True)
class Pruning:
    """How candidates are pruned.

    ``keep_ratio``: kappa, from p_min to p_max, or 1 to score trajectories without pruning.
    """

    keep_ratio: float = KEEP_RATIO

    @property
    def prunes(self) -> bool:
        """Whether trajectories are pruned, and not only scored."""
        return self.keep_ratio != 1

    def fit(self, qualities: Sequence[float] | Floats) -> "SurvivalCurve":
        """Fit survival to recent q, at least one, such that its mean is the keep ratio."""
        # Likely right candidates survive less often, to balance right and wrong answers.
        unshifted = self.keep_ratio - BALANCE_STRENGTH * np.asarray(qualities, dtype=np.float64)
        # The mean rises with the shift from `MIN_SURVIVAL` to `MAX_SURVIVAL`, so bisection finds the shift.
        low = MIN_SURVIVAL - float(unshifted.max())
        high = MAX_SURVIVAL - float(unshifted.min())
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            mean_survival = float(np.clip(unshifted + middle, MIN_SURVIVAL, MAX_SURVIVAL).mean())
            if mean_survival < self.keep_ratio:
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
        if not self.pruning.prunes:
            return 1.0
        unclipped = self.pruning.keep_ratio + self.shift - BALANCE_STRENGTH * quality
        return min(max(unclipped, MIN_SURVIVAL), MAX_SURVIVAL)
