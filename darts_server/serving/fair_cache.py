from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from math import inf
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _OwnerEntries(Generic[K, V]):
    """Entries of one owner, oldest first, and the weights that are not 0."""

    __slots__ = ("entries", "total_weight", "weights")

    def __init__(self) -> None:
        # A plain dict finds its oldest key more slowly the more keys were deleted before it.
        self.entries: OrderedDict[K, V] = OrderedDict()
        self.weights: dict[K, int] = {}
        self.total_weight = 0


class FairCache(Generic[K, V]):
    """The newest entries of all owners together.

    At a limit, the owner that has the most entries (at the weight limit: the most weight, in any unit) loses its oldest
    entry. Among equals, the name that sorts last loses. Callers without a key are one owner. Operations take O(log n)
    comparisons.
    """

    def __init__(self, limit: float, weight_limit: float = inf) -> None:
        self._limit = limit
        self._weight_limit = weight_limit
        self.size = 0
        self.weight = 0
        self._by_owner: dict[str, _OwnerEntries[K, V]] = {}
        # Owners in ascending order of their number of entries, and of their weight.
        self._size_ranking: list[tuple[int, str]] = []
        self._weight_ranking: list[tuple[int, str]] = []

    def entries_of(self, owner: str | None) -> Mapping[K, V]:
        """Return entries, oldest first."""
        owned = self._by_owner.get(owner or "")
        return owned.entries if owned else {}

    def newest(self, owner: str | None) -> Iterator[V]:
        owned = self._by_owner.get(owner or "")
        return reversed(owned.entries.values()) if owned else iter(())

    def weight_of(self, owner: str | None) -> int:
        owned = self._by_owner.get(owner or "")
        return owned.total_weight if owned else 0

    def __iter__(self) -> Iterator[tuple[str | None, Mapping[K, V]]]:
        return ((name or None, owned.entries) for name, owned in self._by_owner.items())

    def put(
        self,
        owner: str | None,
        key: K,
        value: V,
        weight: int = 0,
    ) -> list[tuple[K, V]]:
        """Add or renew an entry, even if it is heavier than the limit. Return the entries that are dropped for it."""
        name = owner or ""
        owned = self._by_owner.setdefault(name, _OwnerEntries())
        num_added = 0 if key in owned.entries else 1
        owned.entries[key] = value
        owned.entries.move_to_end(key)
        replaced_weight = owned.weights.pop(key, 0)
        self._update_totals(name, owned, num_added, weight - replaced_weight)
        if weight:
            owned.weights[key] = weight
        return self._drop_excess(self._limit, self._weight_limit, name)

    def pop(self, owner: str | None, key: K) -> V | None:
        name = owner or ""
        owned = self._by_owner.get(name)
        if owned is None or key not in owned.entries:
            return None
        value = owned.entries.pop(key)
        self._update_totals(name, owned, -1, -owned.weights.pop(key, 0))
        return value

    def shrink(self, weight_limit: float) -> list[tuple[K, V]]:
        """Drop entries until their weight is at most ``weight_limit``, and return them."""
        return self._drop_excess(inf, weight_limit, None)

    def _drop_excess(self, limit: float, weight_limit: float, owner_of_newest: str | None) -> list[tuple[K, V]]:
        dropped: list[tuple[K, V]] = []
        while self.size > limit or self.weight > weight_limit:
            ranking = self._size_ranking if self.size > limit else self._weight_ranking
            _, largest_owner = ranking[-1]
            if largest_owner == owner_of_newest and len(self._by_owner[largest_owner].entries) == 1:
                # The owner's only entry was just added, so the next owner loses an entry.
                if len(ranking) == 1:
                    break
                _, largest_owner = ranking[-2]
            key, value = next(iter(self._by_owner[largest_owner].entries.items()))
            self.pop(largest_owner, key)
            dropped.append((key, value))
        return dropped

    def _update_totals(
        self,
        name: str,
        owned: _OwnerEntries[K, V],
        added: int,
        added_weight: int,
    ) -> None:
        size = len(owned.entries)
        weight = owned.total_weight + added_weight
        _move_in_ranking(self._size_ranking, name, size - added, size)
        _move_in_ranking(self._weight_ranking, name, owned.total_weight, weight)
        self.size += added
        self.weight += added_weight
        owned.total_weight = weight
        if not size:
            del self._by_owner[name]


def _move_in_ranking(
    ranking: list[tuple[int, str]],
    name: str,
    before: int,
    now: int,
) -> None:
    # Owners with 0 are not in the ranking.
    if before == now:
        return
    if before:
        del ranking[bisect_left(ranking, (before, name))]
    if now:
        insort(ranking, (now, name))
