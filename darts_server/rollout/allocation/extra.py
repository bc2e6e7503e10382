"""Extra candidates of a group, which are given up while nothing was generated if the engine has no room for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from darts_server.policy.allocation import reduce_candidates
from darts_server.policy.selection import SelectionRule
from darts_server.rollout.allocation.cohort import Allocation


@dataclass(frozen=True, slots=True)
class ExtraCandidates:
    """``allocated``: candidates of the group, of which ``size`` are returned. ``share``: see `Allocation`."""

    allocated: int
    size: int
    share: Callable[[], float]

    @classmethod
    def of(cls, allocation: Allocation, rule: SelectionRule) -> Self | None:
        """Return those of an allocation; ``None`` if it has none, or keeps all of them."""
        if allocation.share is None or allocation.candidates <= rule.size:
            return None
        return cls(allocation.candidates, rule.size, allocation.share)

    def kept(self) -> int:
        """Return how many candidates there is room for now."""
        return reduce_candidates(self.allocated, self.size, self.share())
