"""How many tokens of each draft are verified: as many as give the most tokens per second, and none where none pay."""

import numpy as np
from numpy.typing import NDArray

from darts_server.estimates.isotonic import fit_isotonic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_DRAFT_TOKENS = 12
"""Maximum tokens of a draft. In the third epoch of the tiny task 5.7 tokens were accepted in a step with 16, and 5.4
with 12; a longer draft reserves more of the KV cache."""
BINS = 64
"""Step times are learned for numbers of sequences, four to an octave: up to 65,536 sequences."""
PER_OCTAVE = 4
BEYOND = 64
"""The curve ends at so many times the largest step so far."""
RECENT = 15
"""Number of steps of each size that count."""
FIT_STEPS = 16
"""The curve is fitted again after so many steps: a fit takes as long as some drafts."""
MOST_TIMES = 2.0
"""A step that took longer than so many times the usual counts as that long: it waited for something else."""
FORGET = 0.99
"""Weight of a step with drafts after the next one."""
PRIOR_STEPS = 2.0
"""Steps whose drafts cost as much as sequences, before any was measured."""

LEVELS = 32
"""Drafts must pay at each number of sequences, two levels to an octave."""
PLAIN_STEPS = 3
"""Steps without drafts at a level before its first draft."""
PLAIN_EVERY = 32
"""Steps of a level of which one has no drafts, as a comparison."""
LOST_SHARE = 0.01
"""Share of the time that drafts may lose."""
RESERVE = 16.0
"""Most that a level saves up, in steps: what drafts can lose after they have won for long."""
EXPLORED_STEPS = 64
"""After so many steps without drafts they are tried at half of their costs."""
LEAST_GAIN = 1.03
"""Expected gain below which nothing is drafted, as estimates err."""


class StepTimes:
    """Seconds of a decode step, estimated from its numbers of sequences and of drafted tokens.

    Steps without drafts give the curve ``seconds`` over ``sizes``, which are numbers of sequences. The curve never
    falls. A step with drafts takes ``fixed`` seconds more, because vLLM then samples in another way. Each drafted token
    also adds ``share`` of the time that one more sequence would add. (Measured on a CPU: ``fixed`` 0.7 ms, ``share``
    0.25.)
    """

    def __init__(self) -> None:
        # Of each bin: the last `RECENT` step times, the number of steps, and the largest number of sequences.
        self._bin_seconds = np.zeros((BINS, RECENT))
        self._bin_steps = np.zeros(BINS, np.int64)
        self._bin_sizes = np.zeros(BINS)
        self._steps_since_fit = 0
        # Sums for the least squares in `observe_drafted`: of steps, full, full², extra, full · extra.
        self._drafted_sums = np.zeros(5)
        self.fixed = 0.0
        self.share = 1.0
        # Placeholders until the first step without drafts.
        self.sizes: Floats = np.array([0.0, 1.0])
        self.seconds: Floats = np.array([0.0, 1.0])

    def plain(self, sequences: float) -> float:
        """Return the seconds of a step without drafts."""
        return float(np.interp(sequences, self.sizes, self.seconds))

    def observe_plain(self, sequences: int, seconds: float) -> None:
        """Count a step without drafts."""
        place = min(int(np.log2(sequences) * PER_OCTAVE), BINS - 1)
        self._bin_seconds[place, self._bin_steps[place] % RECENT] = seconds
        self._bin_steps[place] += 1
        self._bin_sizes[place] = max(self._bin_sizes[place], sequences)
        self._steps_since_fit += 1
        if self._steps_since_fit >= FIT_STEPS or self._bin_steps[place] <= PLAIN_STEPS:
            self._steps_since_fit = 0
            self._fit()

    def _fit(self) -> None:
        """Fit the curve to the mean of each bin. Steps that took far too long count less."""
        seen = np.flatnonzero(self._bin_steps)
        weights = np.minimum(self._bin_steps[seen], RECENT)
        means = []
        for place, kept in zip(seen, weights, strict=True):
            recent = self._bin_seconds[place, :kept]
            means.append(np.minimum(recent, MOST_TIMES * np.median(recent)).mean())
        fitted = fit_isotonic(means, weights.astype(float))
        sizes = self._bin_sizes[seen]
        self.sizes = np.concatenate([[0.0], sizes, [sizes[-1] * BEYOND]])
        # Fewer sequences than in any bin may be faster. More sequences take time in proportion to their number.
        self.seconds = np.concatenate([[fitted[0] / 2], fitted, [fitted[-1] * BEYOND]])

    def observe_drafted(self, sequences: int, drafted: int, seconds: float) -> float:
        """Count a step with drafts. Return its seconds, or less if it took far too long."""
        plain = self.plain(sequences)
        # Seconds that the drafted tokens would take if they were sequences.
        full = self.plain(sequences + drafted) - plain
        seconds = min(seconds, MOST_TIMES * (plain + self.fixed + self.share * full))

        # Least squares of extra seconds = fixed + share * full, both at least 0.
        extra = seconds - plain
        self._drafted_sums = FORGET * self._drafted_sums + [1.0, full, full * full, extra, full * extra]
        steps, fulls, squares, extras, products = self._drafted_sums
        prior = PRIOR_STEPS * squares / steps
        if squares > 0:
            spread = prior + squares - fulls * fulls / steps
            self.share = max(0.0, (prior + products - fulls * extras / steps) / spread)
        self.fixed = max(0.0, (extras - self.share * fulls) / steps)
        if squares > 0 and self.fixed == 0:
            self.share = max(0.0, (prior + products) / (prior + squares))
        return seconds


class Savings:
    """Seconds that drafts have saved or lost, by the number of running sequences and in all.

    Drafts may lose `LOST_SHARE` of the time, and the seconds that they saved before, up to `RESERVE`. Both are counted
    in all and at each level. At a level where neither count has seconds left, nothing is drafted.
    """

    def __init__(self) -> None:
        self._total = 0.0
        self._saved = np.zeros(LEVELS)
        self._plain_steps = np.zeros(LEVELS, np.int64)
        self._since_plain = np.zeros(LEVELS, np.int64)

    def may_draft(self, sequences: int) -> bool:
        """Return whether the next step of so many sequences may have drafts."""
        level = _level(sequences)
        is_compared = self._plain_steps[level] >= PLAIN_STEPS and self._since_plain[level] < PLAIN_EVERY
        return bool(is_compared and max(self._total, self._saved[level]) >= 0)

    def count_plain(self, sequences: int, plain_seconds: float) -> None:
        """Count a step without drafts."""
        level = _level(sequences)
        self._plain_steps[level] += 1
        self._since_plain[level] = 0
        self._save(level, LOST_SHARE * plain_seconds, plain_seconds)

    def count_drafted(self, sequences: int, plain_seconds: float, seconds: float, tokens: int) -> None:
        """Count a step with drafts that gave so many tokens. ``plain_seconds``: of a step without drafts."""
        level = _level(sequences)
        self._since_plain[level] += 1
        self._save(level, plain_seconds * tokens / sequences - (1 - LOST_SHARE) * seconds, plain_seconds)

    def _save(self, level: int, saved: float, plain_seconds: float) -> None:
        """Add saved seconds, or lost seconds below 0, to both counts."""
        most = RESERVE * plain_seconds
        self._total = min(self._total + saved, most)
        self._saved[level] = min(self._saved[level] + saved, most)


def _level(sequences: int) -> int:
    return min(int(2 * np.log2(sequences)), LEVELS - 1)


def count_worth(rows: int, chances: Floats, seconds: Floats) -> int:
    """Return the number of drafted tokens that gives the most tokens per second.

    ``chances``: of each drafted token of all rows, falling. ``seconds``: of a step with 0, 1, 2, ... drafted tokens.
    """
    expected = np.full(chances.size + 1, float(rows))
    expected[1:] += np.cumsum(chances)
    return int(np.argmax(expected / seconds))


def choose(rows: int, chances: Floats, drafted: Ints, times: StepTimes, scale: float, chosen: Ints) -> float:
    """Set ``chosen``, [rows], to the number of tokens of each draft that are verified.

    ``chances``: [rows, most], falling in each row. ``scale``: factor for the costs of drafts. Returns the least chance
    that is worth a verification now.
    """
    is_drafted = np.arange(chances.shape[1]) < drafted[:, None]
    flat = np.sort(chances[is_drafted])[::-1]
    # Seconds of a step with 0, 1, 2, ... drafted tokens. A step without drafts counts as faster, because estimates err.
    seconds = np.interp(rows + np.arange(flat.size + 1.0), times.sizes, times.seconds)
    plain = seconds[0]
    seconds = plain + scale * (times.fixed + times.share * (seconds - plain))
    seconds[0] = plain / LEAST_GAIN
    count = count_worth(rows, flat, seconds)
    # No chance is 2, so nothing is chosen.
    least = 2.0
    if count:
        least = float(flat[count - 1])
    chosen[:] = (is_drafted & (chances >= least)).sum(axis=1)
    return least
