"""Choose the mean number of candidates per group, and predict how long a cohort takes."""

from collections import deque
from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from darts_server.policy.budget import choose_mean_candidates, cv_log_mean, predict_seconds
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
        self._cached: dict[tuple[Shaping, int, int], tuple[float, float]] = {}

    def mean(self, shaping: Shaping, size: int, keys: Sequence[str], servers: int = 1) -> float:
        """Choose M', the mean candidates of a cohort of groups of ``size``.

        ``servers``: on how many, alike, the groups run.
        """
        self._recent.extend(keys)
        if shaping.budget is not BudgetKind.UTILITY:
            return self._by_formula(shaping, size)
        if len(keys) >= MIN_COHORT:
            return self._by_utility(shaping, size, keys, servers)
        # So few prompts say little about those to come, and many would be chosen for.
        decided_at, mean = self._cached.get((shaping, size, servers), (-inf, 0.0))
        if self._clock() - decided_at > CACHE_SECONDS:
            mean = self._by_utility(shaping, size, tuple(self._recent), servers)
            self._cached[shaping, size, servers] = (self._clock(), mean)
        return mean

    def seconds(self, mean: float, shaping: Shaping, size: int, keys: Sequence[str]) -> float | None:
        """Predict the seconds until a cohort is complete that gets ``mean`` candidates; ``None`` if unknown.

        Of fewer than `MIN_COHORT` prompts it is unknown.
        """
        if len(keys) < MIN_COHORT:
            return None
        machine, rng = self._latency.machine(), np.random.default_rng(SEED)
        expectation = self._expectation(keys, rng)
        if expectation is None or machine is None:
            return None
        return predict_seconds(mean, shaping, size, expectation, machine, rng)

    def _by_utility(self, shaping: Shaping, size: int, keys: Sequence[str], servers: int) -> float:
        machine, rng = self._latency.machine(), np.random.default_rng(SEED)
        expectation = self._expectation(keys, rng)
        if expectation is None or machine is None:
            return self._by_formula(shaping, size)
        # Engines that share the cohort are one with the places of all: it ends with the last of them.
        shared = machine.scaled(1 / servers)
        return choose_mean_candidates(shaping, size, expectation, shared, rng).mean_candidates

    def _by_formula(self, shaping: Shaping, size: int) -> float:
        """The mean by formula, at most M_up: a request may name a policy that allows less than the server's.

        That of a policy that gives all prompts the same number is a whole number, as where groups come one by one.
        """
        high = shaping.bounds(size)[1]
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
