"""The deadline of a batch: how long the tails of its groups are waited for. An extension of ours.

It is a quantile, over the groups of a batch, of the length of the M-th shortest trajectory: by then most groups could
be complete, so nothing that is needed is lost by waiting no longer. Groups that come one at a time take it over the
groups before them.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

QUANTILE = 0.9
EXPLORATION = 0.05
WINDOW = 256
"""Groups that stand in for the batch when they come one at a time."""
FEWEST = 8
"""Groups that must be known before a quantile over them means anything."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """How a batch's deadline is made.

    ``quantile``: of the M-th shortest lengths of the batch, in (0, 1]. ``floor``, ``ceiling``: tokens that the
    batch's deadline is held between; a group whose own M-th shortest is longer than that still waits for it.
    ``exploration``: share of batches that are let run past it, to see what it takes away.
    """

    quantile: float = QUANTILE
    floor: int = 1
    ceiling: int | None = None
    exploration: float = EXPLORATION

    def of(self, needed: Iterable[int], groups: int) -> int | None:
        """The deadline in tokens from the lengths known so far of a batch of ``groups``; ``None`` if they are too few.

        Lengths that are not known yet count as longer than all known ones.
        """
        rank = ceil(self.quantile * groups)
        known = sorted(needed)
        return self.clip(known[rank - 1]) if 0 < rank <= len(known) else None

    def clip(self, tokens: int) -> int:
        return max(self.floor, tokens if self.ceiling is None else min(tokens, self.ceiling))


class RecentNeeds:
    """The M-th shortest lengths of the last groups, in tokens."""

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
        return rule.of(self._lengths, len(self._lengths)) if len(self._lengths) >= FEWEST else None
