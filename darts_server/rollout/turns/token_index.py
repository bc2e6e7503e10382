"""Find out whether a prompt begins with a prompt and its answer that are known, by hashes of all its prefixes."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BUCKET_BITS = 20
"""With 65,536 known sequences one prefix in 16 shares its bucket with one, and one in 500 with several."""
BUCKET_SHIFT = np.uint64(64 - BUCKET_BITS)
FIRST_WEIGHTS = 4096
MASK = (1 << 64) - 1

Hashes = NDArray[np.uint64]


class TokenIndex:
    """The newest ``kept`` sequences of tokens, as hashes, each with the rank of the engine that has it.

    A sequence's hash is the sum of its tokens, each times a random number for its position, modulo 2^64. So the hashes
    of all prefixes of a prompt are one cumulative sum. Two given sequences have the same hash with a probability below
    2^-40.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._known: OrderedDict[int, int | None] = OrderedDict()
        self._counts = np.zeros(1 << BUCKET_BITS, dtype=np.uint16)  # known hashes, by their highest bits
        self._mixed = np.zeros(1 << BUCKET_BITS, dtype=np.uint64)  # these hashes, combined by XOR
        self._rng = np.random.default_rng()
        self._weights = self._draw_weights(FIRST_WEIGHTS)

    def __len__(self) -> int:
        return len(self._known)

    def prefix_hashes(self, tokens: Sequence[int]) -> Hashes:
        """Return the hashes of all prefixes of a sequence, from its first token to all of it."""
        terms = self._terms(tokens, 0)
        return terms.cumsum(out=terms)

    def add(self, prompt: int, length: int, answer: Sequence[int], rank: int | None = None) -> None:
        """Add a prompt with its answer; the oldest sequence is dropped if there are too many.

        ``prompt``: its hash. ``length``: its tokens. ``rank``: of its engine, if that is known.
        """
        terms = self._terms(answer, length)
        key = (prompt + int(terms.sum(dtype=np.uint64))) & MASK
        is_new = key not in self._known
        self._known[key] = rank
        if not is_new:
            self._known.move_to_end(key)
            return
        self._count(key, 1)
        if len(self._known) > self._kept:
            oldest, _ = self._known.popitem(last=False)
            self._count(oldest, -1)

    def longest_prefix(self, hashes: Hashes) -> int | None:
        """Return the hash of the longest known prefix among these, the shortest first; ``None`` if none is known."""
        if not self._known:
            return None
        buckets = hashes >> BUCKET_SHIFT
        near = np.flatnonzero(self._counts[buckets])
        hashes, buckets = hashes[near], buckets[near]
        # The one hash of a bucket is compared here: looking up thousands in the dictionary would take longest.
        likely = hashes[(self._mixed[buckets] == hashes) | (self._counts[buckets] > 1)]
        return next((key for key in reversed(likely.tolist()) if key in self._known), None)

    def rank_of(self, known: int) -> int | None:
        """Return the rank of the engine that has a known sequence, if that is known too."""
        return self._known[known]

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
