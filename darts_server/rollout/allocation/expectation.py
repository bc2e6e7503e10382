"""What is expected of a cohort's lengths, from what was learned of its prompts and what its requests may take."""

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from darts_server.engine.port import RequestTokens
from darts_server.policy.simulation.forecast import Expectation
from darts_server.rollout.learned.prompts import Prompts
from darts_server.rollout.learned.statistics import Dataset


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
