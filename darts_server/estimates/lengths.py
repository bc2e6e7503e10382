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
"""Beyond it erfc underflows, and the asymptote is exact to a part in a million."""

Moments = tuple[float, float]
"""E[x] and E[x²] of a length in tokens."""
EMA_ALPHA = 0.3
"""Weight of the newest group in a prompt's averages (the paper's public code)."""
WINDOW_STEPS = 10
"""Number of steps behind the data set's spread (the paper's public code)."""
KEPT_LENGTHS = 256
"""Saved lengths of a prompt's last group. A document holds 64 KiB."""
LENGTHS_FORM = re.compile(rf"[1-9][0-9]{{0,14}}\+?(?: [1-9][0-9]{{0,14}}\+?){{0,{KEPT_LENGTHS - 1}}}")


# --- one group --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Observation:
    """Length of a candidate, ``censored`` if it was stopped or truncated and would have been longer."""

    tokens: int
    censored: bool = False


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """Mean and sample std of lengths in tokens. ``std`` is None for a single candidate."""

    mean: float
    std: float | None


def estimate_lengths(observations: Sequence[Observation]) -> LengthEstimate:
    """Estimate mean and std of a prompt's lengths from finished and censored candidates.

    Candidates without a token are ignored.

    Raises:
        ValueError: no candidate generated anything.
    """
    sample = _complete(observations)
    n = len(sample)
    mean = math.fsum(weight * expected for weight, expected, _ in sample) / n
    if n == 1:
        return LengthEstimate(mean, None)

    # E[x²] - mean² would lose its digits if the spread is small. The squared distance of E[x] and the variance of x
    # keep them.
    squares = []
    for weight, expected, expected_square in sample:
        variance = expected_square - expected * expected
        squares.append(weight * ((expected - mean) ** 2 + variance))
    # Equal weights divide by n - 1. Other weights divide by its generalisation.
    freedom = n - math.fsum(weight**2 for weight, _, _ in sample) / n
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
    return [(weight, expected) for weight, expected, _ in _complete(observations)]


Weighted = tuple[float, float, float]
"""Weight of a candidate in the sample, and E[x] and E[x²] of its length."""


def _complete(observations: Sequence[Observation]) -> list[Weighted]:
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
        # The longest counts as finished.
        finished = [censored.pop()]
    if censored:
        shape = FittedShape.fit(finished, censored)

    # A censored candidate is as long as the longer candidates, or as the fitted shape says. So it gives its weight in
    # equal votes to the longer candidates, and keeps `SHAPE_VOTES` votes for the shape. A longer candidate that is
    # censored too passes on the weight that it received, so the shortest vote first.
    fitted: dict[int, Moments] = {}
    tokens = sorted((*censored, *finished))
    # weight_after[k] is the weight of a candidate after the votes of the k shortest censored candidates.
    weight_after = [1.0]
    sample: list[Weighted] = []
    for c in censored:
        if c not in fitted:
            fitted[c] = shape.moments_beyond(c)
        # One token more does not count as longer: a candidate is stopped one token before the length of its winner.
        num_longer = len(tokens) - bisect_right(tokens, c + 1)
        weight = weight_after[bisect_left(censored, c - 1)]
        vote = weight / (num_longer + SHAPE_VOTES)
        weight_after.append(weight_after[-1] + vote)
        sample.append((weight - vote * num_longer, *fitted[c]))
    # Candidates that are at least two tokens shorter have given their votes.
    for x in finished:
        sample.append((weight_after[bisect_left(censored, x - 1)], x, x * x))
    return sample


# --- the assumed shape ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FittedShape:
    """The assumed shape of a prompt's lengths: their fourth root is normal, with ``mean`` and ``std``.

    Eight of 16 lengths do not reveal a shape, so one shape serves all prompts. With the logarithm, lengths with two
    modes or a lighter tail are up to three times too wide. With the cube root, log-normal lengths are too short.

    The tail is at most as heavy as with a constant chance to end per token, one end in ``tokens_per_end`` tokens.
    """

    mean: float
    std: float
    tokens_per_end: float

    @staticmethod
    def fit(finished: Sequence[int], censored: Sequence[int]) -> "FittedShape":
        """Fit the shape to finished lengths, at least one, and censored lengths, by maximum likelihood (Tobit)."""
        roots = [float(x ** (1 / SHAPE_ROOT)) for x in finished]
        # Longer than c means at least c + 1, rounded to whole tokens.
        censored_roots = [(c + 0.5) ** (1 / SHAPE_ROOT) for c in censored]

        # Divide all roots by their mean, so that the parameters are of the order of 1.
        scale = (math.fsum(roots) + math.fsum(censored_roots)) / (len(finished) + len(censored))
        scaled_roots = [root / scale for root in roots]
        scaled_censored = Counter(root / scale for root in censored_roots)
        count = len(scaled_roots)
        total = math.fsum(scaled_roots)
        # The mean costs one observation. A root varies `SHAPE_ROOT` times less than its length.
        freedom = count - 1 + PRIOR_VOTES
        root_variation = PRIOR_VARIATION / SHAPE_ROOT
        squares = math.fsum([y * y for y in scaled_roots]) + PRIOR_VOTES * root_variation**2

        # In Olsen's parameters, location = mean / std and precision = 1 / std, the penalised log-likelihood is concave,
        # so Newton's method needs few steps. Begin with the solution without censored lengths.
        precision = math.sqrt(freedom / (squares - total**2 / count))
        location = precision * total / count
        moved = math.inf
        steps = 0
        while steps < NEWTON_STEPS and moved > NEWTON_TOLERANCE * (abs(location) + precision):
            # First and second derivatives (d, dd) of the log-likelihood, of finished and then of censored lengths.
            d_location = precision * total - count * location
            d_precision = freedom / precision - precision * squares + location * total
            dd_location = -float(count)
            dd_precision = -freedom / precision**2 - squares
            dd_mixed = total
            for c, n in scaled_censored.items():
                z = precision * c - location
                hazard = _hazard(z)
                hazard_slope = hazard * (hazard - z)
                d_location += n * hazard
                d_precision -= n * hazard * c
                dd_location -= n * hazard_slope
                dd_precision -= n * hazard_slope * c * c
                dd_mixed += n * hazard_slope * c

            # Newton's step: minus the inverse of the second derivatives, times the first.
            determinant = dd_location * dd_precision - dd_mixed**2
            location_step = (dd_mixed * d_precision - dd_precision * d_location) / determinant
            precision_step = (dd_mixed * d_location - dd_location * d_precision) / determinant
            # A full step may overshoot. A step that keeps half of the precision does not.
            step_share = 1.0
            if precision_step < -precision / 2:
                step_share = -precision / 2 / precision_step
            location += step_share * location_step
            precision += step_share * precision_step
            moved = step_share * (abs(location_step) + abs(precision_step))
            steps += 1
        tokens_per_end = (sum(finished) + sum(censored)) / len(finished)
        return FittedShape(scale * location / precision, scale / precision, tokens_per_end)

    def moments_beyond(self, tokens: int) -> Moments:
        """Return E[x | x > tokens] and E[x² | x > tokens]."""
        z = ((tokens + 0.5) ** (1 / SHAPE_ROOT) - self.mean) / self.std
        # z_moments[j] is E[Z^j | Z > z], by the recursion of a truncated standard normal.
        hazard = _hazard(z)
        z_moments = [1.0, hazard]
        for j in range(2, 2 * SHAPE_ROOT + 1):
            z_moments.append((j - 1) * z_moments[j - 2] + z ** (j - 1) * hazard)

        def root_moment(order: int) -> float:
            """Return E[(mean + std Z)^order | Z > z]."""
            return math.fsum(
                math.comb(order, j) * self.mean ** (order - j) * self.std**j * z_moments[j] for j in range(order + 1)
            )

        # Both are at most the moments of an exponential tail.
        wait = self.tokens_per_end
        return (
            min(root_moment(SHAPE_ROOT), tokens + wait),
            min(root_moment(2 * SHAPE_ROOT), tokens**2 + 2 * tokens * wait + 2 * wait**2),
        )


def _hazard(z: float) -> float:
    # The standard normal's density at z, divided by the probability to exceed z.
    if z > ERFC_RANGE:
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
        if not isinstance(self.lengths, str) or not LENGTHS_FORM.fullmatch(self.lengths):
            raise ValueError(f"lengths must be at most {KEPT_LENGTHS} token counts, got {reprlib.repr(self.lengths)}")
        longest = max(o.tokens for o in self.observations)
        if self.max_tokens is not None and longest > self.max_tokens:
            raise ValueError(f"lengths must be at most max_tokens, {self.max_tokens}, got {longest}")

    @property
    def observations(self) -> list[Observation]:
        return [Observation(int(text.rstrip("+")), censored=text.endswith("+")) for text in self.lengths.split()]

    def is_truncated(self, observation: Observation) -> bool:
        """Whether a candidate of the last group ended at the limit of its tokens."""
        return observation.censored and observation.tokens == self.max_tokens

    @property
    def effective_candidates(self) -> float:
        """Number of candidates whose plain mean varies as much as ``mean_ema``, where newer groups count more."""
        # The first group has the weight (1 - alpha)^(groups - 1), and a group k steps ago alpha (1 - alpha)^k.
        groups = max(self.groups, 1)
        squared_decay = (1 - EMA_ALPHA) ** 2
        first_squared = squared_decay ** (groups - 1)
        sum_of_squares = first_squared + EMA_ALPHA**2 * (1 - first_squared) / (1 - squared_decay)
        candidates_per_group = self.candidates / groups
        return candidates_per_group / sum_of_squares


def update_stats(
    stats: PromptStats | None,
    observations: Sequence[Observation],
    estimate: LengthEstimate,
    weight_version: int | None,
    max_tokens: int | None = None,
    prompt_tokens: int | None = None,
) -> PromptStats:
    """``estimate``: `estimate_lengths` of the ``observations``."""
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
        """Return the statistics after another step. A step without prompts changes nothing."""
        estimates = list(prompts)
        if not estimates:
            return self
        # Each prompt counts once. Weighting by candidates would let the allocation change the mean that steers it.
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
