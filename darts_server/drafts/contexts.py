"""Count which token followed which context, for several texts that grow at the same time, and draft continuations.

A context is the last 1, 2, 4, 8 or 16 tokens of a text (`RUNGS`). Texts with the same *root* share their counts: all
samples of a prompt, in this epoch and in earlier epochs. Root `EVERYWHERE` is shared by all texts. (SRT, arXiv
2601.09083, keeps a suffix tree for each prompt. Longer contexts than 16 predict hardly better, and counts of five
lengths in a hash table take constant time and memory for each token.)

All functions are compiled. Their arrays are `Counts`, and a row of hashes for each text (`new_hashes`).
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from darts_server.drafts.acceptance import RUNGS, cell_of

LONGEST = 1 << (RUNGS - 1)
EVERYWHERE = 0
"""Root of the counts over all prompts. Its contexts have at least eight tokens, as shorter contexts predict little."""
FIRST_RUNG_EVERYWHERE = 3
KEPT_HASHES = 64
"""Number of hashes in the ring of a text: for its last 17 positions, and for a draft while it is made."""
SLOT_BYTES = 32
"""A context and a continuation in the tables."""
SLOTS_OF_TOKEN = 2 * RUNGS - FIRST_RUNG_EVERYWHERE
"""Contexts that a new token continues."""
MOST_FULL = 0.6
"""Share of the slots of a table that are used at most."""
_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_ONE = np.uint64(1)


class Counts(NamedTuple):
    """Two hash tables with open addressing, as arrays. A key is never 0.

    ``keys``: [contexts]. ``totals``: [contexts], weight of all continuations. ``tokens``, ``counts``: [contexts], the
    heaviest continuation and its weight. ``pair_keys``, ``pair_counts``: [pairs], the weight of each continuation.
    ``used``: number of contexts and pairs.
    """

    keys: NDArray[np.uint64]
    totals: NDArray[np.float32]
    tokens: NDArray[np.int32]
    counts: NDArray[np.float32]
    pair_keys: NDArray[np.uint64]
    pair_counts: NDArray[np.float32]
    used: NDArray[np.int64]


def new_counts(bits: int) -> Counts:
    """Return empty tables of 2 ** bits slots for contexts, and as many for continuations."""
    size = 1 << bits
    return Counts(
        keys=np.zeros(size, np.uint64),
        totals=np.zeros(size, np.float32),
        tokens=np.zeros(size, np.int32),
        counts=np.zeros(size, np.float32),
        pair_keys=np.zeros(size, np.uint64),
        pair_counts=np.zeros(size, np.float32),
        used=np.zeros(2, np.int64),
    )


def new_hashes(texts: int) -> NDArray[np.uint64]:
    """Return the hashes of empty texts, uint64 [texts, KEPT_HASHES]."""
    return np.zeros((texts, KEPT_HASHES), np.uint64)


def _raise_base() -> NDArray[np.uint64]:
    """Return the base to the power of each context length."""
    powers = np.empty(RUNGS, np.uint64)
    power = _BASE
    with np.errstate(over="ignore"):
        for rung in range(RUNGS):
            powers[rung] = power
            # Each context length is twice the one before.
            power = power * power
    return powers


_POWERS = _raise_base()


@njit(inline="always")
def _find_slot(keys, key):  # type: ignore[no-untyped-def]
    """Return the slot of a key, or the free slot where it belongs."""
    mask = np.uint64(keys.shape[0] - 1)
    slot = (key * _BASE) >> _SHIFT & mask
    while keys[slot] != 0 and keys[slot] != key:
        slot = (slot + _ONE) & mask
    return slot


@njit(inline="always")
def is_full(counts):  # type: ignore[no-untyped-def]
    return max(counts.used[0], counts.used[1]) > MOST_FULL * counts.keys.shape[0]


@njit(nogil=True)
def copy_counts(old, larger):  # type: ignore[no-untyped-def]
    for slot in range(old.keys.shape[0]):
        if old.keys[slot] != 0:
            new_slot = _find_slot(larger.keys, old.keys[slot])
            larger.keys[new_slot] = old.keys[slot]
            larger.totals[new_slot] = old.totals[slot]
            larger.tokens[new_slot] = old.tokens[slot]
            larger.counts[new_slot] = old.counts[slot]
        if old.pair_keys[slot] != 0:
            new_slot = _find_slot(larger.pair_keys, old.pair_keys[slot])
            larger.pair_keys[new_slot] = old.pair_keys[slot]
            larger.pair_counts[new_slot] = old.pair_counts[slot]
    larger.used[:] = old.used


@njit(inline="always")
def _context_key(hashes, length, root, rung):  # type: ignore[no-untyped-def]
    """Return the key of the last 2 ** rung tokens of a text of this length."""
    context_length = 1 << rung
    # The hash of the whole text minus that of the tokens before the context: a rolling hash.
    before = hashes[(length - context_length) % KEPT_HASHES] * _POWERS[rung]
    key = (hashes[length % KEPT_HASHES] - before + np.uint64(root) * _MIX) * _BASE + np.uint64(rung + 1)
    key ^= key >> _SHIFT
    # Never 0, which marks a free slot.
    return key | _ONE


@njit(inline="always")
def append_hash(hashes, length, token):  # type: ignore[no-untyped-def]
    hashes[(length + 1) % KEPT_HASHES] = hashes[length % KEPT_HASHES] * _BASE + np.uint64(token + 1)


@njit(inline="always")
def _count_continuation(counts, hashes, length, root, rung, token, weight):  # type: ignore[no-untyped-def]
    """Add a weight to a token as the continuation of the text's last 2 ** rung tokens."""
    key = _context_key(hashes, length, root, rung)
    slot = _find_slot(counts.keys, key)
    pair_key = ((key ^ np.uint64(token + 1)) * _MIX) | _ONE
    pair_slot = _find_slot(counts.pair_keys, pair_key)
    # A search in a table without a free slot would never end, so full tables get no new keys.
    if (counts.keys[slot] == 0 or counts.pair_keys[pair_slot] == 0) and is_full(counts):
        return
    if counts.keys[slot] == 0:
        counts.keys[slot] = key
        counts.used[0] += 1
    if counts.pair_keys[pair_slot] == 0:
        counts.pair_keys[pair_slot] = pair_key
        counts.used[1] += 1
    counts.totals[slot] += weight
    counts.pair_counts[pair_slot] += weight
    # The context's slot has its heaviest continuation.
    if counts.pair_counts[pair_slot] >= counts.counts[slot]:
        counts.counts[slot] = counts.pair_counts[pair_slot]
        counts.tokens[slot] = token


@njit(nogil=True)
def append_counted(counts, hashes, length, root, tokens, weight):  # type: ignore[no-untyped-def]
    """Append tokens to a text of this length, count each as the continuation of its contexts, return the new length."""
    for token in tokens:
        for rung in range(RUNGS):
            if (1 << rung) > length:
                break
            _count_continuation(counts, hashes, length, root, rung, token, weight)
            if rung >= FIRST_RUNG_EVERYWHERE:
                _count_continuation(counts, hashes, length, EVERYWHERE, rung, token, weight)
        append_hash(hashes, length, token)
        length += 1
    return length


@njit(nogil=True)
def append_uncounted(hashes, length, tokens):  # type: ignore[no-untyped-def]
    for token in tokens:
        append_hash(hashes, length, token)
        length += 1
    return length


@njit(nogil=True)
def draft(counts, hashes, length, root, token_weight, rates, max_tokens, min_chance, tokens, chances, cells):  # type: ignore[no-untyped-def]
    """Draft the continuation of a text into ``tokens``, and return the number of drafted tokens.

    Each token is the heaviest continuation of one of the text's contexts: of the context whose continuations are
    accepted most often. The draft ends at ``max_tokens``, or when the probability that all its tokens are accepted
    falls below ``min_chance``.

    ``hashes``, ``length``, ``root``: the text. Only hashes beyond its end change. ``rates``: share of accepted tokens,
    by `cell_of`. ``tokens``, ``chances``, ``cells``: set for each token to its id, the probability that the draft is
    accepted up to it, and its cell in ``rates``.
    """
    chance = 1.0
    for place in range(max_tokens):
        draft_end = length + place
        best_rate = 0.0
        best_token = -1
        best_cell = -1
        # Contexts of the prompt, and then contexts of all prompts; the longest first.
        for source in range(2):
            source_root = root
            first_rung = 0
            if source == 1:
                source_root = EVERYWHERE
                first_rung = FIRST_RUNG_EVERYWHERE
            for rung in range(RUNGS - 1, first_rung - 1, -1):
                if (1 << rung) > draft_end:
                    continue
                slot = _find_slot(counts.keys, _context_key(hashes, draft_end, source_root, rung))
                if counts.keys[slot] == 0:
                    continue
                cell = cell_of(source, rung, counts.counts[slot], counts.totals[slot], token_weight)
                rate = rates[cell]
                if rate > best_rate:
                    best_rate = rate
                    best_token = counts.tokens[slot]
                    best_cell = cell
        if best_token < 0:
            return place
        chance *= best_rate
        if chance < min_chance:
            return place
        tokens[place] = best_token
        chances[place] = chance
        cells[place] = best_cell
        append_hash(hashes, draft_end, best_token)
    return max_tokens
