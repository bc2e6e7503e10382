"""Estimate mean and spread of a prompt's lengths, although early stopping hides the long ones.

Early stopping hides lengths: the K shortest candidates finish, and the others are stopped about where the K-th shortest
ended. A std of the finished ones alone is therefore far too small, and smallest for the prompts that were given most
candidates. But a stopped candidate still says that it would have been longer: it is *right-censored*.

The estimator completes the sample. Each censored length is replaced by the mean, and its square by the mean square, of
the lengths that it may have reached; then mean and sample std are taken as usual. These lengths have two sources:

* the other candidates of the prompt that are known to be longer, one vote each: the product-limit (Kaplan-Meier) rule,
  which assumes no shape. A rule that lets a sampled candidate run to its end provides such candidates;
* an assumed shape, with `SHAPE_VOTES`, which is fitted to the sample: see `fitted_shape`. It decides alone if no
  candidate is known to be longer.

Nothing is assumed where nothing was censored: then these are the plain mean and the sample std (n - 1).

Bias of the std with M = 8, against the std of the same sample if nothing had been stopped; in brackets that of the
finished ones alone. "Drawn": one candidate outside the 7 shortest runs to its end. Modes and log-normals as in
`tests/policy/lengths/test_estimate.py`, which checks these figures:

========================  =====================  =====================  ======================  ======================
lengths                   8 shortest of 12       8 shortest of 16       7 and a drawn one, 12   7 and a drawn one, 16
========================  =====================  =====================  ======================  ======================
log-normal, sigma 0.3     -1 % (-45 %)           -1 % (-57 %)           -3 % (-27 %)            -3 % (-34 %)
log-normal, sigma 0.5     -11 % (-55 %)          -15 % (-67 %)          -8 % (-33 %)            -12 % (-41 %)
log-normal, sigma 0.8     -24 % (-68 %)          -33 % (-79 %)          -17 % (-42 %)           -24 % (-52 %)
geometric                 -2 % (-64 %)           -8 % (-77 %)           -6 % (-37 %)            -10 % (-48 %)
two modes, 50 : 50        +23 % (-50 %)          -8 % (-74 %)           +5 % (-29 %)            -6 % (-41 %)
two modes, 30 : 70        +51 % (-33 %)          +77 % (-48 %)          +19 % (-19 %)           +30 % (-27 %)
two modes, 70 : 30        -32 % (-69 %)          -55 % (-82 %)          -17 % (-40 %)           -26 % (-50 %)
========================  =====================  =====================  ======================  ======================

So it is good for one mode and low for very heavy tails. With two modes it is too wide if only the short end of the
upper one shows, and low if that mode lies beyond the K-th shortest, where it leaves no trace that any estimator could
find. Only a sampled candidate can find it; it makes all of this milder.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from darts_server.policy.lengths.fitted_shape import FittedShape, Moments

SHAPE_VOTES = 0.5
"""Votes of the fitted shape, against one for each longer candidate: enough to temper a single sampled one."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Length of one candidate.

    ``censored``: it was stopped or truncated after ``tokens`` tokens, and would have been longer.
    """

    tokens: int
    censored: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"tokens must be at least 0, got {self.tokens}")


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """Mean and sample std (n - 1) of one prompt's lengths, in tokens. ``std`` is ``None`` for a single candidate."""

    mean: float
    std: float | None


def estimate_lengths(observations: Sequence[Observation]) -> LengthEstimate:
    """Estimate mean and std of a prompt's lengths from finished and censored candidates.

    If none finished, the longest is taken to have finished where it was stopped. Candidates without a token are
    ignored.

    Raises:
        ValueError: no candidate generated anything.
    """
    finished = [o.tokens for o in observations if not o.censored]
    censored = sorted(o.tokens for o in observations if o.censored and o.tokens > 0)
    if not finished:
        if not censored:
            raise ValueError("observations must hold at least one candidate that generated a token")
        finished = [censored.pop()]
    return _summary(_completed(finished, censored) if censored else [(1.0, x, x * x) for x in finished])


def complete_sample(observations: Sequence[Observation]) -> list[tuple[float, float]]:
    """Return the sample as (weight, length) pairs, with each censored candidate at the length it is expected to reach.

    The weights add up to the number of candidates that generated anything. For distributions over many prompts; for the
    mean and std of one prompt use `estimate_lengths`, which also counts how much the expected lengths vary.
    """
    finished = [o.tokens for o in observations if not o.censored]
    censored = sorted(o.tokens for o in observations if o.censored and o.tokens > 0)
    if not censored or not finished:
        return [(1.0, float(o.tokens)) for o in observations if o.tokens > 0]
    return [(weight, first) for weight, first, _ in _completed(finished, censored)]


Weighted = tuple[float, float, float]
"""Weight of one candidate in the sample, E[x] and E[x²] of its length."""


def _summary(lengths: Sequence[Weighted]) -> LengthEstimate:
    """Return mean and std of a weighted sample.

    Equal weights divide by n - 1; others by n - sum of squared weights / n, its generalisation.
    """
    n = len(lengths)
    mean = math.fsum(weight * first for weight, first, _ in lengths) / n
    if n == 1:
        return LengthEstimate(mean, None)
    # E[x²] - mean² would lose its digits where the spread is small against the mean; (first - mean)² keeps them.
    squares = math.fsum(weight * ((first - mean) ** 2 + (second - first * first)) for weight, first, second in lengths)
    return LengthEstimate(
        mean, math.sqrt(max(squares, 0.0) / (n - math.fsum(weight**2 for weight, _, _ in lengths) / n))
    )


def _completed(finished: Sequence[int], censored: Sequence[int]) -> list[Weighted]:
    """Return the sample with the censored candidates (shortest first) completed.

    Each passes its weight on in equal votes to the candidates that are known to be longer, and keeps the shape's share
    for itself. A longer one that is censored too passes on the weight it received.
    """
    shape = FittedShape.fit(finished, censored)
    tokens = sorted((*censored, *finished))
    received = [1.0]  # weight of a candidate that gets the votes of the first 0, 1, ... censored ones
    weights = []
    for c in censored:
        # One token longer is no evidence: a candidate is stopped one token short of the finished one that beat it.
        longer = len(tokens) - bisect_right(tokens, c + 1)
        weight = received[bisect_left(censored, c - 1)]
        vote = weight / (longer + SHAPE_VOTES)
        received.append(received[-1] + vote)
        weights.append(weight - vote * longer)
    weights += [received[bisect_left(censored, x - 1)] for x in finished]
    fitted = {c: shape.moments_beyond(c) for c in set(censored)}
    moments: list[Moments] = [*(fitted[c] for c in censored), *((x, x * x) for x in finished)]
    return [(weight, *both) for weight, both in zip(weights, moments, strict=True)]
