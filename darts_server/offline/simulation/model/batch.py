"""The prompts of a simulated rollout, with the lengths that their candidates would have."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from darts_server.group.selection import InOrder, SelectionRule
from darts_server.policy.allocation import allocate_by_std, allocate_evenly
from darts_server.policy.deadline import MIN_GROUPS, Deadline
from darts_server.policy.shaping import Shaping

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """G prompts with C candidates each, all of which may be started.

    ``prompt_tokens``: shape (G,). ``lengths``: shape (G, C), tokens of each candidate if it ran to its end; at
    ``max_tokens`` and beyond, it is truncated there. ``tail_draws``: shape (G, C), random numbers in [0, 1); the lowest
    win the places of a sampled tail. ``done``: shape (G, C), tokens of each candidate that earlier rollouts have
    generated, at most those at which it ends; ``None`` for none.
    """

    prompt_tokens: Ints
    lengths: Ints
    tail_draws: Floats
    max_tokens: int
    done: Ints | None = None

    @property
    def groups(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def ends(self) -> Ints:
        """Tokens at which each candidate ends if nothing stops it, shape (G, C)."""
        return np.minimum(self.lengths, self.max_tokens)

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Whether each candidate ends at a stop token, shape (G, C)."""
        return self.lengths < self.max_tokens


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What is done with a batch.

    ``size``: M. ``candidates``: M' of each prompt, at least M. ``shaping``: the policy, which prunes nothing; ``None``
    starts and returns M, unshaped. ``saturated``: of each prompt, whether its tail is not waited for; see
    `Shaping.is_saturated`. ``enough``: the rollout ends with so many complete groups; ``None`` for all.
    """

    size: int
    candidates: Sequence[int]
    shaping: Shaping | None = None
    saturated: Sequence[bool] = ()
    enough: int | None = None

    @classmethod
    def of(
        cls,
        shaping: Shaping | None,
        size: int,
        stds: Sequence[float | None],
        enough: int | None = None,
        mean_length: float | None = None,
    ) -> "BatchPlan":
        """Plan a batch by its prompts' length stds, and by their mean length if it is known, as the server does."""
        if shaping is None:
            return cls(size, [size] * len(stds), enough=enough)
        low, high = shaping.bounds(size)
        known = [std for std in stds if std is not None]
        mean = shaping.mean_candidates(size, fmean(known) if known else None, mean_length)
        counts, _ = allocate_evenly(max(mean, low), len(stds))
        if shaping.adaptive:
            counts = allocate_by_std(stds, budget=sum(counts), low=low, high=high)
        return cls(size, counts, shaping, [shaping.is_saturated(size, count) for count in counts], enough)

    @property
    def deadline(self) -> Deadline | None:
        """How the groups' deadline is computed; ``None`` if the policy has none, or too few groups determine it."""
        if self.shaping is None or len(self.candidates) < MIN_GROUPS:
            return None
        return self.shaping.deadline

    @property
    def mean_candidates(self) -> float:
        return sum(self.candidates) / len(self.candidates)

    def rule(self, group: int) -> SelectionRule:
        """Build the selection rule of a group."""
        if self.shaping is None:
            return InOrder(self.size)
        return self.shaping.selection_rule(self.size, bool(self.saturated) and self.saturated[group])
