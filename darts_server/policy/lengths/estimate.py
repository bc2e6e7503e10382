"""What is known about the lengths of a prompt's trajectories, and of the whole data set's.

Early stopping hides lengths: the K shortest candidates finish and the others are stopped about where the K-th shortest
ended. A spread computed from the finished ones alone is therefore far too small, and smallest for the prompts that were
given most candidates. A stopped candidate still says that it would have been longer (it is *right-censored*), and
`estimate` uses that.

The estimator completes the sample: each censored length is replaced by the mean, and its square by the mean square, of
what it may have become; then mean and sample std are taken as usual. What it may have become has two sources:

* the other candidates of the prompt that are known to be longer, one vote each: the product-limit (Kaplan-Meier) rule,
  which trusts no shape. A selection rule that lets a drawn candidate run to its end feeds this;
* a fitted shape, with `SHAPE_VOTES`: the fourth root of the length is normal. Its parameters are the maximum likelihood
  of the censored sample (Tobit; concave in Olsen's parameters, so Newton's method needs a few steps) with a weak prior
  on the spread. Beyond the known lengths its tail is taken to be no heavier than that of a constant chance to end, the
  chance seen so far: one ending in as many tokens as all candidates have per ending. If nobody is known to be longer,
  the shape decides alone.

Why this shape: 8 of 16 lengths do not tell a shape, so one must be assumed, and it must do for all prompts. With the
logarithm, log-normal lengths come out within 15 %, but lengths with two modes or a lighter tail up to three times too
wide (without the bound on the tail: ten times and more). With the cube root, which is nearly the gamma and Weibull
families, log-normal lengths come out a few per cent shorter still. The fourth root is the compromise. Nothing is
assumed where nothing was censored: then these are the plain mean and the sample std (n - 1).

Bias of the std with M = 8, against the std of the same sample had nobody been stopped; in brackets that of the finished
ones alone. Modes and log-normals as in `tests/policy/lengths/test_estimate.py`, which checks these figures:

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

So it is good for one mode, low for very heavy tails, and for two modes it depends: too wide if only the short end of
the upper one shows, and low if that lies beyond the K-th shortest, where it leaves no trace that any estimator could
find. Only a drawn candidate can; it makes all of this milder.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from darts_server.policy.lengths.fitted_shape import FittedShape, Moments

SHAPE_VOTES = 0.5
"""Votes of the fitted shape against one for each longer candidate: enough to temper a single drawn one."""


@dataclass(frozen=True, slots=True)
class Observation:
    """How long one candidate became.

    ``censored``: it was stopped, or truncated by a length limit, after ``tokens`` tokens and would have gone on.
    Otherwise it ended by itself.
    """

    tokens: int
    censored: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"tokens must be at least 0, got {self.tokens}")


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """Mean and sample std (n - 1) of one prompt's lengths, in tokens; the std of a single candidate is unknown."""

    mean: float
    std: float | None


def estimate_lengths(observations: Sequence[Observation]) -> LengthEstimate:
    """Mean and std of a prompt's lengths, with those that were stopped early counted as the longer ones they are.

    If none ended by itself, the longest is taken to have ended where it was stopped. Candidates that were stopped
    before their first token say nothing and are left out.

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
    """The sample as (weight, length) pairs, with each candidate that was stopped at the length it was likely to reach.

    The weights add up to the number of candidates that generated anything. For distributions over many prompts; mean
    and std of one prompt are `estimate`'s.
    """
    finished = [o.tokens for o in observations if not o.censored]
    censored = sorted(o.tokens for o in observations if o.censored and o.tokens > 0)
    if not censored or not finished:
        return [(1.0, float(o.tokens)) for o in observations if o.tokens > 0]
    return [(weight, first) for weight, first, _ in _completed(finished, censored)]


Weighted = tuple[float, float, float]
"""The same, after the weight that it has in the sample."""


def _summary(lengths: Sequence[Weighted]) -> LengthEstimate:
    """Mean and std of a weighted sample: with equal weights it divides by n - 1, and else by what stands for that."""
    n = len(lengths)
    mean = math.fsum(weight * first for weight, first, _ in lengths) / n
    if n == 1:
        return LengthEstimate(mean, None)
    # (first - mean)² keeps its digits where the spread is small against the mean.
    squares = math.fsum(weight * ((first - mean) ** 2 + (second - first * first)) for weight, first, second in lengths)
    return LengthEstimate(
        mean, math.sqrt(max(squares, 0.0) / (n - math.fsum(weight**2 for weight, _, _ in lengths) / n))
    )


def _completed(finished: Sequence[int], censored: Sequence[int]) -> list[Weighted]:
    """The sample with the censored ones (shortest first) completed.

    Each hands its weight on in equal votes to those that are known to be longer, and keeps the shape's share for
    itself. A longer one that was censored too hands on what it was given.
    """
    shape = FittedShape.fit(finished, censored)
    tokens = [*censored, *finished]
    weights = [1.0] * len(tokens)
    for place, c in enumerate(censored):
        # One token longer is no evidence: a candidate is stopped one token short of the finished one that beat it.
        longer = [i for i, x in enumerate(tokens) if x > c + 1]
        vote = weights[place] / (len(longer) + SHAPE_VOTES)
        for i in longer:
            weights[i] += vote
        weights[place] -= vote * len(longer)
    fitted = {c: shape.beyond(c) for c in set(censored)}
    moments: list[Moments] = [*(fitted[c] for c in censored), *((x, x * x) for x in finished)]
    return [(weight, *both) for weight, both in zip(weights, moments, strict=True)]
