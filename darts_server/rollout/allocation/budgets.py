"""Choose the mean number of candidates per group, and predict how long a cohort takes from what was learned of it."""

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from darts_server.engine.port import RequestTokens
from darts_server.policy.allocation import cv_log_mean
from darts_server.policy.shaping import BudgetKind, Shaping
from darts_server.policy.simulation.forecast import Expectation, predict_seconds
from darts_server.rollout.learned.latency import Latency
from darts_server.rollout.learned.prompts import Prompts
from darts_server.rollout.learned.statistics import Dataset

SEED = 0
"""Seed of the simulated cohorts: the same statistics give the same prediction."""
MIN_COHORT = 8
"""Number of prompts below which the cohort alone says too little."""
RATIOS = 512
"""Number of quantiles that represent the distribution of lengths."""


class Budgets:
    """Choose budgets, and predict how long cohorts take, from the statistics of prompts, data set and engine latency.

    While there are too few statistics, every kind of budget is the fixed one.
    """

    def __init__(self, prompts: Prompts, dataset: Dataset, latency: Latency) -> None:
        self._prompts = prompts
        self._dataset = dataset
        self._latency = latency

    def mean(self, shaping: Shaping, size: int) -> float:
        """Choose M', the mean candidates of a cohort of groups of ``size``, at most M_up.

        A request may name a policy that allows less than the server's. That of a policy that gives all prompts the same
        number is a whole number, as where groups come one by one.
        """
        high = shaping.bounds(size)[1]
        stats = self._dataset.stats if shaping.budget is BudgetKind.CV_LOG else None
        if stats is None or stats.std is None or not stats.mean:
            wanted = shaping.redundancy * size if shaping.adaptive else shaping.candidates(size)
            return min(wanted, high)
        return min(cv_log_mean(stats.std, stats.mean, size), high)

    def seconds(
        self, mean: float, shaping: Shaping, size: int, keys: Sequence[str], tokens: Sequence[RequestTokens] = ()
    ) -> float | None:
        """Predict the seconds until a cohort is complete that gets ``mean`` candidates; ``None`` if unknown.

        Of fewer than `MIN_COHORT` prompts it is unknown.
        """
        if len(keys) < MIN_COHORT:
            return None
        machine, rng = self._latency.machine(), np.random.default_rng(SEED)
        means, usual = [self._prompts.mean(key) for key in keys], self._dataset.stats.mean
        # Prompts that were never seen are like the others.
        seen = [mean for mean in means if mean is not None] or ([usual] if usual else [])
        expectation = expect(self._prompts, self._dataset, keys, tokens, seen, RATIOS, rng)
        if expectation is None or machine is None:
            return None
        return predict_seconds(mean, shaping, size, expectation, machine, rng)


def expect(
    prompts: Prompts,
    dataset: Dataset,
    keys: Sequence[str],
    tokens: Sequence[RequestTokens],
    recent: Sequence[float],
    ratios: int,
    rng: np.random.Generator,
    max_tokens: int | None = None,
) -> Expectation | None:
    """Describe a cohort to the model of a rollout; ``None`` while too little was learned.

    ``keys``: of its prompts. ``tokens``: of its requests, as far as they are known. Those of prompts take room in the
    KV caches as what is generated does. ``recent``: mean lengths of which prompts that were never seen have one.
    ``ratios``: quantiles that represent the distribution of lengths. ``max_tokens``: at which trajectories are
    truncated where requests do not say.
    """
    means, stds = [prompts.mean(key) for key in keys], [prompts.std(key) for key in keys]
    limits = [one.most for one in tokens if one.most is not None]
    return Expectation.of(
        means,
        stds,
        dataset.profile.quantiles(ratios),
        recent,
        rng,
        max(1, round(fmean(one.prompt for one in tokens))) if tokens else 1,
        max(limits) if limits and len(limits) == len(tokens) else max_tokens,
    )
