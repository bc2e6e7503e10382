"""The deadline of a cohort: up to which length its groups wait for their tails. An extension of ours.

It is a quantile, over the groups of the cohort, of their completion lengths: as a rule the length of a group's M-th
shortest trajectory, when it could be complete without its tail. So most groups lose nothing they need by waiting no
longer. Groups that come one at a time use the completion lengths of the groups before them.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, inf

QUANTILE = 0.9
EXPLORATION = 0.05
MAX_LOST_SHARE = 0.02
WINDOW = 256
"""Groups that stand in for the cohort when they come one at a time: a usual number of prompts a step."""
ROUNDING = 1e-9
"""Taken off a rank before rounding up: in floating point 0.55 * 100 is 55 and a little."""
MEMORY = 500
"""Right answers after which older ones have faded: those of some hundred explored groups."""
MIN_RIGHT = 50
"""Right answers below which the share of lost ones is noise: at 2 %, one of fifty."""
STRETCH_UP, STRETCH_DOWN = 1.05, 1.01
"""Factors per explored group. Up is faster: a lost right answer costs more than a longer wait."""
MAX_STRETCH = 16.0
MIN_GROUPS = 8
"""Groups below which a quantile over them means nothing."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """How a cohort's deadline is computed.

    ``quantile``: of the groups' completion lengths, in (0, 1]. ``floor``, ``ceiling``: bounds on the cohort's deadline
    in tokens; a group whose own M-th shortest is longer still waits for that. ``exploration``: share of cohorts whose
    tails run past the deadline, to see what it takes away. ``max_lost_share``: share of right answers that it may take
    away. ``stretch``: factor on the deadline, at least 1.
    """

    quantile: float = QUANTILE
    floor: int = 1
    ceiling: int | None = None
    exploration: float = EXPLORATION
    max_lost_share: float = MAX_LOST_SHARE
    stretch: float = 1.0

    def from_lengths(self, completion_lengths: Iterable[int], groups: int) -> int | None:
        """Compute the deadline in tokens from the lengths known so far of a cohort of ``groups``.

        Lengths that are not known yet count as longer than all known ones, so more of them cannot change the result.
        ``None`` while too few are known.
        """
        rank = ceil(self.quantile * groups - ROUNDING)
        known = sorted(completion_lengths)
        return self.clip(ceil(self.stretch * known[rank - 1])) if 0 < rank <= len(known) else None

    def clip(self, tokens: int) -> int:
        return max(self.floor, tokens if self.ceiling is None else min(tokens, self.ceiling))


@dataclass(frozen=True, slots=True)
class DeadlineLosses:
    """Right answers that deadlines would have taken from explored groups, by their reported rewards.

    Plain fields: ``DeadlineLosses(**json)`` restores it. ``right``: right answers among the returned ones, older ones
    faded. ``lost``: those of them that are longer than the deadline. ``stretch``: factor on the deadline that keeps
    their share below its bound.
    """

    right: float = 0.0
    lost: float = 0.0
    stretch: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.lost <= self.right < inf and 1 <= self.stretch <= MAX_STRETCH):
            raise ValueError(f"losses must hold 0 <= lost <= right and 1 <= stretch <= {MAX_STRETCH}, got {self}")

    @property
    def share(self) -> float | None:
        """Share of right answers that the deadline takes away; ``None`` before there are `MIN_RIGHT` of them."""
        return self.lost / self.right if self.right >= MIN_RIGHT else None

    def with_group(self, right: int, lost: int, max_share: float) -> "DeadlineLosses":
        """Return the losses after one more group with ``right`` right answers, of which the deadline takes ``lost``.

        While the share is above ``max_share`` the stretch grows fast; below it, it shrinks slowly.
        """
        keep = max(0.0, 1 - right / MEMORY)
        counted = DeadlineLosses(keep * self.right + right, keep * self.lost + lost, self.stretch)
        if counted.share is None:
            return counted
        stretch = self.stretch * STRETCH_UP if counted.share > max_share else self.stretch / STRETCH_DOWN
        return replace(counted, stretch=min(max(stretch, 1.0), MAX_STRETCH))


class RecentCompletionLengths:
    """Completion lengths of the last `WINDOW` groups, in tokens, for groups that come one at a time."""

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        self._lengths: deque[int] = deque(lengths, maxlen=WINDOW)

    @property
    def state(self) -> list[int]:
        """Argument of the constructor that restores it, oldest first."""
        return list(self._lengths)

    def add(self, tokens: int) -> None:
        self._lengths.append(tokens)

    def deadline(self, rule: Deadline) -> int | None:
        """Return the deadline of the next group; ``None`` while fewer than `MIN_GROUPS` are known."""
        return rule.from_lengths(self._lengths, len(self._lengths)) if len(self._lengths) >= MIN_GROUPS else None
