"""How many candidates in total (DARTS, adaptive redundancy allocation, part a).

More candidates make shorter groups, and cost time or save it: each takes a place in the batch, but with early stopping
the long ones need not be waited for. `best_mean` weighs the two by simulation,

    U(m) = E(m) - budget_aversion * T(m),        m = mean candidates per prompt (the paper's M-bar),

    E(m) = 1 - mean returned length at m / mean returned length of the unshaped batch,
    T(m) = seconds of the rollout at m / seconds of the unshaped batch,

where the unshaped batch starts ``size`` candidates a prompt and waits for all of them. ``budget_aversion`` is thus a
plain number: how many per cent shorter groups must get for rollouts that last one per cent longer.

Lengths are drawn from the recorded distribution and stopped as the selection rules do it. All m are tried on the same
draws: a prompt's first candidates are the same, whatever their number. What differs between two m is therefore due to
m, and the same draws give the same answer. Every prompt gets m candidates; how `allocation` spreads them is not
simulated.

`cv_log` is what the paper's public code does instead.
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

CV_GAIN, CV_SCALE, CV_MOST = 1.5, 5.0, 1.75
"""Constants of the public code."""
STEP = 0.5
"""Between the m that are tried."""


def cv_log_mean(std: float, mean: float, size: int) -> float:
    """Mean candidates per prompt by the closed form of the public code: clip(M (1 + 1.5 ln(5 std / mean)), M, 1.75 M).

    ``std``: mean over the last steps of the step's mean length std; ``mean``: the last step's mean length, both in
    tokens; see `DatasetStats`. ``size``: M.

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
    return size * min(1 + CV_GAIN * math.log(spread), CV_MOST) if spread > 1 else float(size)


@dataclass(frozen=True, slots=True)
class BudgetTrial:
    """One m that was tried, and its utility."""

    mean_candidates: float
    utility: float
    expectation: RolloutEstimate


@dataclass(frozen=True, slots=True)
class BudgetDecision:
    """The best of the ``trials``, which are in ascending order of m, and the ``unshaped`` batch to compare with."""

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
    """The mean candidates per prompt in [``low``, ``high``] with the largest utility, among whole and half numbers.

    Of equal ones the smallest. A generator with the same seed gives the same answer.

    Raises:
        ValueError: ``low`` and ``high`` do not hold size <= low <= high, or ``budget_aversion`` is negative or not
            finite.
    """
    if not workload.size <= low <= high:
        raise ValueError(f"low and high must hold {workload.size} <= low <= high, got low = {low} and high = {high}")
    if not (math.isfinite(budget_aversion) and budget_aversion >= 0):
        raise ValueError(f"budget_aversion must be finite and at least 0, got {budget_aversion}")
    draws = SampledRollouts.of(workload, high, rng)
    base = estimate_unshaped(workload, curve, draws)
    trials = []
    for mean_candidates in np.arange(low, high + STEP, STEP).tolist():
        found = estimate_shaped(workload, mean_candidates, curve, draws)
        shortening = 1 - found.returned_mean / base.returned_mean
        utility = shortening - budget_aversion * found.seconds / base.seconds
        trials.append(BudgetTrial(mean_candidates, utility, found))
    best = max(trials, key=lambda trial: trial.utility)
    return BudgetDecision(best.mean_candidates, best.utility, tuple(trials), base)
