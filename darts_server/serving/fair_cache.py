"""Bounded storage of all callers. No caller loses entries to a caller that has more."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from math import inf
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Owned(Generic[K, V]):
    """Entries of one owner, oldest first, and the weights that are not 0."""

    __slots__ = ("entries", "weight", "weights")

    def __init__(self) -> None:
        # A plain dict finds its oldest key more slowly the more keys were deleted before it.
        self.entries: OrderedDict[K, V] = OrderedDict()
        self.weights: dict[K, int] = {}
        self.weight = 0


class FairCache(Generic[K, V]):
    """The newest entries of all owners together.

    At a limit, the owner that has the most entries (at the weight limit: the most weight) loses its oldest entry. Among
    equals, the name that sorts last loses. Callers without a key are one owner. Operations take O(log n) comparisons.

    Args:
        limit: maximum number of entries.
        weight_limit: maximum sum of their weights, in any unit.
    """

    def __init__(self, limit: float, weight_limit: float = inf) -> None:
        self._limit = limit
        self._weight_limit = weight_limit
        self.size = 0
        self.weight = 0
        self._owned: dict[str, _Owned[K, V]] = {}
        # Owners in ascending order of their number of entries, and of their weight.
        self._by_size: list[tuple[int, str]] = []
        self._by_weight: list[tuple[int, str]] = []

    def of(self, owner: str | None) -> Mapping[K, V]:
        """Return the entries of an owner, oldest first."""
        owned = self._owned.get(owner or "")
        return owned.entries if owned else {}

    def newest(self, owner: str | None) -> Iterator[V]:
        owned = self._owned.get(owner or "")
        return reversed(owned.entries.values()) if owned else iter(())

    def weight_of(self, owner: str | None) -> int:
        owned = self._owned.get(owner or "")
        return owned.weight if owned else 0

    def __iter__(self) -> Iterator[tuple[str | None, Mapping[K, V]]]:
        return ((name or None, owned.entries) for name, owned in self._owned.items())

    def put(self, owner: str | None, key: K, value: V, weight: int = 0) -> list[tuple[K, V]]:
        """Add or renew an entry, even if it is heavier than the limit. Return the entries that are dropped for it."""
        name = owner or ""
        owned = self._owned.setdefault(name, _Owned())
        is_new = key not in owned.entries
        owned.entries[key] = value
        owned.entries.move_to_end(key)
        self._count(name, owned, int(is_new), weight - owned.weights.pop(key, 0))
        if weight:
            owned.weights[key] = weight
        return self._shrink(self._limit, self._weight_limit, name)

    def pop(self, owner: str | None, key: K) -> V | None:
        """Remove an entry, and return its value, or None."""
        name = owner or ""
        owned = self._owned.get(name)
        if owned is None or key not in owned.entries:
            return None
        value = owned.entries.pop(key)
        self._count(name, owned, -1, -owned.weights.pop(key, 0))
        return value

    def shrink(self, weight_limit: float) -> list[tuple[K, V]]:
        """Drop entries until their weight is at most ``weight_limit``, and return them."""
        return self._shrink(inf, weight_limit, None)

    def _shrink(self, limit: float, weight_limit: float, newest: str | None) -> list[tuple[K, V]]:
        """Drop and return entries beyond the limits, but keep the last entry of owner ``newest``, just added."""
        dropped: list[tuple[K, V]] = []
        while self.size > limit or self.weight > weight_limit:
            ranking = self._by_size if self.size > limit else self._by_weight
            _, name = ranking[-1]
            if name == newest and len(self._owned[name].entries) == 1:
                # The owner's only entry was just added, so the next owner loses an entry.
                if len(ranking) == 1:
                    break
                _, name = ranking[-2]
            key, value = next(iter(self._owned[name].entries.items()))
            self.pop(name, key)
            dropped.append((key, value))
        return dropped

    def _count(self, name: str, owned: _Owned[K, V], entries: int, weight: int) -> None:
        """Update totals and rankings after an owner's entries changed by ``entries`` and ``weight``."""
        size = len(owned.entries)
        _move(self._by_size, name, size - entries, size)
        _move(self._by_weight, name, owned.weight, owned.weight + weight)
        self.size += entries
        self.weight += weight
        owned.weight += weight
        if not size:
            del self._owned[name]


def _move(ranking: list[tuple[int, str]], name: str, before: int, now: int) -> None:
    """Move an owner in a ranking from number ``before`` to ``now``. Owners with 0 are not in it."""
    if before == now:
        return
    if before:
        del ranking[bisect_left(ranking, (before, name))]
    if now:
        insort(ranking, (now, name))
