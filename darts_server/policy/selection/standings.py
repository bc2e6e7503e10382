"""A group's candidates in the order of lengths, kept up to date one candidate at a time."""

from bisect import bisect_left, insort
from collections.abc import Mapping

from darts_server.policy.candidate import Candidate

Key = tuple[int, int]
"""`Candidate.sort_key`: (length, index), the order that all rules share."""


class Standings:
    """The ``running``, the ``valid`` and the ``invalid`` candidates of a group, each list shortest first.

    An update takes O(log n) comparisons. A plain list also moves all that comes after an insertion, eight bytes for
    each candidate: with ten thousand of them that takes a microsecond.
    """

    def __init__(self) -> None:
        self.running: list[Key] = []
        self.valid: list[Key] = []
        self.invalid: list[Key] = []
        self._entries: dict[int, tuple[list[Key], Key]] = {}

    def __len__(self) -> int:
        """Number of candidates that are in the group or may still be."""
        return len(self._entries)

    def nth_shortest(self, n: int) -> int | None:
        """Return the length of the ``n``-th shortest valid candidate, from 1; ``None`` if there are fewer."""
        return self.valid[n - 1][0] if len(self.valid) >= n else None

    def nth_shortest_minimum(self, n: int, generated: Mapping[int, int]) -> int | None:
        """Return the length that the ``n``-th shortest valid candidate has at least; ``None`` if there cannot be one.

        ``generated``: tokens of running candidates so far, by index.
        """
        running = (max(tokens, generated.get(index, 0) + 1) for tokens, index in self.running)
        lengths = sorted([*(tokens for tokens, _ in self.valid), *running])
        return lengths[n - 1] if len(lengths) >= n else None

    def add(self, candidate: Candidate) -> None:
        keys = self.running if candidate.running else self.valid if candidate.valid else self.invalid
        insort(keys, candidate.sort_key)
        self._entries[candidate.index] = keys, candidate.sort_key

    def remove(self, index: int) -> None:
        """Remove a candidate, by the key it was added with. Harmless if it is not here."""
        if index in self._entries:
            keys, key = self._entries.pop(index)
            del keys[bisect_left(keys, key)]
