"""Estimate mean and spread of a prompt's lengths, although early stopping hides the long lengths.

The K shortest candidates finish, and the others are stopped when they are about as long as the K-th shortest. The std
of finished candidates alone is 19 to 82 % too small. But a stopped candidate would have been longer than it is: it is
*right-censored*.

The estimator completes the sample. It replaces each censored length by the mean, and its square by the mean square, of
the lengths that the candidate may have reached. The lengths come from two sources:

* longer candidates of the prompt, with one vote each: the product-limit (Kaplan-Meier) rule, which assumes no shape;
* an assumed shape with `SHAPE_VOTES`, fitted to the sample (`FittedShape`).

Without censored lengths the result is the plain mean and the sample std (n - 1). With 8 of 12 or 16 returned, the std
is up to 33 % too small. With two modes it is between 55 % too small and 77 % too large, because a long mode beyond the
K-th shortest cannot be seen. A sampled candidate makes all errors smaller. `tests/estimates/test_lengths.py` has the
table.
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
"""Votes of the fitted shape: enough to temper a single sampled candidate."""
SHAPE_ROOT = 4
"""This root of a length is assumed to be normal."""
PRIOR_VOTES = 0.5
PRIOR_VARIATION = 0.5
"""Prior on the spread: half an observation that is off by half the mean."""
NEWTON_STEPS = 50
"""Never reached: it took four steps on average, and at most 11 in 80,000 samples."""
NEWTON_TOLERANCE = 1e-6
ERFC_RANGE = 30.0
"""Beyond it erfc underflows, and the asymptotic form is exact to a part in a million."""

Moments = tuple[float, float]
"""E[x] and E[x²] of a length in tokens."""
EMA_ALPHA = 0.3
"""Weight of the newest group in a prompt's averages (the paper's public code)."""
WINDOW_STEPS = 10
"""Number of steps behind the data set's spread (the paper's public code)."""
KEPT_LENGTHS = 256
"""Saved lengths of a prompt's last group. A document holds 64 KiB."""
KEPT = re.compile(rf"[1-9][0-9]{{0,14}}\+?(?: [1-9][0-9]{{0,14}}\+?){{0,{KEPT_LENGTHS - 1}}}")
"""Form of `PromptStats.lengths`."""


# --- one group --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Observation:
    """Length of a candidate, ``censored`` if it was stopped or truncated and would have been longer."""

    tokens: int
    censored: bool = False


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """Of a prompt's lengths, in tokens. The sample ``std`` is None for a single candidate."""

    mean: float
    std: float | None


def estimate_lengths(observations: Sequence[Observation]) -> LengthEstimate:
    """Estimate mean and std of a prompt's lengths from finished and censored candidates.

    If no candidate finished, the longest counts as finished. Candidates without a token are ignored.

    Raises:
        ValueError: no candidate generated anything.
    """
    sample = _complete(observations)
    n = len(sample)
    weights, firsts, _ = zip(*sample, strict=True)
    mean = math.fsum(map(mul, weights, firsts)) / n
    if n == 1:
        return LengthEstimate(mean, None)

    # E[x²] - mean² would lose its digits if the spread is small; (first - mean)² keeps them.
    squares = [weight * ((first - mean) ** 2 + (second - first * first)) for weight, first, second in sample]
    # Equal weights divide by n - 1. Other weights divide by its generalisation.
    freedom = n - math.fsum(weight**2 for weight in weights) / n
    return LengthEstimate(mean, math.sqrt(max(math.fsum(squares), 0.0) / freedom))


def complete_sample(observations: Sequence[Observation]) -> list[tuple[float, float]]:
    """Return (weight, length) pairs, with each censored candidate at its expected length.

    The pairs do not show how much an expected length may vary, so they suit only distributions over many prompts.
    """
    has_finished = any(not o.censored for o in observations)
    has_censored = any(o.censored and o.tokens > 0 for o in observations)
    if not (has_finished and has_censored):
        # There is nothing to complete, or nothing to learn from.
        return [(1.0, float(o.tokens)) for o in observations if o.tokens > 0]
    return [(weight, first) for weight, first, _ in _complete(observations)]


Weighted = tuple[float, float, float]
"""Weight of a candidate in the sample, and E[x] and E[x²] of its length."""


def _complete(observations: Sequence[Observation]) -> list[Weighted]:
    """Return the sample with the expected moments of censored lengths.

    A censored candidate is as long as the longer candidates, or as the fitted shape says. So it distributes its weight
    in equal votes over the longer candidates, and keeps `SHAPE_VOTES` votes for the shape. A longer candidate that is
    censored too passes on the weight that it received.
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
    # Element k is the weight of a candidate that has received a vote of each of the k shortest censored candidates.
    received = [1.0]
    sample: list[Weighted] = []
    for c in censored:
        if c not in fitted:
            fitted[c] = shape.moments_beyond(c)
        # One token more does not count as longer: a candidate is stopped one token before the length of its winner.
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

    Eight of 16 lengths do not reveal a shape, so one shape serves all prompts. With the logarithm, lengths with two
    modes or a lighter tail are up to three times too wide. With the cube root, log-normal lengths are too short.

    The tail is at most as heavy as with a constant chance to end per token: one end in ``wait`` tokens, the mean number
    of tokens per end so far.
    """

    mean: float
    std: float
    wait: float

    @staticmethod
    def fit(finished: Sequence[int], censored: Sequence[int]) -> "FittedShape":
        """Fit the shape to finished lengths, at least one, and censored lengths, by maximum likelihood (Tobit).

        In Olsen's parameters, ``location`` = mean / std and ``precision`` = 1 / std, the penalised log-likelihood is
        concave, so Newton's method needs few steps. The mean takes one degree of freedom: without censoring and prior,
        the fitted variance is the sample's (n - 1).
        """
        roots = [float(x ** (1 / SHAPE_ROOT)) for x in finished]
        # Longer than c means at least c + 1, rounded to whole tokens.
        censored_roots = [(c + 0.5) ** (1 / SHAPE_ROOT) for c in censored]

        # Divide all roots by their mean, so that the parameters are of the order of 1.
        scale = (math.fsum(roots) + math.fsum(censored_roots)) / (len(finished) + len(censored))
        ends = [root / scale for root in roots]
        stops = Counter(root / scale for root in censored_roots)
        count = len(ends)
        total = math.fsum(ends)
        freedom = count - 1 + PRIOR_VOTES
        squares = math.fsum([y * y for y in ends]) + PRIOR_VOTES * (PRIOR_VARIATION / SHAPE_ROOT) ** 2

        # Begin with the solution without censored lengths.
        precision = math.sqrt(freedom / (squares - total**2 / count))
        location = precision * total / count
        moved = math.inf
        steps = 0
        while steps < NEWTON_STEPS and moved > NEWTON_TOLERANCE * (abs(location) + precision):
            # First and second derivatives of the log-likelihood.
            to_location = precision * total - count * location
            to_precision = freedom / precision - precision * squares + location * total
            twice_location = -float(count)
            twice_precision = -freedom / precision**2 - squares
            mixed = total
            for c, n in stops.items():
                z = precision * c - location
                hazard = _hazard(z)
                bend = n * hazard * (hazard - z)
                to_location += n * hazard
                to_precision -= n * hazard * c
                twice_location -= bend
                twice_precision -= bend * c * c
                mixed += bend * c

            # Newton's step: minus the inverse of the second derivatives, times the first.
            determinant = twice_location * twice_precision - mixed**2
            by_location = (mixed * to_precision - twice_precision * to_location) / determinant
            by_precision = (mixed * to_location - twice_location * to_precision) / determinant
            # A full step may overshoot. A step that keeps half of the precision does not.
            share = 1.0
            if by_precision < -precision / 2:
                share = -precision / 2 / by_precision
            location += share * by_location
            precision += share * by_precision
            moved = share * (abs(by_location) + abs(by_precision))
            steps += 1
        wait = (sum(finished) + sum(censored)) / len(finished)
        return FittedShape(scale * location / precision, scale / precision, wait)

    def moments_beyond(self, tokens: int) -> Moments:
        """Return E[x | x > tokens] and E[x² | x > tokens].

        The moments of a truncated standard normal Z follow the recursion
        E[Z^j | Z > z] = (j - 1) E[Z^(j-2) | Z > z] + z^(j-1) hazard(z).
        """
        z = ((tokens + 0.5) ** (1 / SHAPE_ROOT) - self.mean) / self.std
        # Element j is E[Z^j | Z > z].
        powers = [1.0, _hazard(z)]
        for j in range(2, 2 * SHAPE_ROOT + 1):
            powers.append((j - 1) * powers[j - 2] + z ** (j - 1) * powers[1])

        def moment(order: int) -> float:
            """Return E[(mean + std Z)^order | Z > z]."""
            return math.fsum(
                math.comb(order, j) * self.mean ** (order - j) * self.std**j * powers[j] for j in range(order + 1)
            )

        # Both are at most the moments of a constant chance to end, one in `wait` tokens.
        return (
            min(moment(SHAPE_ROOT), tokens + self.wait),
            min(moment(2 * SHAPE_ROOT), tokens**2 + 2 * tokens * self.wait + 2 * self.wait**2),
        )


def _hazard(z: float) -> float:
    """Return the standard normal's density at ``z``, divided by the probability to exceed ``z``."""
    if z > ERFC_RANGE:
        # erfc underflows here, so the asymptote is used.
        return z + 1 / z
    return math.sqrt(2 / math.pi) * math.exp(-z * z / 2) / math.erfc(z / math.sqrt(2))


# --- statistics of a prompt, and of the data set ----------------------------


@dataclass(frozen=True, slots=True)
class PromptStats:
    """One prompt's length statistics. ``PromptStats(**json)`` restores them.

    ``std_ema``, ``mean_ema``: exponential moving averages over the prompt's groups in tokens, corrected for stopped and
    truncated candidates. ``std_ema`` is None until a group had two candidates.

    The fields from ``weight_version`` on describe the last group, as far as known. ``lengths``: token counts such as
    ``"40 96+"``, where a plus marks a candidate that was stopped or truncated.
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
        for name, least in (("weight_version", 0), ("max_tokens", 1), ("prompt_tokens", 1)):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value, least)
        if self.lengths == "":
            return
        if not isinstance(self.lengths, str) or not KEPT.fullmatch(self.lengths):
            raise ValueError(f"lengths must be at most {KEPT_LENGTHS} token counts, got {reprlib.repr(self.lengths)}")
        longest = max(o.tokens for o in self.observations)
        if self.max_tokens is not None and longest > self.max_tokens:
            raise ValueError(f"lengths must be at most max_tokens, {self.max_tokens}, got {longest}")

    @property
    def observations(self) -> list[Observation]:
        """Lengths of the last group's candidates, as far as known."""
        return [Observation(int(text.rstrip("+")), censored=text.endswith("+")) for text in self.lengths.split()]

    def is_truncated(self, observation: Observation) -> bool:
        """Whether a candidate of the last group ended at the limit of its tokens."""
        return observation.censored and observation.tokens == self.max_tokens

    @property
    def candidates_of_mean(self) -> float:
        """Number of candidates whose plain mean varies as much as ``mean_ema``, where newer groups count more."""
        groups = max(self.groups, 1)
        older = (1 - EMA_ALPHA) ** 2
        first = older ** (groups - 1)
        sum_of_squared_weights = first + EMA_ALPHA**2 * (1 - first) / (1 - older)
        return self.candidates / groups / sum_of_squared_weights


def update_stats(
    stats: PromptStats | None,
    observations: Sequence[Observation],
    estimate: LengthEstimate,
    weight_version: int | None,
    max_tokens: int | None = None,
    prompt_tokens: int | None = None,
) -> PromptStats:
    """Return the statistics after another group. ``estimate``: `estimate_lengths` of the ``observations``."""
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
        if prompt_tokens is None:
            prompt_tokens = stats.prompt_tokens

    kept = [o for o in observations if o.tokens > 0][:KEPT_LENGTHS]
    return PromptStats(
        std_ema=std,
        mean_ema=mean,
        groups=groups,
        candidates=candidates,
        weight_version=weight_version,
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
        lengths=" ".join(f"{o.tokens}{'+' * o.censored}" for o in kept),
    )


@dataclass(frozen=True, slots=True)
class DatasetStats:
    """Length statistics of the data set. ``DatasetStats(**json)`` restores them.

    ``recent_stds``: mean std within a prompt in tokens, for each of the last `WINDOW_STEPS` steps with any std.
    ``mean``: mean length of the last step in tokens (l-bar).
    """

    recent_stds: tuple[float, ...] = ()
    mean: float | None = None
    steps: int = 0

    def __post_init__(self) -> None:
        # JSON has lists only.
        object.__setattr__(self, "recent_stds", tuple(self.recent_stds))
        check_length("recent_stds", self.recent_stds, WINDOW_STEPS)
        for std in self.recent_stds:
            check_number("recent_stds", std)
        if self.mean is not None:
            check_number("mean", self.mean, MIN_MEAN)
        check_count("steps", self.steps)

    @property
    def std(self) -> float | None:
        """Mean of ``recent_stds`` (sigma-bar), or None if there are none."""
        if not self.recent_stds:
            return None
        return _mean(self.recent_stds)

    def with_step(self, prompts: Iterable[LengthEstimate]) -> "DatasetStats":
        """Return the statistics after another step. A step without prompts changes nothing.

        Each prompt counts once: weighting by candidates would let the allocation change the mean that steers it.
        """
        estimates = list(prompts)
        if not estimates:
            return self
        recent = self.recent_stds
        stds = [estimate.std for estimate in estimates if estimate.std is not None]
        if stds:
            recent = (*recent, _mean(stds))
        return DatasetStats(
            recent_stds=recent[-WINDOW_STEPS:],
            mean=_mean([estimate.mean for estimate in estimates]),
            steps=min(self.steps + 1, LARGEST),
        )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
