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
"""Steps without drafts after which drafts are tried again."""
LEAST_GAIN = 1.03
"""Expected gain below which nothing is drafted, as estimates err."""


class StepTimes:
    """Seconds of a decode step, estimated from its numbers of sequences and of drafted tokens.

    Plain steps, without drafts, give the curve ``seconds`` over ``sizes``, which are numbers of sequences. The curve
    never falls.
    """

    def __init__(self) -> None:
        # Of each bin: the last `RECENT` step times, the number of steps, and the largest number of sequences.
        self._bin_seconds = np.zeros((BINS, RECENT))
        self._bin_steps = np.zeros(BINS, np.int64)
        self._bin_sizes = np.zeros(BINS)
        self._steps_since_fit = 0
        # Sums of 1, full, full ** 2, extra and full * extra, see `observe_drafted`.
        self._drafted_sums = np.zeros(5)
        # Drafts make a step longer, because vLLM then samples in another way. Each drafted token adds a share of the
        # time of one more sequence. Measured on a CPU: 0.7 ms and a share of 0.25.
        self.draft_fixed_seconds = 0.0
        self.draft_cost_share = 1.0
        # Placeholders until the first step without drafts.
        self.sizes: Floats = np.array([0.0, 1.0])
        self.seconds: Floats = np.array([0.0, 1.0])

    def plain_seconds(self, sequences: float) -> float:
        return float(np.interp(sequences, self.sizes, self.seconds))

    def observe_plain(self, sequences: int, seconds: float) -> None:
        size_bin = min(int(np.log2(sequences) * PER_OCTAVE), BINS - 1)
        oldest = self._bin_steps[size_bin] % RECENT
        self._bin_seconds[size_bin, oldest] = seconds
        self._bin_steps[size_bin] += 1
        self._bin_sizes[size_bin] = max(self._bin_sizes[size_bin], sequences)
        self._steps_since_fit += 1
        # The first steps of a bin change the curve most.
        if self._steps_since_fit >= FIT_STEPS or self._bin_steps[size_bin] <= PLAIN_STEPS:
            self._steps_since_fit = 0
            self._fit_curve()

    def _fit_curve(self) -> None:
        seen_bins = np.flatnonzero(self._bin_steps)
        kept_steps = np.minimum(self._bin_steps[seen_bins], RECENT)
        means = []
        for size_bin, kept in zip(seen_bins, kept_steps, strict=True):
            recent = self._bin_seconds[size_bin, :kept]
            # A step that waited for something else counts less.
            means.append(np.minimum(recent, MOST_TIMES * np.median(recent)).mean())
        fitted = fit_isotonic(means, kept_steps.astype(float))
        sizes = self._bin_sizes[seen_bins]
        self.sizes = np.concatenate([[0.0], sizes, [sizes[-1] * BEYOND]])
        # Fewer sequences than in any bin may be faster. More sequences take time in proportion to their number.
        self.seconds = np.concatenate([[fitted[0] / 2], fitted, [fitted[-1] * BEYOND]])

    def observe_drafted(self, sequences: int, drafted: int, seconds: float) -> float:
        """Count a step with drafts. Return its seconds, or less if it took far too long."""
        plain = self.plain_seconds(sequences)
        # Seconds that the drafted tokens would take if they were sequences.
        full = self.plain_seconds(sequences + drafted) - plain
        expected = plain + self.draft_fixed_seconds + self.draft_cost_share * full
        seconds = min(seconds, MOST_TIMES * expected)

        # Least squares of extra = fixed + share * full, with falling weights of earlier steps.
        extra = seconds - plain
        self._drafted_sums = FORGET * self._drafted_sums + [1.0, full, full * full, extra, full * extra]
        steps, sum_full, sum_full_squared, sum_extra, sum_full_extra = self._drafted_sums
        # The prior steps have share = 1.
        prior = PRIOR_STEPS * sum_full_squared / steps
        if sum_full_squared > 0:
            spread = prior + sum_full_squared - sum_full * sum_full / steps
            share = (prior + sum_full_extra - sum_full * sum_extra / steps) / spread
            self.draft_cost_share = max(0.0, share)
        fixed = (sum_extra - self.draft_cost_share * sum_full) / steps
        self.draft_fixed_seconds = max(0.0, fixed)
        # At its limit of 0, `fixed` leaves a line through the origin.
        if sum_full_squared > 0 and self.draft_fixed_seconds == 0:
            self.draft_cost_share = max(0.0, (prior + sum_full_extra) / (prior + sum_full_squared))
        return seconds


class Savings:
    """Seconds that drafts have saved or lost, by the number of running sequences and in all.

    Drafts may lose `LOST_SHARE` of the time, and the seconds that they saved before, up to `RESERVE`. Both are counted
    in all and at each level. At a level where neither count has seconds left, nothing is drafted.
    """

    def __init__(self) -> None:
        self._saved_in_all = 0.0
        self._saved_at_level = np.zeros(LEVELS)
        self._plain_steps = np.zeros(LEVELS, np.int64)
        self._steps_since_plain = np.zeros(LEVELS, np.int64)

    def may_draft(self, sequences: int) -> bool:
        level = _level_of(sequences)
        is_compared = self._plain_steps[level] >= PLAIN_STEPS and self._steps_since_plain[level] < PLAIN_EVERY
        # Drafts may lose time here while they have saved time elsewhere, and the other way round.
        return bool(is_compared and max(self._saved_in_all, self._saved_at_level[level]) >= 0)

    def count_plain(self, sequences: int, plain_seconds: float) -> None:
        level = _level_of(sequences)
        self._plain_steps[level] += 1
        self._steps_since_plain[level] = 0
        self._add_saved(level, LOST_SHARE * plain_seconds, plain_seconds)

    def count_drafted(
        self,
        sequences: int,
        plain_seconds: float,
        seconds: float,
        tokens: int,
    ) -> None:
        """Count a step with drafts that gave so many tokens. ``plain_seconds``: of a step without drafts."""
        level = _level_of(sequences)
        self._steps_since_plain[level] += 1
        seconds_without_drafts = plain_seconds * tokens / sequences
        self._add_saved(level, seconds_without_drafts - (1 - LOST_SHARE) * seconds, plain_seconds)

    def _add_saved(self, level: int, seconds: float, plain_seconds: float) -> None:
        """Add saved seconds, or lost seconds below 0, to both counts."""
        limit = RESERVE * plain_seconds
        self._saved_in_all = min(self._saved_in_all + seconds, limit)
        self._saved_at_level[level] = min(self._saved_at_level[level] + seconds, limit)


def _level_of(sequences: int) -> int:
    return min(int(2 * np.log2(sequences)), LEVELS - 1)


def count_worthwhile(sequences: int, chances: Floats, seconds: Floats) -> int:
    """Return the number of drafted tokens that gives the most tokens per second.

    ``chances``: of each drafted token, falling. ``seconds``: of a step with 0, 1, 2, ... drafted tokens.
    """
    expected_tokens = np.full(chances.size + 1, float(sequences))
    expected_tokens[1:] += np.cumsum(chances)
    return int(np.argmax(expected_tokens / seconds))


def choose_lengths(
    chances: Floats,
    drafted: Ints,
    times: StepTimes,
    cost_scale: float,
) -> tuple[Ints, float]:
    """Return how many tokens of each draft are verified, and the least chance that is worth a verification now.

    ``chances``: [sequences, most], falling in each row. ``drafted``: number of tokens of each draft.
    """
    sequences, most = chances.shape
    is_drafted = np.arange(most) < drafted[:, None]
    falling_chances = np.sort(chances[is_drafted])[::-1]

    # Seconds of a step with 0, 1, 2, ... drafted tokens. A step without drafts counts as faster, because estimates err.
    seconds = np.interp(sequences + np.arange(falling_chances.size + 1.0), times.sizes, times.seconds)
    plain = seconds[0]
    seconds = plain + cost_scale * (times.draft_fixed_seconds + times.draft_cost_share * (seconds - plain))
    seconds[0] = plain / LEAST_GAIN

    count = count_worthwhile(sequences, falling_chances, seconds)
    # No chance is 2, so nothing is chosen.
    least_chance = 2.0
    if count:
        least_chance = float(falling_chances[count - 1])
    chosen = (is_drafted & (chances >= least_chance)).sum(axis=1)
    return chosen, least_chance
