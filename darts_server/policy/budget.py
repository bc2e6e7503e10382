"""The mean number of candidates per prompt (DARTS, adaptive redundancy allocation, part a), and how long it takes.

`cv_log_mean` is the closed form of the paper's public code.
"""

import math

import numpy as np

from darts_server.policy.deadline import MIN_GROUPS
from darts_server.policy.shaping import Shaping
from darts_server.policy.simulation.batch import Plan
from darts_server.policy.simulation.forecast import Expectation, forecast
from darts_server.policy.simulation.machine import Machine

CV_GAIN, CV_SCALE, CV_MAX = 1.5, 5.0, 1.75
"""Constants of the public code."""
SIMULATED = 4096
"""Candidates that are simulated: small batches several times over, large ones as a scale model."""


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


def predict_seconds(
    mean_candidates: float,
    shaping: Shaping,
    size: int,
    expectation: Expectation,
    machine: Machine,
    rng: np.random.Generator,
) -> float:
    """Predict the seconds of a rollout of groups of ``size`` with so many candidates per prompt, without pruning.

    A large batch is forecast by a scale model: some of its prompts, on a machine of which each place stands for
    several.
    """
    most = shaping.bounds(size)[1]
    some = expectation.thinned(max(SIMULATED // most, MIN_GROUPS))  # with fewer groups there would be no deadline
    batches = some.sample(most, rng, max(SIMULATED // (most * some.groups), 1))
    plan = Plan.of(shaping.by_length(size), size, some.stds, mean_candidates)
    return forecast(plan, batches, machine.scaled(expectation.groups / some.groups)).seconds
