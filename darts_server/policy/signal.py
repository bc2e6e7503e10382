"""How many candidates each prompt gets so that as many groups as possible have signal.

A group has signal if its rewards are not all equal: under GRPO, other groups teach nothing. With pass rate p, a group
of n has signal with probability 1 - p^n - (1 - p)^n. The Beta distribution of the pass rate is of earlier steps
(`estimates.pass_rates`). So the number of candidates does not depend on the group's own rewards, and the gradient of
each prompt stays unbiased.

Prompts that are almost surely without signal may run with a probability X, and then count 1 / X. So the sum over
prompts stays unbiased too.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from darts_server.estimates.isotonic import Floats
from darts_server.estimates.pass_rates import Beta
from darts_server.policy.allocation import allocate_by_gain

UNINFORMATIVE = 0.2
"""Probability of signal below which a prompt may be skipped. Posteriors are careful, since pass rates drift: in
`benchmarks.signal`, 4 to 11 % of such groups really have signal. A limit of .05 is never reached there."""


def signal_chances(posteriors: Sequence[Beta], candidates: int) -> list[float]:
    """Compute the probability of signal of a group of so many candidates, for each prompt."""
    # The closed form, 1 - B(a + n, b) / B(a, b) - B(a, b + n) / B(a, b), would lose all digits for large parameters.
    chances = np.zeros(len(posteriors))
    for gain in _signal_gains(posteriors, candidates):
        chances += gain
    return [float(chance) for chance in chances]


def allocate_by_signal(
    posteriors: Sequence[Beta],
    budget: int,
    low: int,
    high: int,
) -> list[int]:
    """Compute the candidates of each prompt that maximise the expected number of groups with signal.

    Between ``low`` and ``high`` candidates each, ``budget`` in all, as far as the limits allow. The result is exact,
    because the gains of a prompt fall: candidate n + 1 adds E[p^n (1 - p)] + E[(1 - p)^n p].
    """
    # The first gain is that of candidate 2. Keep the gains of the candidates from `low` + 1 to `high`.
    columns = list(islice(_signal_gains(posteriors, high), low - 1, None))
    gains = np.zeros((len(posteriors), 0))
    if columns:
        gains = np.stack(columns, axis=1)
    no_preference = np.zeros(len(posteriors))
    return allocate_by_gain(gains, budget, low, no_preference)


def _signal_gains(posteriors: Sequence[Beta], candidates: int) -> Iterator[Floats]:
    """Yield, for n from 1 to before ``candidates``, the probability that candidate n + 1 is the first that differs."""
    parameters = np.asarray(posteriors, dtype=np.float64).reshape(-1, 2)
    right = parameters[:, 0]
    wrong = parameters[:, 1]
    total = right + wrong
    # E[p^n] and E[(1 - p)^n], the probabilities that the first n answers are all right or all wrong. After n right
    # answers, the pass rate is Beta(right + n, wrong).
    all_right = right / total
    all_wrong = wrong / total
    for n in range(1, candidates):
        total = right + wrong + n
        first_differs = (all_right * wrong + all_wrong * right) / total
        yield first_differs
        all_right *= (right + n) / total
        all_wrong *= (wrong + n) / total
