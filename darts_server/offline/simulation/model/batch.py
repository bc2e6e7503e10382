from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from darts_server.group.selection import InOrder, SelectionRule
from darts_server.policy.allocation import allocate_by_std, allocate_evenly
from darts_server.policy.deadline import MIN_GROUPS, Deadline, RecentCompletionLengths
from darts_server.policy.shaping import Shaping

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """G prompts with C candidates each, all of which may be started."""

    prompt_tokens: Ints
    """Shape (G,)."""
    lengths: Ints
    """Tokens of each candidate if nothing stops it, shape (G, C). From ``max_tokens`` on, it is truncated there."""
    tail_draws: Floats
    """Random numbers in [0, 1), shape (G, C). The lowest numbers win the places of a sampled tail."""
    max_tokens: int
    carried_tokens: Ints | None = None
    """Tokens that earlier rollouts have generated, at most ``capped_lengths``, shape (G, C). None for none."""

    @property
    def groups(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def generated_before(self) -> Ints:
        """As ``carried_tokens``, with zeros for None."""
        return np.zeros_like(self.lengths) if self.carried_tokens is None else self.carried_tokens

    @property
    def capped_lengths(self) -> Ints:
        """Tokens at which each candidate ends, shape (G, C)."""
        return np.minimum(self.lengths, self.max_tokens)

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Whether each candidate ends at a stop token, shape (G, C)."""
        return self.lengths < self.max_tokens


@dataclass(frozen=True, slots=True)
class BatchPlan:
    size: int
    """Group size M."""
    candidates: Sequence[int]
    """Number of candidates M' of each prompt, at least M."""
    shaping: Shaping | None = None
    """The policy, without pruning. None starts and returns M candidates."""
    saturated: Sequence[bool] = ()
    """See `Shaping.is_saturated`."""
    needed_groups: int | None = None
    """Number of complete groups that end the rollout, or None for all groups."""

    @classmethod
    def of(
        cls,
        shaping: Shaping | None,
        size: int,
        stds: Sequence[float | None],
        needed_groups: int | None = None,
        mean_length: float | None = None,
    ) -> "BatchPlan":
        """Plan a batch as the server does. ``stds`` and ``mean_length``: of the prompts' lengths."""
        if shaping is None:
            return cls(size, [size] * len(stds), needed_groups=needed_groups)
        least, most = shaping.candidate_limits(size)
        known_stds = [std for std in stds if std is not None]
        mean_std = fmean(known_stds) if known_stds else None
        mean_candidates = shaping.mean_candidates(size, mean_std, mean_length)
        candidates, _ = allocate_evenly(max(mean_candidates, least), len(stds))
        if shaping.adaptive:
            candidates = allocate_by_std(
                stds,
                budget=sum(candidates),
                low=least,
                high=most,
            )
        # With so many candidates, a group does not wait for its tail.
        saturated = [shaping.is_saturated(size, count) for count in candidates]
        return cls(size, candidates, shaping, saturated, needed_groups)

    @property
    def deadline(self) -> Deadline | None:
        """None if the policy has no deadline, or there are too few groups for it."""
        if self.shaping is None or len(self.candidates) < MIN_GROUPS:
            return None
        return self.shaping.deadline

    def with_recent(self, recent: RecentCompletionLengths) -> "BatchPlan":
        if self.shaping is None or self.deadline is None:
            return self
        deadline = replace(self.deadline, recent=recent.quantile(self.deadline))
        return replace(self, shaping=replace(self.shaping, deadline=deadline))

    @property
    def mean_candidates(self) -> float:
        return sum(self.candidates) / len(self.candidates)

    def rule(self, group: int) -> SelectionRule:
        if self.shaping is None:
            return InOrder(self.size)
        return self.shaping.selection_rule(self.size, bool(self.saturated) and self.saturated[group])
