"""Distribution of lengths around their prompt's mean, recorded while the server runs.

Prompts differ in mean length; what they are assumed to share is the distribution of the ratio r = length / mean length
of the prompt. The ratios of all prompts are pooled. Those of stopped candidates are right-censored, and the
product-limit (Kaplan-Meier) rule counts them as the longer ones they are. It assumes no shape, and stopping at the K-th
shortest leaves it unbiased, since no candidate is stopped because of the length it would have had.

Not the ratios are stored but their counts in narrow bins, and old counts fade: an update is cheap and the state small.
Where few of the longest have finished, the product-limit rule has little to go by, and nothing beyond the last one.
There the chance to end per token is taken to be constant (an exponential tail), as shown by the longest `TAIL_SHARE` of
the finished ones.

From a full pool, mean and 90th percentile are right to 6 %, except for two modes of which only the short end of the
upper one shows: up to 32 % too large.

A ratio to an estimated mean has another distribution than the true one. If a candidate counts in the mean as much as
the others, its ratio is pulled towards 1: of n candidates, the longest is at most n times their mean. If it does not
count at all, the errors of the mean come on top of its own spread: ratios scatter too widely, and their mean is too
large by the variance of the mean, as 1 / x is convex.

The two errors are equally large. So here a candidate counts half, beside the candidates from which the mean was
estimated without it: for lengths of the gamma family, and nearly for log-normal ones, the spread is then right to the
order of 1 / n. What is left of the level, half the mean's relative variance, is divided out.

If all candidates finish, the 99th percentile is then at most 12 % too small, in place of 21. From one group each, with
the 7 shortest of 12 and one sampled, it is 25 to 45 % too small, the 90th 5 to 14 %; from six groups it is right to
7 %, and the 90th up to 11 % too large. `tests/estimates/test_length_profile.py` has the table.

What is left where candidates are stopped is mostly due to the estimated means: their bias (see `lengths`), and that
a group with a low one shows larger ratios than the others before its candidates are stopped.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from darts_server.estimates.checks import check_number
from darts_server.estimates.lengths import LengthEstimate, Observation, PromptStats

Floats = NDArray[np.float64]

OCTAVES = (-6, 6)
BINS_PER_OCTAVE = 24
"""Ratios from 1/64 to 64 in bins 3 % wide; the outermost bins also hold what lies outside."""
EDGES: Floats = 2.0 ** np.linspace(*OCTAVES, (OCTAVES[1] - OCTAVES[0]) * BINS_PER_OCTAVE + 1)

MEMORY = 4096
"""Effective number of ratios in the pool, as older ones fade: some 300 groups, one or two steps of a usual size."""
NO_COUNT = 1e-9
"""Counts that have faded below this are set to zero."""
TAIL_SHARE = 0.05
"""Share of the finished ones that shows the tail. With more, lengths with two modes come out too wide; with fewer, the
tail is noise."""
TAIL_COUNT = 20
"""Fewest finished ones that show the tail, unless that is more than half of all."""
OWN_VOTE = 0.5
"""How much a candidate counts in the mean that its length is divided by."""


class LengthProfile:
    """The pooled distribution of length / mean length of the prompt.

    ``LengthProfile(**state)`` continues from a `state`: ``finished``, ``censored`` are faded counts in each bin,
    shortest first; all 0 if there are none.
    """

    def __init__(self, finished: Sequence[float] = (), censored: Sequence[float] = ()) -> None:
        self._counts: Floats = np.zeros((2, len(EDGES) - 1))
        for row, (name, counts) in enumerate((("finished", finished), ("censored", censored))):
            if counts and len(counts) != len(EDGES) - 1:
                raise ValueError(f"{name} must have {len(EDGES) - 1} counts, got {len(counts)}")
            for place, count in enumerate(counts):
                check_number(name, count, NO_COUNT if count else 0)
                self._counts[row, place] = count

    @property
    def state(self) -> dict[str, list[float]]:
        """JSON values."""
        finished, censored = self._counts.tolist()
        return {"finished": finished, "censored": censored}

    def observe(self, ratios: Sequence[tuple[float, bool]]) -> None:
        """Record candidates: length over mean length of the prompt, and whether it is censored.

        See `ratios_to_mean`, which leaves out those that were stopped before their first token.
        """
        self._counts *= (1 - 1 / MEMORY) ** len(ratios)
        self._counts[self._counts < NO_COUNT] = 0.0
        for ratio, censored in ratios:
            place = math.floor((math.log2(max(ratio, EDGES[0])) - OCTAVES[0]) * BINS_PER_OCTAVE)
            self._counts[int(censored), min(place, len(EDGES) - 2)] += 1.0

    def quantiles(self, n: int) -> Floats | None:
        """Return the ratios at the probabilities (i + 1/2) / n, ascending, shape (n,).

        Taken as equally likely values they represent the distribution. ``None`` before any candidate has finished.
        """
        probability = (np.arange(n, 0, -1, dtype=np.float64) - 0.5) / n  # of a longer one
        finished, censored = self._counts
        total = float(finished.sum())
        if total <= 0:
            return None
        at_risk = np.cumsum((finished + censored)[::-1])[::-1]
        # Within a bin, finished candidates come before stopped ones, which were stopped because those had finished.
        ending = np.divide(finished, at_risk, out=np.zeros_like(finished), where=finished > 0)
        survival = np.concatenate([[1.0], np.cumprod(1.0 - ending)])
        # The exponential tail begins with the last bin with enough finished ones from there on.
        enough = max(TAIL_SHARE * total, min(TAIL_COUNT, total / 2))
        tail = int(np.flatnonzero(np.cumsum(finished[::-1])[::-1] >= enough)[-1])
        ratios = np.interp(-probability, -survival[: tail + 1], EDGES[: tail + 1])
        # Tokens at risk: a whole bin for each candidate that passes it, half a bin for each that ends or stops in it.
        exposure = float(((at_risk - (finished + censored) / 2) * np.diff(EDGES))[tail:].sum())
        wait = exposure / float(finished[tail:].sum())
        beyond = np.maximum(np.log(survival[tail] / probability), 0.0)
        return np.asarray(ratios + wait * beyond, dtype=np.float64)


def ratios_to_mean(
    observations: Sequence[Observation], estimate: LengthEstimate, earlier: PromptStats | None
) -> list[tuple[float, bool]]:
    """Return the length of each candidate of a group over its prompt's mean, and whether it is censored. See above.

    ``estimate``: `estimate_lengths` of the group. ``earlier``: statistics of the prompt before this group; without
    them, the mean is that of the group's other candidates, and a single candidate, which has none, is left out.
    """
    finished = 0
    for o in observations:
        finished += not o.censored
    finished = max(finished, 1)  # a stopped candidate adds little to what is known about the mean
    std, mean = (estimate.std, estimate.mean) if earlier is None else (earlier.std_ema, earlier.mean_ema)
    variation = ((std or 0.0) / mean) ** 2
    ratios = []
    for o in observations:
        if earlier is None:
            others: float = finished - (not o.censored)
            total = max(finished * mean - o.tokens, 0.0)
        else:
            others = earlier.candidates_of_mean * finished / len(observations)
            total = others * mean
        if others > 0 and o.tokens > 0:
            own_mean = (total + OWN_VOTE * o.tokens) / (others + OWN_VOTE)
            ratios.append((o.tokens / own_mean / (1 + variation / (2 * others)), o.censored))
    return ratios
