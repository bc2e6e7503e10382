"""Distribution of lengths around their prompt's mean, recorded while the server runs.

Prompts are assumed to share the distribution of the ratio r = length / mean length of the prompt. Stopped candidates
are right-censored, and the product-limit (Kaplan-Meier) rule counts them as longer. It assumes no shape. Beyond the
last finished ratios the chance to end per token is assumed to be constant (an exponential tail).

From a full pool, mean and 90th percentile are right to 6 %. They are up to 32 % too large if lengths have two modes and
only the short end of the long mode shows.

The mean of a prompt is itself estimated. The errors of counting the candidate in this mean and of leaving it out are
equally large, so a candidate counts half: the spread is then right to the order of 1 / n for gamma lengths.

The 99th percentile is at most 12 % too small if all candidates finish. `tests/estimates/test_length_profile.py` has a
table for stopped candidates.
"""

import math
from collections.abc import Sequence

import numpy as np

from darts_server.estimates.checks import check_number
from darts_server.estimates.isotonic import Floats
from darts_server.estimates.lengths import LengthEstimate, Observation, PromptStats

OCTAVES = (-6, 6)
BINS_PER_OCTAVE = 24
"""Ratios from 1/64 to 64 in bins 3 % wide. The outermost bins also count all ratios outside."""
EDGES: Floats = 2.0 ** np.linspace(*OCTAVES, (OCTAVES[1] - OCTAVES[0]) * BINS_PER_OCTAVE + 1)

MEMORY = 4096
"""Effective number of ratios in the pool: some 300 groups, one or two steps. Older ratios fade."""
NO_COUNT = 1e-9
TAIL_SHARE = 0.05
"""Share of finished ratios that shows the tail. With more, two modes become too wide; with fewer, it is noise."""
TAIL_COUNT = 20
"""Smallest number of finished ratios that shows the tail."""
OWN_VOTE = 0.5
"""Weight of a candidate in the mean that divides its length."""


class LengthProfile:
    """The pooled distribution of length / mean length of the prompt.

    ``LengthProfile(**state)`` restores a saved state.

    Args:
        finished, censored: faded counts in each bin, shortest first; empty for no counts.
    """

    def __init__(self, finished: Sequence[float] = (), censored: Sequence[float] = ()) -> None:
        self._counts: Floats = np.zeros((2, len(EDGES) - 1))
        for row, (name, counts) in enumerate((("finished", finished), ("censored", censored))):
            if counts and len(counts) != len(EDGES) - 1:
                raise ValueError(f"{name} must have {len(EDGES) - 1} counts, got {len(counts)}")
            for bin_index, count in enumerate(counts):
                # `observe` leaves no smaller count.
                check_number(name, count, low=NO_COUNT if count else 0)
                self._counts[row, bin_index] = count

    @property
    def state(self) -> dict[str, list[float]]:
        finished, censored = self._counts.tolist()
        return {"finished": finished, "censored": censored}

    def observe(self, ratios: Sequence[tuple[float, bool]]) -> None:
        """Record the candidates of a group, as `ratios_to_mean` returns them."""
        self._counts *= (1 - 1 / MEMORY) ** len(ratios)
        self._counts[self._counts < NO_COUNT] = 0.0
        for ratio, censored in ratios:
            octave = math.log2(max(ratio, EDGES[0]))
            bin_index = math.floor((octave - OCTAVES[0]) * BINS_PER_OCTAVE)
            row = 1 if censored else 0
            self._counts[row, min(bin_index, len(EDGES) - 2)] += 1.0

    def quantiles(self, n: int) -> Floats | None:
        """Return the ratios at the probabilities (i + 1/2) / n, ascending, shape (n,).

        None before any candidate has finished.
        """
        finished, censored = self._counts
        total = float(finished.sum())
        if total <= 0:
            return None

        # Product-limit rule. Within a bin, finished candidates come first, because they caused the stops.
        at_risk = _suffix_sums(finished + censored)
        share_ending = np.divide(finished, at_risk, out=np.zeros_like(finished), where=finished > 0)
        # survival[k] is the share of candidates that are longer than edge k.
        survival = np.concatenate([[1.0], np.cumprod(1.0 - share_ending)])

        # The tail begins at the last bin with enough finished candidates in it and after it. Before the tail, find the
        # ratio that each share of candidates exceeds. `interp` needs rising values.
        # Half are enough if few have finished.
        enough = max(TAIL_SHARE * total, min(TAIL_COUNT, total / 2))
        tail = int(np.flatnonzero(_suffix_sums(finished) >= enough)[-1])
        share_longer = (np.arange(n, 0, -1, dtype=np.float64) - 0.5) / n
        ratios = np.interp(-share_longer, -survival[: tail + 1], EDGES[: tail + 1])

        # The tail is exponential with the mean (exposure of all candidates) / (number that finish). A candidate that
        # passes a bin is exposed over the whole bin, and a candidate that ends there over half.
        exposed = at_risk - (finished + censored) / 2
        exposure = float((exposed * np.diff(EDGES))[tail:].sum())
        tail_mean = exposure / float(finished[tail:].sum())
        tail_means_beyond = np.maximum(np.log(survival[tail] / share_longer), 0.0)
        return np.asarray(ratios + tail_mean * tail_means_beyond, dtype=np.float64)


def _suffix_sums(counts: Floats) -> Floats:
    return np.cumsum(counts[::-1])[::-1]


def ratios_to_mean(
    observations: Sequence[Observation], estimate: LengthEstimate, earlier: PromptStats | None
) -> list[tuple[float, bool]]:
    """Return the ratio of each candidate's length to its prompt's mean, and whether the length is censored.

    Candidates without a token are left out.

    Args:
        estimate: `estimate_lengths` of the group.
        earlier: statistics of the prompt before this group. Without them, the mean is the mean of the other candidates
            of the group, and a single candidate is left out.
    """
    # A stopped candidate tells little about the mean, so only finished candidates count.
    num_finished = max(sum(not o.censored for o in observations), 1)
    mean = estimate.mean
    std = estimate.std
    if earlier is not None:
        mean = earlier.mean_ema
        std = earlier.std_ema
    variation = ((std or 0.0) / mean) ** 2

    ratios = []
    for o in observations:
        # The number of other candidates behind the mean, and the sum of their lengths.
        if earlier is None:
            num_others: float = num_finished if o.censored else num_finished - 1
            others_tokens = max(num_finished * mean - o.tokens, 0.0)
        else:
            # About the same share of earlier candidates finished.
            num_others = earlier.effective_candidates * num_finished / len(observations)
            others_tokens = num_others * mean
        if num_others > 0 and o.tokens > 0:
            # Without a vote of its own, ratios scatter too widely. With a whole vote, they are pulled towards 1.
            mean_with_own = (others_tokens + OWN_VOTE * o.tokens) / (num_others + OWN_VOTE)
            # As 1 / x is convex, the mean ratio is above 1: with half a vote, by half of the mean's relative variance.
            mean_ratio = 1 + variation / (2 * num_others)
            ratios.append((o.tokens / mean_with_own / mean_ratio, o.censored))
    return ratios
