"""Estimate mean and spread of a prompt's lengths, although early stopping hides the long ones.

Early stopping hides lengths: the K shortest candidates finish, and the others are stopped about where the K-th shortest
ended. A std of the finished ones alone is therefore far too small, and smallest for the prompts that were given most
candidates. But a stopped candidate still says that it would have been longer: it is *right-censored*.

The estimator completes the sample. Each censored length is replaced by the mean, and its square by the mean square, of
the lengths that it may have reached; then mean and sample std are taken as usual. These lengths have two sources:

* the other candidates of the prompt that are known to be longer, one vote each: the product-limit (Kaplan-Meier) rule,
  which assumes no shape. A rule that lets a sampled candidate run to its end provides such candidates;
* an assumed shape, with `SHAPE_VOTES`, which is fitted to the sample: see `FittedShape`. It decides alone if no
  candidate is known to be longer.

Nothing is assumed where nothing was censored: then these are the plain mean and the sample std (n - 1).

With 8 of 12 or 16 returned, the std of geometric lengths is up to 10 % too small, that of log-normal ones up to 15 %
with sigma .5 and up to 33 % with .8; the std of the finished ones alone is 19 to 82 % too small. With two modes it is
between 55 % too small and 77 % too large. `tests/estimates/test_lengths.py` has the table.

So it is good for one mode and low for very heavy tails. With two modes it is too wide if only the short end of the
upper one shows, and low if that mode lies beyond the K-th shortest, where it leaves no trace that any estimator could
find. Only a sampled candidate can find it; it makes all of this milder.
"""

import math
import re
import reprlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul

from darts_server.estimates.checks import LARGEST, MIN_MEAN, check_count, check_length, check_number

SHAPE_VOTES = 0.5
"""Votes of the fitted shape, against one for each longer candidate: enough to temper a single sampled one."""
SHAPE_ROOT = 4
"""This root of the length is normal."""
PRIOR_VOTES = 0.5
PRIOR_VARIATION = 0.5
"""Prior on the spread: half an observation that is off by half the mean. Matters if all known lengths are equal."""
NEWTON_STEPS = 50
"""A bound that is never reached: four steps are taken on average, and 11 at most in 80,000 samples of all kinds."""
NEWTON_TOLERANCE = 1e-6
"""Relative, of the shape's parameters."""
ERFC_RANGE = 30.0
"""Beyond it erfc underflows, and the asymptotic form is exact to a part in a million."""

Moments = tuple[float, float]
"""E[x] and E[x²] of a length in tokens."""
EMA_ALPHA = 0.3
"""Weight of the newest group in a prompt's averages: the value of the paper's public code."""
WINDOW_STEPS = 10
"""Steps over which the data set's spread is averaged: the value of the paper's public code."""
KEPT_LENGTHS = 256
"""Candidates of a prompt's last group whose lengths are kept: more say little, and a document holds 64 KiB."""
KEPT = re.compile(rf"[1-9][0-9]{{0,14}}\+?(?: [1-9][0-9]{{0,14}}\+?){{0,{KEPT_LENGTHS - 1}}}")
"""Form of `PromptStats.lengths`."""


# --- one group --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Observation:
    """Length of one candidate.

    ``censored``: it was stopped or truncated after ``tokens`` tokens, and would have been longer.
    """

    tokens: int
    censored: bool = False


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
    sample = _completed(observations)
    n, (weights, firsts, _) = len(sample), zip(*sample, strict=True)
    mean = math.fsum(map(mul, weights, firsts)) / n
    if n == 1:
        return LengthEstimate(mean, None)
    squares, squared_weights = [], []
    for weight, first, second in sample:
        # E[x²] - mean² would lose its digits where the spread is small against the mean; (first - mean)² keeps them.
        squares.append(weight * ((first - mean) ** 2 + (second - first * first)))
        squared_weights.append(weight**2)
    # Equal weights divide by n - 1; others by n - sum of squared weights / n, its generalisation.
    freedom = n - math.fsum(squared_weights) / n
    return LengthEstimate(mean, math.sqrt(max(math.fsum(squares), 0.0) / freedom))


def complete_sample(observations: Sequence[Observation]) -> list[tuple[float, float]]:
    """Return the sample as (weight, length) pairs, with each censored candidate at the length it is expected to reach.

    The weights add up to the number of candidates that generated anything. For distributions over many prompts; for the
    mean and std of one prompt use `estimate_lengths`, which also counts how much the expected lengths vary.
    """
    # Without censored ones there is nothing to complete, and without finished ones nothing to complete them by.
    if len({o.censored for o in observations if not o.censored or o.tokens > 0}) < 2:
        return [(1.0, float(o.tokens)) for o in observations if o.tokens > 0]
    return [(weight, first) for weight, first, _ in _completed(observations)]


Weighted = tuple[float, float, float]
"""Weight of one candidate in the sample, E[x] and E[x²] of its length."""


def _completed(observations: Sequence[Observation]) -> list[Weighted]:
    """Return the sample with the censored candidates completed. If none finished, see `estimate_lengths`.

    Each passes its weight on in equal votes to the candidates that are known to be longer, and keeps the shape's share
    for itself. A longer one that is censored too passes on the weight it received.
    """
    finished: list[int] = []
    censored: list[int] = []
    for o in observations:
        if not o.censored:
            finished.append(o.tokens)
        elif o.tokens > 0:
            censored.append(o.tokens)
    censored.sort()
    if not finished:
        if not censored:
            raise ValueError("observations must hold at least one candidate that generated a token")
        finished = [censored.pop()]
    if censored:
        shape = FittedShape.fit(finished, censored)
    fitted: dict[int, Moments] = {}
    tokens = sorted((*censored, *finished))
    received = [1.0]  # weight of a candidate that gets the votes of the first 0, 1, ... censored ones
    sample: list[Weighted] = []
    for c in censored:
        if c not in fitted:
            fitted[c] = shape.moments_beyond(c)
        # One token longer is no evidence: a candidate is stopped one token short of the finished one that beat it.
        longer = len(tokens) - bisect_right(tokens, c + 1)
        weight = received[bisect_left(censored, c - 1)]
        vote = weight / (longer + SHAPE_VOTES)
        received.append(received[-1] + vote)
        sample.append((weight - vote * longer, *fitted[c]))
    for x in finished:
        sample.append((received[bisect_left(censored, x - 1)], x, x * x))
    return sample


# --- the assumed shape ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FittedShape:
    """The assumed shape of a prompt's lengths: their fourth root is normal, with ``mean`` and ``std``.

    The parameters are the maximum likelihood of the censored sample (Tobit; concave in Olsen's parameters, so Newton's
    method needs a few steps) with a weak prior on the spread. Beyond the known lengths the tail is taken to be no
    heavier than that of a constant chance to end per token, the one seen so far: one ending in as many tokens as all
    candidates have per ending.

    Why this shape: 8 of 16 lengths do not reveal a shape, so one must be assumed that does for all prompts. With the
    logarithm in place of the fourth root, log-normal lengths come out within 15 %, but lengths with two modes or a
    lighter tail up to three times too wide (without the bound on the tail: ten times and more). With the cube root,
    which is nearly the gamma and Weibull families, log-normal lengths come out a few per cent shorter still. The fourth
    root is the compromise.

    ``wait``: mean number of tokens to an ending so far.
    """

    mean: float
    std: float
    wait: float

    @staticmethod
    def fit(finished: Sequence[int], censored: Sequence[int]) -> "FittedShape":
        """Fit the shape to finished lengths, at least one, and to censored ones.

        In Olsen's parameters, ``location`` = mean / std and ``precision`` = 1 / std, the penalised log-likelihood of a
        right-censored normal sample is concave. The prior counts as `PRIOR_VOTES` deviations. The mean takes one degree
        of freedom: without censoring and prior the fitted variance is the sample's (n - 1).
        """
        roots = [float(x ** (1 / SHAPE_ROOT)) for x in finished]
        rooted = [(c + 0.5) ** (1 / SHAPE_ROOT) for c in censored]  # longer than c means at least c + 1, rounded
        scale = (math.fsum(roots) + math.fsum(rooted)) / (len(finished) + len(censored))
        known, limits = [y / scale for y in roots], Counter([c / scale for c in rooted])  # all average one
        count, total, freedom = len(known), math.fsum(known), len(known) - 1 + PRIOR_VOTES
        squares = math.fsum([y * y for y in known]) + PRIOR_VOTES * (PRIOR_VARIATION / SHAPE_ROOT) ** 2
        precision = math.sqrt(freedom / (squares - total**2 / count))
        location, steps, moved = precision * total / count, NEWTON_STEPS, math.inf
        while steps and moved > NEWTON_TOLERANCE * (abs(location) + precision):
            # Newton's step: minus the inverse of the second derivatives, times the first.
            to_location = precision * total - count * location
            to_precision = freedom / precision - precision * squares + location * total
            twice_location, mixed, twice_precision = -float(count), total, -freedom / precision**2 - squares
            for c, n in limits.items():
                z = precision * c - location
                hazard = _hazard(z)
                bend = n * hazard * (hazard - z)
                to_location += n * hazard
                to_precision -= n * hazard * c
                twice_location -= bend
                twice_precision -= bend * c * c
                mixed += bend * c
            determinant = twice_location * twice_precision - mixed**2
            by_location = (mixed * to_precision - twice_precision * to_location) / determinant
            by_precision = (mixed * to_location - twice_location * to_precision) / determinant
            # Few lengths far below the stopped ones make it overshoot. It does not if it leaves half of the precision.
            share = 1.0 if by_precision >= -precision / 2 else -precision / 2 / by_precision
            location, precision = location + share * by_location, precision + share * by_precision
            steps, moved = steps - 1, share * (abs(by_location) + abs(by_precision))
        wait = (sum(finished) + sum(censored)) / len(finished)
        return FittedShape(scale * location / precision, scale / precision, wait)

    def moments_beyond(self, tokens: int) -> Moments:
        """Return E[x | x > tokens] and E[x² | x > tokens].

        From the moments of a truncated standard normal Z, which follow the recursion
        E[Z^j | Z > z] = (j - 1) E[Z^(j-2) | Z > z] + z^(j-1) hazard(z). Both are bounded by those of a constant chance
        to end from here on, one in ``wait`` tokens.
        """
        z = ((tokens + 0.5) ** (1 / SHAPE_ROOT) - self.mean) / self.std
        powers = [1.0, _hazard(z)]  # E[Z^j | Z > z]
        for j in range(2, 2 * SHAPE_ROOT + 1):
            powers.append((j - 1) * powers[j - 2] + z ** (j - 1) * powers[1])
        bounds = tokens + self.wait, tokens**2 + 2 * tokens * self.wait + 2 * self.wait**2
        moments = []
        for order, bound in zip((SHAPE_ROOT, 2 * SHAPE_ROOT), bounds, strict=True):
            # E[(mean + std Z)^order]
            terms = [math.comb(order, j) * self.mean ** (order - j) * self.std**j * powers[j] for j in range(order + 1)]
            moments.append(min(math.fsum(terms), bound))
        return moments[0], moments[1]


def _hazard(z: float) -> float:
    """Return density over survival of the standard normal."""
    if z > ERFC_RANGE:
        return z + 1 / z
    return math.sqrt(2 / math.pi) * math.exp(-z * z / 2) / math.erfc(z / math.sqrt(2))


# --- statistics of a prompt, and of the data set ----------------------------


@dataclass(frozen=True, slots=True)
class PromptStats:
    """One prompt's length statistics. Plain fields: ``PromptStats(**json)`` restores it.

    ``std_ema``, ``mean_ema``: exponential moving averages over the prompt's groups, in tokens; ``std_ema`` is ``None``
    until a group had two candidates. Both are estimates of what the lengths would be if no candidate was stopped or
    truncated. ``groups``, ``candidates``: how many they come from.

    The other fields describe the last group as it was seen. Documents of earlier versions have only the weight version.
    ``max_tokens``: limit of a candidate's tokens, ``None`` if it is not known. ``prompt_tokens``: ``None`` if that is
    not known. ``lengths``: tokens of its candidates, such as ``"40 96+"``; a plus marks a candidate that was stopped or
    truncated there.
    """

    std_ema: float | None
    mean_ema: float
    groups: int
    candidates: int
    weight_version: int | None
    max_tokens: int | None = None
    prompt_tokens: int | None = None
    lengths: str = ""

    def __post_init__(self) -> None:
        if self.std_ema is not None:
            check_number("std_ema", self.std_ema)
        check_number("mean_ema", self.mean_ema, MIN_MEAN)
        check_count("groups", self.groups)
        check_count("candidates", self.candidates)
        if self.weight_version is not None:
            check_count("weight_version", self.weight_version)
        for name in ("max_tokens", "prompt_tokens"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        if self.lengths == "":
            return
        if not isinstance(self.lengths, str) or not KEPT.fullmatch(self.lengths):
            raise ValueError(f"lengths must be at most {KEPT_LENGTHS} token counts, got {reprlib.repr(self.lengths)}")
        longest = max(map(int, self.lengths.replace("+", "").split()))
        if self.max_tokens is not None and longest > self.max_tokens:
            raise ValueError(f"lengths must be at most max_tokens, {self.max_tokens}, got {longest}")

    @property
    def observations(self) -> list[Observation]:
        """Lengths of the last group's candidates as they were seen; empty if they are not known."""
        return [Observation(int(each.rstrip("+")), censored=each.endswith("+")) for each in self.lengths.split()]

    def is_truncated(self, observation: Observation) -> bool:
        """Whether a candidate of the last group ended at the limit of its tokens."""
        return observation.censored and observation.tokens == self.max_tokens

    @property
    def candidates_of_mean(self) -> float:
        """The number of candidates whose plain mean varies as much as ``mean_ema``, in which the newest count most."""
        groups, older = max(self.groups, 1), (1 - EMA_ALPHA) ** 2
        first = older ** (groups - 1)
        squares = first + EMA_ALPHA**2 * (1 - first) / (1 - older)  # of the groups' weights
        return self.candidates / groups / squares


def update_stats(
    stats: PromptStats | None,
    observations: Sequence[Observation],
    estimate: LengthEstimate,
    weight_version: int | None,
    max_tokens: int | None = None,
    prompt_tokens: int | None = None,
) -> PromptStats:
    """Return the statistics after one more group. The first group counts fully, later ones with weight `EMA_ALPHA`.

    ``estimate``: `estimate_lengths` of the ``observations``. ``max_tokens``: limit of a candidate's tokens, ``None`` if
    it is not known.
    """
    mean = estimate.mean
    std = estimate.std
    groups = 1
    candidates = len(observations)
    if stats is not None:
        mean = EMA_ALPHA * mean + (1 - EMA_ALPHA) * stats.mean_ema
        if std is None:
            std = stats.std_ema
        elif stats.std_ema is not None:
            std = EMA_ALPHA * std + (1 - EMA_ALPHA) * stats.std_ema
        groups = min(stats.groups + 1, LARGEST)
        candidates = min(stats.candidates + candidates, LARGEST)
        prompt_tokens = stats.prompt_tokens if prompt_tokens is None else prompt_tokens
    seen = [o for o in observations if o.tokens > 0][:KEPT_LENGTHS]
    return PromptStats(
        std_ema=std,
        mean_ema=mean,
        groups=groups,
        candidates=candidates,
        weight_version=weight_version,
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
        lengths=" ".join(f"{o.tokens}{'+' * o.censored}" for o in seen),
    )


@dataclass(frozen=True, slots=True)
class DatasetStats:
    """Length statistics of the data set. Plain fields: ``DatasetStats(**json)`` restores it.

    ``recent_stds``: mean length std within a prompt, for each of the last `WINDOW_STEPS` steps that had any. ``mean``:
    mean length of the last step (l-bar). Both in tokens. ``steps``: number of steps so far.
    """

    recent_stds: tuple[float, ...] = ()
    mean: float | None = None
    steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "recent_stds", tuple(self.recent_stds))  # JSON has lists only
        check_length("recent_stds", self.recent_stds, WINDOW_STEPS)
        for std in self.recent_stds:
            check_number("recent_stds", std)
        if self.mean is not None:
            check_number("mean", self.mean, MIN_MEAN)
        check_count("steps", self.steps)

    @property
    def std(self) -> float | None:
        """Mean of ``recent_stds`` (sigma-bar); ``None`` before there is any."""
        return math.fsum(self.recent_stds) / len(self.recent_stds) if self.recent_stds else None

    def with_step(self, prompts: Iterable[LengthEstimate]) -> "DatasetStats":
        """Return the statistics after one more step with these ``prompts``. A step without any changes nothing.

        Each prompt counts once. Weighting by candidates would let the allocation change the mean that steers it.
        """
        estimates = list(prompts)
        if not estimates:
            return self
        stds = [e.std for e in estimates if e.std is not None]
        recent = (*self.recent_stds, math.fsum(stds) / len(stds)) if stds else self.recent_stds
        return DatasetStats(
            recent_stds=recent[-WINDOW_STEPS:],
            mean=math.fsum(e.mean for e in estimates) / len(estimates),
            steps=min(self.steps + 1, LARGEST),
        )
