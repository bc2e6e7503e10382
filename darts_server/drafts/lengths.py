"""How many tokens of each draft are verified: as many as give the most tokens per second."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from darts_server.estimates.isotonic import fit_isotonic

BINS = 64
"""Step times are learned for numbers of tokens in a step, four to an octave: up to 65,536 tokens."""
PER_OCTAVE = 4
BEYOND = 64
"""The curve ends at so many times the largest step so far."""
RECENT = 15
"""Number of steps of each size whose median counts, so that a step that waited for something else does not."""
FIT_STEPS = 16
"""The curve is fitted again after so many steps: a fit takes as long as some drafts."""
EXPLORED_STEPS = 8
REACH = 1.5
"""A step in eight may be half as large again as the largest step so far, as if that took no more time. So larger steps
become known, also where always the same number of sequences runs."""
ENOUGH = 3
"""Number of steps of the largest size after which it counts as known."""


class StepTimes:
    """Seconds of a decode step by the number of tokens in it: sequences and drafted tokens.

    A verified token costs about as much as a sequence. So steps without drafts teach the cost of drafts in later steps,
    when fewer sequences run. Beyond the largest step so far, time is assumed to grow in proportion to tokens, so that
    little is drafted before more is known.

    ``sizes``, ``seconds``: the points of the curve, which never falls. ``explored``: seconds of the same points in a
    step that explores.
    """

    def __init__(self) -> None:
        self._recent = np.zeros((BINS, RECENT))
        self._counts = np.zeros(BINS, np.int64)
        self._sizes = np.zeros(BINS)
        self._unfitted = 0
        self.sizes: NDArray[np.float64] = np.array([0.0, 1.0])
        self.seconds: NDArray[np.float64] = np.array([0.0, 1.0])
        self.explored = self.seconds

    def observe(self, tokens: int, seconds: float) -> None:
        """Count a step."""
        place = min(int(np.log2(tokens) * PER_OCTAVE), BINS - 1)
        self._recent[place, self._counts[place] % RECENT] = seconds
        self._counts[place] += 1
        self._sizes[place] = max(self._sizes[place], tokens)
        self._unfitted += 1
        if self._unfitted >= FIT_STEPS:
            self._unfitted = 0
            self._fit()

    def _fit(self) -> None:
        seen = np.flatnonzero(self._counts)
        weights = np.minimum(self._counts[seen], RECENT)
        medians = np.array([np.median(self._recent[place, :kept]) for place, kept in zip(seen, weights, strict=True)])
        fitted = fit_isotonic(medians, weights.astype(float))
        sizes = self._sizes[seen]
        largest = sizes[-1]
        last = fitted[-1]
        self.sizes = np.concatenate([[0.0], sizes, [largest * REACH, largest * BEYOND]])
        self.seconds = np.concatenate([[fitted[0]], fitted, [last * REACH, last * BEYOND]])
        self.explored = self.seconds.copy()
        if self._counts[seen[-1]] >= ENOUGH:
            self.explored[-2] = last


@njit(nogil=True)
def choose(rows, chances, drafted, sizes, seconds, chosen):  # type: ignore[no-untyped-def]
    """Set ``chosen``, int64 [rows], to the number of tokens of each draft that are verified.

    ``chances``: float64 [rows, most], falling in each row. Returns the least chance that is worth a verification now.
    """
    total = 0
    for row in range(rows):
        total += drafted[row]
    flat = np.empty(total)
    place = 0
    for row in range(rows):
        for position in range(drafted[row]):
            flat[place] = chances[row, position]
            place += 1
    flat = np.sort(flat)[::-1]

    expected = float(rows)
    best = expected / np.interp(expected, sizes, seconds)
    least = 2.0
    for place in range(total):
        expected += flat[place]
        rate = expected / np.interp(rows + place + 1.0, sizes, seconds)
        if rate > best:
            best = rate
            least = flat[place]
    for row in range(rows):
        count = 0
        while count < drafted[row] and chances[row, count] >= least:
            count += 1
        chosen[row] = count
    return least
