"""Ratios of lengths to the mean length of their prompt, although that mean is only estimated.

A ratio to an estimated mean has another distribution than the true one. If a candidate counts in the mean as much as
the others, its ratio is pulled towards 1: of n candidates, the longest is at most n times their mean. If it does not
count at all, the errors of the mean come on top of its own spread: ratios scatter too widely, and their mean is too
large by the variance of the mean, as 1 / x is convex.

The two errors are equally large. So here a candidate counts half, beside the candidates from which the mean was
estimated without it: for lengths of the gamma family, and nearly for log-normal ones, the spread is then right to the
order of 1 / n. What is left of the level, half the mean's relative variance, is divided out.

Error of the mean and of the 90th and 99th percentile of the profile in per cent, from one or six groups of each prompt;
in brackets that of ratios to a mean in which each candidate counts fully. "All": 8 candidates, which all finish.
"Drawn": 12, of which the 7 shortest finish and one sampled from the others, as under `uniform`. Checked by
`tests/policy/lengths/test_ratios.py`:

==============  =======================  =======================  ===========================  ========================
ratios          all, 1 group             all, 6 groups            drawn, 1 group               drawn, 6 groups
==============  =======================  =======================  ===========================  ========================
log-normal 0.5  0, 0, -3 (0, -3, -10)    0, -1, 0 (0, -2, -3)     +1, -5, -25 (-3, -11, -30)   +3, +4, -2 (0, -2, -12)
log-normal 0.8  0, +2, -12 (0, -2, -21)  0, 0, -1 (0, -1, -6)     -2, -9, -45 (-5, -14, -48)   +7, +11, -7 (0, -1, -22)
exponential     0, +2, -9 (0, -1, -18)   +1, +1, -3 (+1, +1, -7)  -4, -14, -39 (-6, -18, -42)  +7, +7, +3 (0, -4, -14)
==============  =======================  =======================  ===========================  ========================

What is left where candidates are stopped is mostly due to the estimated means: their bias (see `estimate`), and that
a group with a low one shows larger ratios than the others before its candidates are stopped.
"""

from collections.abc import Sequence

from darts_server.policy.lengths.estimate import Observation, estimate_lengths
from darts_server.policy.lengths.stats import PromptStats

OWN_VOTE = 0.5
"""How much a candidate counts in the mean that its length is divided by."""


def ratios_to_mean(observations: Sequence[Observation], earlier: PromptStats | None) -> list[tuple[float, bool]]:
    """Return the length of each candidate of a group over its prompt's mean, and whether it is censored.

    ``earlier``: statistics of the prompt before this group; without them, the mean is that of the group's other
    candidates, and a single candidate, which has none, is left out.

    Raises:
        ValueError: no candidate generated anything.
    """
    latest = estimate_lengths(observations)
    # A stopped candidate adds little to what is known about the mean.
    finished = max(sum(not o.censored for o in observations), 1)
    std, mean = (latest.std, latest.mean) if earlier is None else (earlier.std_ema, earlier.mean_ema)
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
