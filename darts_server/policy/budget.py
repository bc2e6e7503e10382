"""Choose the mean number of candidates per prompt (DARTS, adaptive redundancy allocation, part a).

More candidates make groups shorter, and cost time or save it: each takes a place in the batch, but with early stopping
the longest need not be waited for. `choose_mean_candidates` weighs the two by what the model of a rollout forecasts,

    U(m) = E(m) - budget_aversion * T(m),        m = mean candidates per prompt (the paper's M-bar),

    E(m) = 1 - mean returned length at m / mean returned length of the unshaped batch,
    T(m) = seconds of the rollout at m / seconds of the unshaped batch,

where the unshaped batch starts ``size`` candidates a prompt and waits for all of them. So ``budget_aversion`` has no
unit: it is by how many per cent groups must get shorter to be worth one per cent more time.

All m are tried on the same samples: a prompt's first candidates are the same, whatever their number. So a difference
between two m is due to m, not to chance. A large batch is forecast by a scale model: some of its prompts, on a machine
of which each place stands for several.

`cv_log_mean` is the closed form of the paper's public code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from darts_server.policy.deadline import MIN_GROUPS
from darts_server.policy.shaping import Shaping
from darts_server.policy.simulation.batch import Batch, Plan
from darts_server.policy.simulation.forecast import Expectation, Forecast, forecast
from darts_server.policy.simulation.machine import Machine

CV_GAIN, CV_SCALE, CV_MAX = 1.5, 5.0, 1.75
"""Constants of the public code."""
STEP, MOST_TRIED = 0.5, 17
"""Least distance of the m that are tried, and how many are at most: 8 to 16 by halves."""
SIMULATED = 4096
"""Candidates that are simulated for each m: small batches several times over, large ones as a scale model."""


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
    """An m that was tried, its utility, and the seconds that a rollout is predicted to take with it."""

    mean_candidates: float
    utility: float
    seconds: float


def choose_mean_candidates(
    shaping: Shaping, size: int, expectation: Expectation, machine: Machine, rng: np.random.Generator
) -> BudgetTrial:
    """Choose the mean candidates per prompt with the largest utility, of equal ones the smallest.

    A generator with the same seed gives the same choice.
    """
    return max(try_mean_candidates(shaping, size, expectation, machine, rng), key=lambda trial: trial.utility)


def try_mean_candidates(
    shaping: Shaping, size: int, expectation: Expectation, machine: Machine, rng: np.random.Generator
) -> list[BudgetTrial]:
    """Try mean candidates per prompt that the policy allows to groups of ``size``, see `MOST_TRIED`."""
    model = _Model.of(shaping, size, expectation, machine, rng)
    unshaped = model.forecast(None)
    trials = []
    for mean_candidates in _tried(*shaping.bounds(size)):
        found = model.forecast(mean_candidates)
        shortening = 1 - found.mean_length / unshaped.mean_length
        utility = shortening - shaping.budget_aversion * found.seconds / unshaped.seconds
        trials.append(BudgetTrial(mean_candidates, utility, found.seconds))
    return trials


def predict_seconds(
    mean_candidates: float,
    shaping: Shaping,
    size: int,
    expectation: Expectation,
    machine: Machine,
    rng: np.random.Generator,
) -> float:
    """Predict the seconds of a rollout of groups of ``size`` with so many candidates per prompt."""
    return _Model.of(shaping, size, expectation, machine, rng).forecast(mean_candidates).seconds


def _tried(low: int, high: int) -> list[float]:
    steps = min(round((high - low) / STEP), MOST_TRIED - 1)
    return [round((low + (high - low) * step / max(steps, 1)) / STEP) * STEP for step in range(steps + 1)]


@dataclass(frozen=True, slots=True, eq=False)
class _Model:
    """A batch that was sampled a few times, or a scale model of a large one. ``shaping``: without pruning."""

    shaping: Shaping
    size: int
    stds: Sequence[float | None]
    batches: Sequence[Batch]
    machine: Machine

    @staticmethod
    def of(
        shaping: Shaping, size: int, expectation: Expectation, machine: Machine, rng: np.random.Generator
    ) -> "_Model":
        most = shaping.bounds(size)[1]
        # With fewer groups there would be no deadline.
        some = expectation.thinned(max(SIMULATED // most, MIN_GROUPS))
        batches = some.sample(most, rng, max(SIMULATED // (most * some.groups), 1))
        scaled = machine.scaled(expectation.groups / some.groups)
        return _Model(shaping.by_length(size), size, some.stds, batches, scaled)

    def forecast(self, mean_candidates: float | None) -> Forecast:
        """Forecast the batch with so many candidates per prompt; ``None``: unshaped."""
        shaping = None if mean_candidates is None else self.shaping
        return forecast(Plan.of(shaping, self.size, self.stds, mean_candidates), self.batches, self.machine)
