"""Choose the mean number of candidates per prompt (DARTS, adaptive redundancy allocation, part a).

More candidates make groups shorter, and cost time or save it: each takes a place in the batch, but with early stopping
the longest need not be waited for. `choose_mean_candidates` weighs the two by simulation (`rollout_model`),

    U(m) = E(m) - budget_aversion * T(m),        m = mean candidates per prompt (the paper's M-bar),

    E(m) = 1 - mean returned length at m / mean returned length of the unshaped batch,
    T(m) = seconds of the rollout at m / seconds of the unshaped batch,

where the unshaped batch starts ``size`` candidates a prompt and waits for all of them. So ``budget_aversion`` has no
unit: it is by how many per cent groups must get shorter to be worth one per cent more time.

All m are tried on the same sample: a prompt's first candidates are the same, whatever their number. So a difference
between two m is due to m, not to chance.

`cv_log_mean` is the closed form of the paper's public code.
"""

import math
from dataclasses import dataclass

import numpy as np

from darts_server.policy.allocation.rollout_model import (
    RolloutEstimate,
    SampledRollouts,
    Workload,
    estimate_shaped,
    estimate_unshaped,
)
from darts_server.policy.latency.curve import LatencyCurve

CV_GAIN, CV_SCALE, CV_MAX = 1.5, 5.0, 1.75
"""Constants of the public code."""
STEP = 0.5
"""Distance of the m that are tried."""


def cv_log_mean(std: float, mean: float, size: int) -> float:
    """Compute the mean candidates per prompt as the public code does: clip(M (1 + 1.5 ln(5 std / mean)), M, 1.75 M).

    ``std``: mean length std within a prompt, averaged over the last steps; ``mean``: mean length of the last step; both
    in tokens, see `DatasetStats`. ``size``: M.

    Raises:
        ValueError: ``std`` is negative, ``mean`` is not above 0, one is not finite, or ``size`` is below 1.
    """
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"std must be finite and at least 0, got {std}")
    if not (math.isfinite(mean) and mean > 0):
        raise ValueError(f"mean must be finite and above 0, got {mean}")
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    spread = CV_SCALE * std / mean
    return size * min(1 + CV_GAIN * math.log(spread), CV_MAX) if spread > 1 else float(size)


@dataclass(frozen=True, slots=True)
class BudgetTrial:
    """One m that was tried, and its utility."""

    mean_candidates: float
    utility: float
    estimate: RolloutEstimate


@dataclass(frozen=True, slots=True)
class BudgetDecision:
    """The best of the ``trials``, which are in ascending order of m, and the ``unshaped`` batch for comparison."""

    mean_candidates: float
    utility: float
    trials: tuple[BudgetTrial, ...]
    unshaped: RolloutEstimate


def choose_mean_candidates(
    workload: Workload,
    low: int,
    high: int,
    curve: LatencyCurve,
    budget_aversion: float,
    rng: np.random.Generator,
) -> BudgetDecision:
    """Choose the mean candidates per prompt with the largest utility, in steps of a half from ``low`` to ``high``.

    Of equal ones the smallest. A generator with the same seed gives the same decision.

    Raises:
        ValueError: ``low`` and ``high`` do not hold size <= low <= high, or ``budget_aversion`` is negative or not
            finite.
    """
    if not workload.size <= low <= high:
        raise ValueError(f"low and high must hold {workload.size} <= low <= high, got low = {low} and high = {high}")
    if not (math.isfinite(budget_aversion) and budget_aversion >= 0):
        raise ValueError(f"budget_aversion must be finite and at least 0, got {budget_aversion}")
    sample = SampledRollouts.of(workload, high, rng)
    unshaped = estimate_unshaped(workload, curve, sample)
    trials = []
    for mean_candidates in np.arange(low, high + STEP, STEP).tolist():
        estimate = estimate_shaped(workload, mean_candidates, curve, sample)
        shortening = 1 - estimate.returned_mean / unshaped.returned_mean
        utility = shortening - budget_aversion * estimate.seconds / unshaped.seconds
        trials.append(BudgetTrial(mean_candidates, utility, estimate))
    best = max(trials, key=lambda trial: trial.utility)
    return BudgetDecision(best.mean_candidates, best.utility, tuple(trials), unshaped)
