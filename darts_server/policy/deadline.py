"""The deadline of a batch: how long the tails of its groups are waited for. An extension of ours.

It is a quantile, over the groups of a batch, of what they need, as a rule their M-th shortest length: by then most
could be complete, so nothing that is needed is lost by waiting no longer. Groups that come one at a time take it over
the groups before them.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, inf

QUANTILE = 0.9
EXPLORATION = 0.05
MAX_LOST_SHARE = 0.02
WINDOW = 256
"""Groups that stand in for the batch when they come one at a time."""
ROUNDING = 1e-9
"""0.55 * 100 is 55 and a little."""
MEMORY = 500
"""Right answers after which older ones are forgotten: those of some hundred explored groups."""
MIN_RIGHT = 50
STRETCH_UP, STRETCH_DOWN = 1.05, 1.01
MAX_STRETCH = 16.0
MIN_GROUPS = 8
"""Groups that must be known before a quantile over them means anything."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """How a batch's deadline is made.

    ``quantile``: of what the groups of the batch need, in (0, 1]. ``floor``, ``ceiling``: tokens that the
    batch's deadline is held between; a group whose own M-th shortest is longer than that still waits for it.
    ``exploration``: share of batches that are let run past it, to see what it takes away. ``max_lost_share``: share of
    right answers that it may take away. ``stretch``: factor by which it is held back, at least 1.
    """

    quantile: float = QUANTILE
    floor: int = 1
    ceiling: int | None = None
    exploration: float = EXPLORATION
    max_lost_share: float = MAX_LOST_SHARE
    stretch: float = 1.0

    def from_lengths(self, needed: Iterable[int], groups: int) -> int | None:
        """The deadline in tokens from the lengths known so far of a batch of ``groups``; ``None`` if they are too few.

        Lengths that are not known yet count as longer than all known ones.
        """
        rank = ceil(self.quantile * groups - ROUNDING)
        known = sorted(needed)
        return self.clip(ceil(self.stretch * known[rank - 1])) if 0 < rank <= len(known) else None

    def clip(self, tokens: int) -> int:
        return max(self.floor, tokens if self.ceiling is None else min(tokens, self.ceiling))


@dataclass(frozen=True, slots=True)
class DeadlineLosses:
    """What deadlines would have taken away from groups that were let run past them, by their reported rewards.

    Plain fields: ``Losses(**json)`` restores it. ``right``: right answers among the returned ones, older ones faded.
    ``lost``: those of them that were longer than the deadline, and right perhaps only for that. ``stretch``: what the
    deadline must be multiplied with to keep the share of the lost below its bound.
    """

    right: float = 0.0
    lost: float = 0.0
    stretch: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.lost <= self.right < inf and 1 <= self.stretch <= MAX_STRETCH):
            raise ValueError(f"losses must hold 0 <= lost <= right and 1 <= stretch <= {MAX_STRETCH}, got {self}")

    @property
    def share(self) -> float | None:
        """Share of right answers that the deadline takes away; ``None`` before `ENOUGH_RIGHT` are known."""
        return self.lost / self.right if self.right >= MIN_RIGHT else None

    def with_group(self, right: int, lost: int, most: float) -> "DeadlineLosses":
        """After one more group with ``right`` right answers, of which the deadline takes ``lost``.

        Above the bound ``most`` the deadline moves away fast, below it comes back slowly.
        """
        keep = max(0.0, 1 - right / MEMORY)
        heard = DeadlineLosses(keep * self.right + right, keep * self.lost + lost, self.stretch)
        if heard.share is None:
            return heard
        stretch = self.stretch * STRETCH_UP if heard.share > most else self.stretch / STRETCH_DOWN
        return replace(heard, stretch=min(max(stretch, 1.0), MAX_STRETCH))


class RecentCompletionLengths:
    """What the last groups needed, in tokens."""

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        self._lengths: deque[int] = deque(lengths, maxlen=WINDOW)

    @property
    def state(self) -> list[int]:
        """What the constructor takes, oldest first."""
        return list(self._lengths)

    def add(self, tokens: int) -> None:
        self._lengths.append(tokens)

    def deadline(self, rule: Deadline) -> int | None:
        """The deadline of a group that comes now; ``None`` while too few are known."""
        return rule.from_lengths(self._lengths, len(self._lengths)) if len(self._lengths) >= MIN_GROUPS else None
