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
DRAFTED = 0
ACCEPTED = 1
"""Rows of the total numbers of tokens."""
PRIOR_TRIES = 4.0
FORGET_TRIES = 2000.0
"""At so many tries a cell counts its past half, so that it follows the weights of the model."""
_SMOOTHING_HITS = 0.1
_SMOOTHING_TRIES = 1.2
_TYPICAL_COUNTS = (1.0, 2.0, 4.0, 8.0)
_TYPICAL_SHARES = (0.25, 0.45, 0.65, 0.82, 0.95, 1.0)


@njit(inline="always")
def _count_reached(limits, value):  # type: ignore[no-untyped-def]
    reached = 0
    for limit in limits:
        if value >= limit:
            reached += 1
    return reached


@njit(inline="always")
def cell_of(source, rung, continuation_weight, context_weight, token_weight):  # type: ignore[no-untyped-def]
    """Return the cell of a continuation. ``token_weight``: weight of a token of the present epoch."""
    count_bin = _count_reached(COUNT_LIMITS, context_weight / token_weight)
    share_bin = _count_reached(SHARE_LIMITS, continuation_weight / context_weight)
    return ((source * RUNGS + rung) * COUNTS + count_bin) * SHARES + share_bin


class Acceptance:
    """Share of drafted tokens that were right, by cell. ``rates``: float64 [CELLS], the shares that `draft` reads."""

    def __init__(self) -> None:
        self.tries = np.full(CELLS, PRIOR_TRIES)
        self.hits = np.empty(CELLS)
        # The cells in the order of `cell_of`. Both sources have the same prior.
        for cell, (_source, rung, count_bin, share_bin) in enumerate(np.ndindex(SOURCES, RUNGS, COUNTS, SHARES)):
            context_count = _TYPICAL_COUNTS[count_bin]
            continuation_count = _TYPICAL_SHARES[share_bin] * context_count
            # Fewer tokens are right than the counts say, most of all after short contexts.
            smoothed_share = (continuation_count + _SMOOTHING_HITS) / (context_count + _SMOOTHING_TRIES)
            context_factor = 1 - 0.5 / (1 + rung)
            self.hits[cell] = PRIOR_TRIES * smoothed_share * context_factor
        self.rates: NDArray[np.float64] = self.hits / self.tries

    def update_rates(self) -> None:
        np.divide(self.hits, self.tries, out=self.rates)


@njit(nogil=True)
def learn_acceptance(hits, tries, totals, draft_tokens, cells, drafted_count, verified_count, sampled_tokens):  # type: ignore[no-untyped-def]
    """Compare a draft with the tokens that were sampled in its place.

    ``totals``: int64 [2, SOURCES], numbers of drafted and of accepted tokens among the verified tokens.
    """
    for place in range(verified_count):
        totals[DRAFTED, cells[place] // CELLS_OF_SOURCE] += 1
    # Tokens that were drafted and not verified teach too, as far as they were sampled.
    for place in range(min(drafted_count, sampled_tokens.shape[0])):
        cell = cells[place]
        if tries[cell] >= FORGET_TRIES:
            tries[cell] *= 0.5
            hits[cell] *= 0.5
        tries[cell] += 1
        if draft_tokens[place] != sampled_tokens[place]:
            break
        hits[cell] += 1
        if place < verified_count:
            totals[ACCEPTED, cell // CELLS_OF_SOURCE] += 1
