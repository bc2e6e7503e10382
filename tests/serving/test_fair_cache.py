from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from darts_server.serving.fair_cache import FairCache

OWNERS = (None, "a", "b", "c")


@dataclass
class BruteForce:
    """The same by searching all entries each time: owner, key, value and weight, the oldest first."""

    limit: int
    weight_limit: int
    entries: list[tuple[str | None, int, int, int]] = field(default_factory=list)

    def put(self, owner: str | None, key: int, value: int, weight: int) -> list[tuple[int, int]]:
        newest = (owner, key, value, weight)
        self.entries = [entry for entry in self.entries if entry[:2] != (owner, key)]
        self.entries.append(newest)
        dropped = []
        while len(self.entries) > self.limit or sum(entry[3] for entry in self.entries) > self.weight_limit:
            by_size = len(self.entries) > self.limit
            shares: dict[str, int] = {}
            for entry in self.entries:
                shares[entry[0] or ""] = shares.get(entry[0] or "", 0) + (1 if by_size else entry[3])
            if [entry for entry in self.entries if entry[0] == owner] == [newest]:
                del shares[owner or ""]
            most = max(((share, name) for name, share in shares.items() if share), default=None)
            if most is None and by_size:
                break
            if most is None or most[0] < 1:
                break
            oldest = next(entry for entry in self.entries if (entry[0] or "") == most[1])
            self.entries.remove(oldest)
            dropped.append((oldest[1], oldest[2]))
        return dropped

    def pop(self, owner: str | None, key: int) -> int | None:
        for entry in self.entries:
            if entry[:2] == (owner, key):
                self.entries.remove(entry)
                return entry[2]
        return None


STEPS = st.lists(
    st.tuples(st.booleans(), st.sampled_from(OWNERS), st.integers(0, 6), st.integers(0, 5)), min_size=1, max_size=60
)


@given(limit=st.integers(1, 8), weight_limit=st.integers(0, 20), steps=STEPS)
def test_the_owner_with_the_most_entries_loses_its_oldest_entry(
    limit: int, weight_limit: int, steps: list[tuple[bool, str | None, int, int]]
) -> None:
    kept: FairCache[int, int] = FairCache(limit, weight_limit)
    expected = BruteForce(limit, weight_limit)
    for value, (is_put, owner, key, weight) in enumerate(steps):
        if is_put:
            assert kept.put(owner, key, value, weight) == expected.put(owner, key, value, weight)
        else:
            assert kept.pop(owner, key) == expected.pop(owner, key)
        for each in OWNERS:
            own = [entry for entry in expected.entries if entry[0] == each]
            assert list(kept.entries_of(each).items()) == [(entry[1], entry[2]) for entry in own]
            assert kept.weight_of(each) == sum(entry[3] for entry in own)
        assert kept.size == len(expected.entries) == sum(len(entries) for _, entries in kept)
        assert kept.weight == sum(entry[3] for entry in expected.entries)


def test_no_owner_loses_an_entry_to_an_owner_that_has_more() -> None:
    kept: FairCache[int, str] = FairCache(100)
    kept.put("victim", 0, "mine")
    for number in range(10_000):
        kept.put("flooder", number, "its own")
    assert kept.entries_of("victim") == {0: "mine"}
    assert len(kept.entries_of("flooder")) == 99
    assert next(iter(kept.entries_of("flooder"))) == 9901


def test_the_newest_entry_stays_even_if_it_is_heavier_than_the_limit() -> None:
    kept: FairCache[int, str] = FairCache(10, 10)
    kept.put("other", 0, "light", 3)
    assert kept.put("one", 1, "heavy", 50) == [(0, "light")]
    assert kept.entries_of("one") == {1: "heavy"}
    assert kept.put("other", 2, "light", 3) == [(1, "heavy")]


def test_shrink_drops_entries_down_to_a_weight() -> None:
    kept: FairCache[int, str] = FairCache(10)
    for key in range(4):
        kept.put("ab"[key % 2], key, "", 1 + key % 2)
    assert kept.shrink(6) == []
    assert kept.shrink(3) == [(1, ""), (3, "")]
    assert kept.shrink(0) == [(0, ""), (2, "")]


class Name(str):
    """An owner's name that counts how often names are compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    def __lt__(self, other: str) -> bool:
        Name.compared += 1
        return str.__lt__(self, other)

    __hash__ = str.__hash__


def test_adding_an_entry_takes_a_few_comparisons_however_many_entries_there_are() -> None:
    kept: FairCache[int, int] = FairCache(10_000, 10_000)
    names = [Name(f"key-{number}") for number in range(1000)]
    for key in range(10):
        for name in names:
            kept.put(name, key, 0, 1)
    before = Name.compared
    for name in names:
        assert kept.put(name, 10, 0, 1)
    # Owners have equal shares, so each comparison of two owners compares their names, too.
    assert Name.compared - before < 150 * len(names)
