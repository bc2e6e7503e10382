"""How many candidates a batch gets in all."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from darts_server.policy.allocation.budget import choose_mean_candidates, cv_log_mean
from darts_server.policy.allocation.rollout_model import SampledRollouts, Workload, estimate_shaped
from darts_server.policy.shaping import BudgetKind, Shaping
from darts_server.rollout.learned.dataset import Dataset
from darts_server.rollout.learned.latency import Latency
from darts_server.rollout.learned.prompts import Prompts

SEED = 0
"""Of the simulated batches: the same knowledge gives the same budget."""
SMALLEST_BATCH = 8
"""Fewer prompts than this say less about each other than the last ones do, so those are looked at, too."""
RECENT = 64
"""Prompts that stand in for the batch when they come one at a time."""
KEPT_SECONDS = 10.0
"""How long a budget for prompts that come one at a time is kept."""
RATIOS = 512
"""Values that stand for the distribution of lengths."""


@dataclass(frozen=True, slots=True)
class Budget:
    """``mean``: M', candidates per group. ``seconds``: predicted until the batch is complete, ``None`` if unknown."""

    mean: float
    seconds: float | None = None


class Budgets:
    """Decides by what is known of prompts, of the data set and of the engine's speed.

    While too little is known, every kind of budget is the fixed one.
    """

    def __init__(self, prompts: Prompts, dataset: Dataset, latency: Latency, clock: Callable[[], float]) -> None:
        self._prompts = prompts
        self._dataset = dataset
        self._latency = latency
        self._clock = clock
        self._recent: deque[str] = deque(maxlen=RECENT)
        self._kept: dict[tuple[Shaping, int], tuple[float, Budget]] = {}

    def decide(self, shaping: Shaping, size: int, keys: Sequence[str], given: float | None = None) -> Budget:
        """The budget of a batch of groups of ``size``; its mean is ``given`` if the caller says it."""
        self._recent.extend(keys)
        if given is not None or len(keys) >= SMALLEST_BATCH:
            return self._decide(shaping, size, keys, given)
        # So few say little of what is to come, and simulating takes tens of milliseconds.
        decided_at, budget = self._kept.get((shaping, size), (-inf, Budget(0.0)))
        if self._clock() - decided_at > KEPT_SECONDS:
            budget = Budget(self._decide(shaping, size, tuple(self._recent)).mean)
            self._kept[shaping, size] = (self._clock(), budget)
        return budget

    def _decide(self, shaping: Shaping, size: int, keys: Sequence[str], given: float | None = None) -> Budget:
        low, high = shaping.bounds(size)
        mean = self._mean(shaping, size, high) if given is None else given
        workload, curve = self._workload(shaping, size, keys), self._latency.curve
        if workload is None or curve is None:
            return Budget(mean)
        rng = np.random.default_rng(SEED)
        if given is None and shaping.budget is BudgetKind.UTILITY:
            found = choose_mean_candidates(workload, low, high, curve, shaping.budget_aversion, rng)
            best = max(found.trials, key=lambda trial: trial.utility)
            return Budget(best.mean_candidates, best.estimate.seconds)
        return Budget(mean, estimate_shaped(workload, mean, curve, SampledRollouts.of(workload, high, rng)).seconds)

    def _mean(self, shaping: Shaping, size: int, high: int) -> float:
        """By a formula. A request may name a policy on a server whose redundancy is above what one prompt may get."""
        stats = self._dataset.stats if shaping.budget is BudgetKind.CV_LOG else None
        if stats is None or stats.std is None or not stats.mean:
            return min(shaping.redundancy * size, high)
        return min(cv_log_mean(stats.std, stats.mean, size), high)

    def _workload(self, shaping: Shaping, size: int, keys: Sequence[str]) -> Workload | None:
        """The batch to come; prompts never seen take the mean of the others."""
        ratios = self._dataset.profile.quantiles(RATIOS)
        means = [self._prompts.mean(key) for key in keys]
        known = [mean for mean in means if mean is not None]
        typical = sum(known) / len(known) if known else self._dataset.stats.mean
        if ratios is None or not typical:
            return None
        return Workload(
            means=[typical if mean is None else mean for mean in means],
            ratios=ratios,
            size=size,
            num_longest=min(shaping.num_longest, size - 1),
            tail=shaping.tail,
            cut=shaping.deadline is not None,
            capacity=self._latency.capacity,
        )
