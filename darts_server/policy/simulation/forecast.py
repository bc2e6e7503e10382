"""Forecast what a policy would do with a batch, from what is known of its prompts' lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from darts_server.policy.simulation.batch import Batch, BatchPlan, Floats
from darts_server.policy.simulation.engines import Machine
from darts_server.policy.simulation.rollout import simulate

MIN_SAMPLES, MAX_SAMPLES, SAMPLED_GROUPS = 2, 8, 256
"""A batch is sampled so often that there are this many groups: a few large batches, more small ones."""
LONGEST = 1 << 24
"""Tokens at which lengths end where no limit is known."""
RATIOS = 4096
"""Quantiles of the ratios of lengths to their prompt's mean: the longest of a batch is one in thousands."""


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """What is known of a batch before it starts, with an entry for each prompt.

    ``means``, ``stds``: of lengths in tokens; a std is ``None`` where it is unknown. ``ratios``: equally likely ratios
    of a length to its prompt's mean. ``prompt_tokens``: of a prompt, on average. ``max_tokens``: where trajectories are
    truncated; ``None`` if that is unknown.
    """

    means: Sequence[float]
    stds: Sequence[float | None]
    ratios: Floats
    prompt_tokens: int = 1
    max_tokens: int | None = None

    @property
    def groups(self) -> int:
        return len(self.means)

    @classmethod
    def of(
        cls,
        means: Sequence[float | None],
        stds: Sequence[float | None],
        ratios: Floats | None,
        recent: Sequence[float],
        rng: np.random.Generator,
        prompt_tokens: int = 1,
        max_tokens: int | None = None,
    ) -> "Expectation | None":
        """Expect of new prompts, whose mean is ``None``, what recent ones were like; ``None`` if nothing is known.

        ``recent``: mean lengths of recent prompts.
        """
        new = sum(mean is None for mean in means)
        if ratios is None or (new and not recent):
            return None
        drawn = iter(rng.permutation(np.resize(recent, new)).tolist() if new else ())
        known = [next(drawn) if mean is None else mean for mean in means]
        return cls(known, stds, ratios, prompt_tokens, max_tokens)

    def samples(self, most: int = MAX_SAMPLES) -> int:
        """Return how often the batch is sampled, at most ``most`` times."""
        return min(max(ceil(SAMPLED_GROUPS / self.groups), MIN_SAMPLES), MAX_SAMPLES, most)

    def sample(self, candidates: int, rng: np.random.Generator, most: int = MAX_SAMPLES) -> list[Batch]:
        """Sample the batch a few times, with so many candidates for each prompt."""
        shape, limit, batches = (self.groups, candidates), self.max_tokens or LONGEST, []
        for _ in range(self.samples(most)):
            lengths = np.clip(np.ceil(np.asarray(self.means)[:, None] * rng.choice(self.ratios, shape)), 1, limit)
            prompts = np.full(self.groups, self.prompt_tokens)
            batches.append(Batch(prompts, lengths.astype(np.int64), rng.random(shape), limit))
        return batches


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a policy would do, on average over the samples of a batch.

    ``seconds``: of the rollout. ``generated``, ``returned``: tokens. ``mean_length``: of what is returned. ``cut``:
    share of the returned trajectories that the rule cuts; ``lost``: the same of those only that would have ended.
    ``truncated``: share of the returned trajectories that reaches the limit of tokens.
    """

    seconds: float
    generated: float
    returned: float
    mean_length: float
    cut: float
    lost: float
    truncated: float


def limit_of(share: float, batches: Sequence[Batch]) -> int:
    """Return the smallest length limit that cuts at most this share, 0 to 1, of those that would have ended."""
    whole = np.sort(np.concatenate([batch.lengths[batch.valid] for batch in batches]))[::-1]
    if not whole.size:
        return max(int(batch.ends.max()) for batch in batches)
    return int(whole[min(int(share * whole.size), whole.size - 1)])


def forecast(plan: BatchPlan, batches: Sequence[Batch], machine: Machine) -> Forecast:
    """Forecast what comes of a plan for a batch that was sampled a few times, with as many candidates or more."""
    most = max(plan.candidates)
    found = []
    for batch in batches:
        part = Batch(batch.prompt_tokens, batch.lengths[:, :most], batch.tail_draws[:, :most], batch.max_tokens)
        outcome = simulate(part, plan, machine)
        is_returned = outcome.returned > 0
        cut = is_returned & (outcome.returned < part.ends) & outcome.truncated
        count = max(1, int(is_returned.sum()))
        returned = float(outcome.returned.sum())
        lost = (cut & part.valid).sum() / max(1, int((is_returned & part.valid).sum()))
        truncated = (outcome.returned >= part.max_tokens).sum() / count
        generated = float(outcome.generated.sum())
        found.append((outcome.seconds, generated, returned, returned / count, cut.sum() / count, lost, truncated))
    return Forecast(*(float(value) for value in np.mean(found, axis=0)))
