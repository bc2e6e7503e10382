"""How many tokens of each draft are verified: as many as give the most tokens per second."""

import numpy as np
from numpy.typing import NDArray

from darts_server.estimates.isotonic import fit_isotonic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_DRAFT_TOKENS = 12
"""Maximum tokens of a draft. In the third epoch of the tiny task 5.7 tokens were accepted in a step with 16, and 5.4
with 12; a longer draft reserves more of the KV cache."""
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
        self.sizes: Floats = np.array([0.0, 1.0])
        self.seconds: Floats = np.array([0.0, 1.0])
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


def count_worth(rows: int, chances: Floats, seconds: Floats) -> int:
    """Return the number of drafted tokens that gives the most tokens per second.

    ``chances``: of each drafted token of all rows, falling. ``seconds``: of a step with 0, 1, 2, ... drafted tokens.
    """
    expected = np.full(chances.size + 1, float(rows))
    expected[1:] += np.cumsum(chances)
    return int(np.argmax(expected / seconds))


def choose(rows: int, chances: Floats, drafted: Ints, sizes: Floats, seconds: Floats, chosen: Ints) -> float:
    """Set ``chosen``, [rows], to the number of tokens of each draft that are verified.

    ``chances``: [rows, most], falling in each row. Returns the least chance that is worth a verification now.
    """
    is_drafted = np.arange(chances.shape[1]) < drafted[:, None]
    flat = np.sort(chances[is_drafted])[::-1]
    count = count_worth(rows, flat, np.interp(rows + np.arange(flat.size + 1.0), sizes, seconds))
    least = 2.0
    if count:
        least = float(flat[count - 1])
    chosen[:] = (is_drafted & (chances >= least)).sum(axis=1)
    return least
