"""Which data-parallel engine a group runs on."""

from collections import Counter


class Ranks:
    """Keeps a group's candidates on one engine, where they share the blocks of their prompt.

    A group takes the engine with the fewest candidates that were started here; of equal ones the first.
    """

    def __init__(self, count: int) -> None:
        self._running = [0] * count
        self._rank_of: dict[str, int] = {}
        self._candidates: Counter[str] = Counter()

    def enter(self, group: str) -> int:
        """The engine for one more candidate of a group."""
        rank = self._rank_of.setdefault(group, min(range(len(self._running)), key=self._running.__getitem__))
        self._running[rank] += 1
        self._candidates[group] += 1
        return rank

    def leave(self, group: str) -> None:
        """A candidate of it has ended. With the last one the group is forgotten."""
        self._running[self._rank_of[group]] -= 1
        self._candidates[group] -= 1
        if not self._candidates[group]:
            del self._candidates[group], self._rank_of[group]
