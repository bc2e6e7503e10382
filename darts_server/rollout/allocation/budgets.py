"""Choose the mean number of candidates per group."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from darts_server.policy.allocation.budget import choose_mean_candidates, cv_log_mean
from darts_server.policy.allocation.rollout_model import SampledRollouts, Workload, estimate_shaped
from darts_server.policy.shaping import BudgetKind, Shaping
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
        low, high = shaping.bounds(size)
        mean = self._mean(shaping, size, high) if requested is None else requested
        workload, curve = self._workload(shaping, size, keys), self._latency.curve
        if workload is None or curve is None:
            return Budget(mean)
        workload, curve = _spread(workload, servers), curve.shared_by(servers)
        rng = np.random.default_rng(SEED)
        if requested is None and shaping.budget is BudgetKind.UTILITY:
            found = choose_mean_candidates(workload, low, high, curve, shaping.budget_aversion, rng)
            best = max(found.trials, key=lambda trial: trial.utility)
            return Budget(best.mean_candidates, best.estimate.seconds)
        return Budget(mean, estimate_shaped(workload, mean, curve, SampledRollouts.of(workload, high, rng)).seconds)

    def _mean(self, shaping: Shaping, size: int, high: int) -> float:
        """The mean by formula, at most ``high``: a request may name a policy that allows less than the server's.

        That of a policy that gives all prompts the same number is a whole number, as where groups come one by one.
        """
        stats = self._dataset.stats if shaping.budget is BudgetKind.CV_LOG else None
        if stats is None or stats.std is None or not stats.mean:
            wanted = shaping.redundancy * size if shaping.adaptive else shaping.candidates(size)
            return min(wanted, high)
        return min(cv_log_mean(stats.std, stats.mean, size), high)

    def _workload(self, shaping: Shaping, size: int, keys: Sequence[str]) -> Workload | None:
        """Describe the cohort for the simulation; unseen prompts get the mean of the others."""
        ratios = self._dataset.profile.quantiles(RATIOS)
        means = [self._prompts.mean(key) for key in keys]
        seen = [mean for mean in means if mean is not None]
        typical = sum(seen) / len(seen) if seen else self._dataset.stats.mean
        if ratios is None or not typical:
            return None
        place, high = shaping.completion_place(size), shaping.bounds(size)[1]
        saturates = shaping.deadline is None and shaping.is_saturated(size, high)
        return Workload(
            means=[typical if mean is None else mean for mean in means],
            ratios=ratios,
            size=size,
            num_longest=min(shaping.num_longest, size - 1) if place == size else size - place,
            tail=shaping.tail,
            cut=shaping.deadline is not None,
            completion_place=place,
            capacity=self._latency.capacity,
            stds=[self._prompts.std(key) for key in keys] if shaping.adaptive else None,
            saturated_at=high if saturates else None,
            start_seconds=self._latency.start_seconds or 0.0,
        )


def _spread(workload: Workload, servers: int) -> Workload:
    """Return the workload for engines that share it evenly, simulated as one with the places of all.

    So its time is that of the whole batch, which ends with the last of them.
    """
    capacity = None if workload.capacity is None else workload.capacity * servers
    return replace(workload, capacity=capacity, start_seconds=workload.start_seconds / servers)
