"""Find out whether a prompt begins with an earlier prompt or answer of its caller, by hashes of all its prefixes."""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

BUCKET_BITS = 20
"""With 131,072 known sequences one prefix in 8 shares its bucket with one, and one in 140 with several."""
BUCKET_SHIFT = np.uint64(64 - BUCKET_BITS)
FIRST_WEIGHTS = 4096
MASK = (1 << 64) - 1

Hashes = NDArray[np.uint64]
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """The newest ``limit`` entries of all callers together.

    Of too many, the oldest of the caller that has most is dropped: no caller loses its entries to one that has more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._of: dict[str, OrderedDict[K, V]] = {}

    def __len__(self) -> int:
        return self._size

    def of(self, caller: str) -> Mapping[K, V]:
        """Return a caller's entries, the oldest first."""
        return self._of.get(caller, {})

    def put(self, caller: str, key: K, value: V) -> K | None:
        """Add or renew an entry; returns the key of the one that is dropped for it, if any."""
        own = self._of.setdefault(caller, OrderedDict())
        self._size += key not in own
        own[key] = value
        own.move_to_end(key)
        if self._size <= self._limit:
            return None
        largest = max(self._of, key=lambda each: len(self._of[each]))
        oldest = next(iter(self._of[largest]))
        self.pop(largest, oldest)
        return oldest

    def pop(self, caller: str, key: K) -> V | None:
        """Remove an entry and return it; ``None`` without one."""
        if key not in self.of(caller):
            return None
        self._size -= 1
        value = self._of[caller].pop(key)
        if not self._of[caller]:
            del self._of[caller]
        return value


class Known(NamedTuple):
    """A sequence of tokens that is known: a prompt with the beginning of its answer, or a prompt alone.

    ``rank``: of the engine that has it, if that is known.
    """

    is_answer: bool
    rank: int | None


class TokenIndex:
    """The newest ``kept`` sequences of tokens of all callers, as hashes.

    A sequence's hash is the sum of its tokens, each times a random number for its position, modulo 2^64. So the hashes
    of all prefixes of a prompt are one cumulative sum. Two given sequences have the same hash with a probability below
    2^-40.
    """

    def __init__(self, kept: int) -> None:
        self._known: Kept[int, Known] = Kept(kept)
        self._counts = np.zeros(1 << BUCKET_BITS, dtype=np.uint32)  # known hashes, by their highest bits
        self._mixed = np.zeros(1 << BUCKET_BITS, dtype=np.uint64)  # these hashes, combined by XOR
        self._rng = np.random.default_rng()
        self._weights = self._draw_weights(FIRST_WEIGHTS)

    def __len__(self) -> int:
        return len(self._known)

    def prefix_hashes(self, tokens: Sequence[int]) -> Hashes:
        """Return the hashes of all prefixes of a sequence, from its first token to all of it."""
        terms = self._terms(tokens, 0)
        return terms.cumsum(out=terms)

    def extend(self, prompt: int, length: int, tokens: Sequence[int]) -> int:
        """Return the hash of a prompt with more tokens. ``prompt``, ``length``: hash and tokens of the prompt."""
        return (prompt + int(self._terms(tokens, length).sum(dtype=np.uint64))) & MASK

    def add(self, caller: str, key: int, rank: int | None = None, *, is_answer: bool = False) -> None:
        """Add the sequence with this hash. What is known as an answer stays one."""
        earlier = self._known.of(caller).get(key)
        is_answer = is_answer or (earlier is not None and earlier.is_answer)
        dropped = self._known.put(caller, key, Known(is_answer, rank))
        if earlier is None:
            self._count(key, 1)
        if dropped is not None:
            self._count(dropped, -1)

    def known_prefixes(self, caller: str, hashes: Hashes) -> Iterator[tuple[int, Known]]:
        """Yield the prefixes among these that are known for a caller, the longest first, each with its length."""
        if not (known := self._known.of(caller)):
            return
        buckets = hashes >> BUCKET_SHIFT
        near = np.flatnonzero(self._counts[buckets])
        few, buckets = hashes[near], buckets[near]
        # The one hash of a bucket is compared here: looking up thousands in the dictionary would take longest.
        likely = near[(self._mixed[buckets] == few) | (self._counts[buckets] > 1)]
        for index in reversed(likely.tolist()):
            if (found := known.get(int(hashes[index]))) is not None:
                yield index + 1, found

    def _count(self, key: int, change: int) -> None:
        bucket = key >> (64 - BUCKET_BITS)
        self._counts[bucket] = int(self._counts[bucket]) + change
        self._mixed[bucket] ^= np.uint64(key)

    def _terms(self, tokens: Sequence[int], position: int) -> Hashes:
        end = position + len(tokens)
        while end > len(self._weights):
            self._weights = np.concatenate([self._weights, self._draw_weights(len(self._weights))])
        try:
            packed = array("Q", tokens)  # "q" takes three times as long
        except OverflowError:  # what stands for an image may be negative
            packed = array("q", tokens)
        terms = np.frombuffer(packed, dtype=np.uint64)
        terms += np.uint64(1)
        terms *= self._weights[position:end]
        return terms

    def _draw_weights(self, count: int) -> Hashes:
        return self._rng.integers(1 << 64, size=count, dtype=np.uint64) | np.uint64(1)


def hash_of(prefixes: Hashes) -> int:
    """Return the hash of a whole sequence, the last of its prefixes."""
    return int(prefixes[-1]) if len(prefixes) else 0
