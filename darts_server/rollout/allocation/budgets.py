"""Choose the mean number of candidates per group, and predict how long a cohort takes."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from math import inf

import numpy as np

from darts_server.engine.port import UNKNOWN_TOKENS, RequestTokens
from darts_server.policy.budget import choose_mean_candidates, cv_log_mean, predict_seconds
from darts_server.policy.shaping import BudgetKind, Shaping
from darts_server.policy.simulation.forecast import Expectation
from darts_server.rollout.allocation.expectation import expect
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
        self._recent: deque[tuple[str, RequestTokens]] = deque(maxlen=RECENT_PROMPTS)
        self._cached: dict[tuple[Shaping, int, int], tuple[float, float]] = {}

    def mean(
        self,
        shaping: Shaping,
        size: int,
        keys: Sequence[str],
        tokens: Sequence[RequestTokens] = (),
        servers: int = 1,
    ) -> float:
        """Choose M', the mean candidates of a cohort of groups of ``size``.

        ``keys``: of its prompts. ``tokens``: of its requests, as far as they are known. ``servers``: on how many,
        alike, the groups run.
        """
        self._recent.extend(zip(keys, [*tokens, *repeat(UNKNOWN_TOKENS, len(keys) - len(tokens))], strict=True))
        if shaping.budget is not BudgetKind.UTILITY:
            return self._by_formula(shaping, size)
        if len(keys) >= MIN_COHORT:
            return self._by_utility(shaping, size, keys, tokens, servers)
        # So few prompts say little about those to come, and many would be chosen for.
        decided_at, mean = self._cached.get((shaping, size, servers), (-inf, 0.0))
        if self._clock() - decided_at > CACHE_SECONDS:
            recent_keys, recent_tokens = zip(*self._recent, strict=True)
            mean = self._by_utility(shaping, size, recent_keys, recent_tokens, servers)
            self._cached[shaping, size, servers] = (self._clock(), mean)
        return mean

    def seconds(
        self, mean: float, shaping: Shaping, size: int, keys: Sequence[str], tokens: Sequence[RequestTokens] = ()
    ) -> float | None:
        """Predict the seconds until a cohort is complete that gets ``mean`` candidates; ``None`` if unknown.

        Of fewer than `MIN_COHORT` prompts it is unknown.
        """
        if len(keys) < MIN_COHORT:
            return None
        machine, rng = self._latency.machine(), np.random.default_rng(SEED)
        expectation = self._expectation(keys, tokens, rng)
        if expectation is None or machine is None:
            return None
        return predict_seconds(mean, shaping, size, expectation, machine, rng)

    def _by_utility(
        self, shaping: Shaping, size: int, keys: Sequence[str], tokens: Sequence[RequestTokens], servers: int
    ) -> float:
        machine, rng = self._latency.machine(), np.random.default_rng(SEED)
        expectation = self._expectation(keys, tokens, rng)
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

    def _expectation(
        self, keys: Sequence[str], tokens: Sequence[RequestTokens], rng: np.random.Generator
    ) -> Expectation | None:
        """Describe the cohort to the model of a rollout; prompts that were never seen are like the others."""
        means, usual = [self._prompts.mean(key) for key in keys], self._dataset.stats.mean
        seen = [mean for mean in means if mean is not None] or ([usual] if usual else [])
        return expect(self._prompts, self._dataset, keys, tokens, seen, RATIOS, rng)
