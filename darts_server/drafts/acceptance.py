"""How often a drafted token is right, learned by the kind of its evidence."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

SOURCES = 2
"""Counts of the prompt, and of all prompts."""
RUNGS = 5
"""Number of context lengths: 1, 2, 4, 8 and 16 tokens."""
COUNT_LIMITS = (1.5, 2.5, 5.5)
"""A context was seen once, twice, three to five times, or more often."""
SHARE_LIMITS = (0.35, 0.55, 0.75, 0.9, 0.999)
"""Shares of the most frequent continuation of a context."""
COUNTS = len(COUNT_LIMITS) + 1
SHARES = len(SHARE_LIMITS) + 1
CELLS_OF_SOURCE = RUNGS * COUNTS * SHARES
CELLS = SOURCES * CELLS_OF_SOURCE
PRIOR_TRIES = 4.0
FORGET_TRIES = 2000.0
"""At so many tries a cell counts its past half, so that it follows the weights of the model."""
_TYPICAL_COUNTS = (1.0, 2.0, 4.0, 8.0)
_TYPICAL_SHARES = (0.25, 0.45, 0.65, 0.82, 0.95, 1.0)


@njit(inline="always")
def _place(value, limits):  # type: ignore[no-untyped-def]
    """Return how many of the limits the value reaches."""
    place = 0
    for limit in limits:
        if value >= limit:
            place += 1
    return place


@njit(inline="always")
def cell_of(source, rung, count, total, weight):  # type: ignore[no-untyped-def]
    """Return the cell of a continuation that counts ``count`` of the ``total`` of its context.

    ``weight``: what a token of the present epoch counts.
    """
    kind = _place(total / weight, COUNT_LIMITS)
    part = _place(count / total, SHARE_LIMITS)
    return ((source * RUNGS + rung) * COUNTS + kind) * SHARES + part


class Acceptance:
    """Share of drafted tokens that were right, by cell.

    A cell begins with `PRIOR_TRIES` tries. Fewer of these tries were right than the counts say, most of all for short
    contexts. ``rates``: float64 [CELLS], the shares that `draft` reads.
    """

    def __init__(self) -> None:
        self.tries = np.full(CELLS, PRIOR_TRIES)
        self.hits = np.empty(CELLS)
        for cell in range(CELLS):
            share = _TYPICAL_SHARES[cell % SHARES]
            count = _TYPICAL_COUNTS[cell // SHARES % COUNTS]
            rung = cell // (SHARES * COUNTS) % RUNGS
            likely = (share * count + 0.1) / (count + 1.2)
            self.hits[cell] = PRIOR_TRIES * likely * (1 - 0.5 / (1 + rung))
        self.rates: NDArray[np.float64] = self.hits / self.tries

    def update(self) -> None:
        """Compute the rates again, after `score` has changed hits and tries."""
        np.divide(self.hits, self.tries, out=self.rates)


@njit(nogil=True)
def score(hits, tries, totals, tokens, cells, drafted, verified, truth):  # type: ignore[no-untyped-def]
    """Learn from a draft whose first positions are known by now, and return how many of its tokens were right.

    ``totals``: int64 [2, SOURCES], numbers of drafted and of accepted tokens, which count the ``verified`` tokens.
    """
    right = 0
    for place in range(verified):
        totals[0, cells[place] // CELLS_OF_SOURCE] += 1
    for place in range(min(drafted, truth.shape[0])):
        cell = cells[place]
        if tries[cell] >= FORGET_TRIES:
            tries[cell] *= 0.5
            hits[cell] *= 0.5
        tries[cell] += 1
        if tokens[place] != truth[place]:
            break
        hits[cell] += 1
        right += 1
        if place < verified:
            totals[1, cell // CELLS_OF_SOURCE] += 1
    return right
