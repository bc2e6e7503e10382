"""Find out whether a prompt begins with a prompt and its answer that are known, by hashes of all its prefixes."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BUCKET_BITS = 20
"""With 65,536 known sequences one prefix in sixteen is looked up further: an array of 2 MiB."""
BUCKET_SHIFT = np.uint64(64 - BUCKET_BITS)
FIRST_WEIGHTS = 4096
MASK = (1 << 64) - 1

Hashes = NDArray[np.uint64]


class TokenIndex:
    """The newest ``kept`` sequences of tokens, as hashes.

    A sequence's hash is the sum of its tokens, each times a random number for its position, modulo 2^64. So the hashes
    of all prefixes of a prompt are one cumulative sum. Two given sequences have the same hash with a probability below
    2^-40.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._known: OrderedDict[int, None] = OrderedDict()
        self._buckets = np.zeros(1 << BUCKET_BITS, dtype=np.uint16)  # known hashes by their highest bits
        self._rng = np.random.default_rng()
        self._weights = self._draw_weights(FIRST_WEIGHTS)

    def __len__(self) -> int:
        return len(self._known)

    def prefix_hashes(self, tokens: Sequence[int]) -> Hashes:
        """Return the hashes of all prefixes of a sequence, from its first token to all of it."""
        return self._terms(tokens, 0).cumsum(dtype=np.uint64)

    def add(self, prompt: int, length: int, answer: Sequence[int]) -> None:
        """Add a prompt with its answer; the oldest sequence is dropped if there are too many.

        ``prompt``: its hash. ``length``: its tokens.
        """
        terms = self._terms(answer, length)
        key = (prompt + int(terms.sum(dtype=np.uint64))) & MASK
        if key in self._known:
            self._known.move_to_end(key)
            return
        self._known[key] = None
        self._buckets[_bucket(key)] += 1
        if len(self._known) > self._kept:
            oldest, _ = self._known.popitem(last=False)
            self._buckets[_bucket(oldest)] -= 1

    def holds_prefix(self, hashes: Hashes) -> bool:
        """Whether a prefix with one of these hashes is known."""
        if not self._known:
            return False
        hits = hashes[self._buckets[hashes >> BUCKET_SHIFT] > 0]
        return any(key in self._known for key in hits.tolist())

    def _terms(self, tokens: Sequence[int], position: int) -> Hashes:
        end = position + len(tokens)
        while end > len(self._weights):
            self._weights = np.concatenate([self._weights, self._draw_weights(len(self._weights))])
        values = np.frombuffer(array("q", tokens), dtype=np.uint64)
        return (values + np.uint64(1)) * self._weights[position:end]

    def _draw_weights(self, count: int) -> Hashes:
        return self._rng.integers(1 << 64, size=count, dtype=np.uint64) | np.uint64(1)


def hash_of(prefixes: Hashes) -> int:
    """Return the hash of a whole sequence, the last of its prefixes."""
    return int(prefixes[-1]) if len(prefixes) else 0


def _bucket(key: int) -> int:
    return key >> (64 - BUCKET_BITS)
