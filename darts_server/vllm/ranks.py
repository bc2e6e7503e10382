"""Assigns groups to data-parallel engines."""

from collections import Counter


class Ranks:
    """Keeps the candidates of a group on one engine, where they share the KV blocks of their prompt.

    A new group gets the engine with the fewest running candidates; of equals the first.
    """

    def __init__(self, count: int) -> None:
        self._running = [0] * count
        self._rank_of: dict[str, int] = {}
        self._candidates: Counter[str] = Counter()

    def enter(self, group: str) -> int:
        """Assign one more candidate of a group. Returns the engine's rank."""
        rank = self._rank_of.setdefault(group, min(range(len(self._running)), key=self._running.__getitem__))
        self._running[rank] += 1
        self._candidates[group] += 1
        return rank

    def leave(self, group: str) -> None:
        """Record that a candidate of the group has ended; with the last one the group is forgotten."""
        self._running[self._rank_of[group]] -= 1
        self._candidates[group] -= 1
        if not self._candidates[group]:
            del self._candidates[group], self._rank_of[group]
