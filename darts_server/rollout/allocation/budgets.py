"""Choose the mean number of candidates per group."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from darts_server.policy.budget import choose_mean_candidates, cv_log_mean, forecast_with
from darts_server.policy.shaping import BudgetKind, Shaping
from darts_server.policy.simulation.forecast import Expectation
from darts_server.rollout.learned.dataset import Dataset
from darts_server.rollout.learned.latency import Latency
from darts_server.rollout.learned.prompts import Prompts

SEED = 0
"""Seed of the simulated cohorts: the same statistics give the same budget."""
MIN_COHORT = 8
"""Number of prompts below which the cohort alone says too little, so that recent prompts are used too."""
RECENT_PROMPTS = 64
"""Number of recent prompts that stand in for a cohort when prompts arrive one at a time."""
CACHE_SECONDS = 10.0
"""How long a budget is cached for prompts that arrive one at a time."""
RATIOS = 512
"""Number of quantiles that represent the distribution of lengths."""


@dataclass(frozen=True, slots=True)
class Budget:
    """``mean``: M', candidates per group. ``seconds``: predicted time to complete the cohort, ``None`` if unknown."""

    mean: float
    seconds: float | None = None


class Budgets:
    """Choose budgets from the statistics of prompts, data set and engine latency.

    While there are too few statistics, every kind of budget is the fixed one.
    """

    def __init__(self, prompts: Prompts, dataset: Dataset, latency: Latency, clock: Callable[[], float]) -> None:
        self._prompts = prompts
        self._dataset = dataset
        self._latency = latency
        self._clock = clock
        self._recent: deque[str] = deque(maxlen=RECENT_PROMPTS)
        self._cached: dict[tuple[Shaping, int, int], tuple[float, Budget]] = {}

    def decide(
        self, shaping: Shaping, size: int, keys: Sequence[str], requested: float | None = None, servers: int = 1
    ) -> Budget:
        """Choose the budget of a cohort of groups of ``size``.

        ``requested``: the mean, if the caller requests one. ``servers``: on how many, alike, the groups run.
        """
        self._recent.extend(keys)
        if requested is not None or len(keys) >= MIN_COHORT:
            return self._decide(shaping, size, keys, requested, servers)
        # So few prompts say little about those to come, and a simulation takes tens of milliseconds.
        decided_at, budget = self._cached.get((shaping, size, servers), (-inf, Budget(0.0)))
        if self._clock() - decided_at > CACHE_SECONDS:
            budget = Budget(self._decide(shaping, size, tuple(self._recent), None, servers).mean)
            self._cached[shaping, size, servers] = (self._clock(), budget)
        return budget

    def _decide(
        self, shaping: Shaping, size: int, keys: Sequence[str], requested: float | None, servers: int
    ) -> Budget:
        mean = self._mean(shaping, size, shaping.bounds(size)[1]) if requested is None else requested
        machine, rng = self._latency.machine(servers), np.random.default_rng(SEED)
        expectation = self._expectation(keys, rng)
        if expectation is None or machine is None:
            return Budget(mean)
        if requested is None and shaping.budget is BudgetKind.UTILITY:
            best = choose_mean_candidates(shaping, size, expectation, machine, rng)
            return Budget(best.mean_candidates, best.forecast.seconds)
        return Budget(mean, forecast_with(mean, shaping, size, expectation, machine, rng).seconds)

    def _mean(self, shaping: Shaping, size: int, high: int) -> float:
        """The mean by formula, at most ``high``: a request may name a policy that allows less than the server's.

        That of a policy that gives all prompts the same number is a whole number, as where groups come one by one.
        """
        stats = self._dataset.stats if shaping.budget is BudgetKind.CV_LOG else None
        if stats is None or stats.std is None or not stats.mean:
            wanted = shaping.redundancy * size if shaping.adaptive else shaping.candidates(size)
            return min(wanted, high)
        return min(cv_log_mean(stats.std, stats.mean, size), high)

    def _expectation(self, keys: Sequence[str], rng: np.random.Generator) -> Expectation | None:
        """Describe the cohort to the model of a rollout; prompts that were never seen are like the others."""
        means, stds = [self._prompts.mean(key) for key in keys], [self._prompts.std(key) for key in keys]
        seen = [mean for mean in means if mean is not None] or [mean for mean in (self._dataset.stats.mean,) if mean]
        return Expectation.of(means, stds, self._dataset.profile.quantiles(RATIOS), seen, rng)
