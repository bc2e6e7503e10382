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
ones alone. Modes and log-normals as in `tests/policy/test_lengths.py`, which checks these figures:

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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

EMA_ALPHA = 0.3
"""Weight of the newest group in a prompt's averages: the value of the paper's public code."""
WINDOW_STEPS = 10
"""Steps that the data set's spread is averaged over: the value of the paper's public code."""

SHAPE_ROOT = 4
"""The shape: this root of the length is normal. See above."""
SHAPE_VOTES = 0.5
"""Votes of the fitted shape against one for each longer candidate: enough to temper a single drawn one."""
PRIOR_VOTES = 0.5
PRIOR_VARIATION = 0.5
"""Prior on the spread: half an observation that is off by half the mean. It matters if all known lengths are equal."""

NEWTON_STEPS = 50
"""Never reached: about five are taken on the average, and 14 at most in 3,000 samples of all sorts."""
NEWTON_TOLERANCE = 1e-6
"""Relative, on the shape's parameters."""
ROUNDING = 1e-9
"""A step that loses less log-likelihood than this does not overshoot."""
ERFC_RANGE = 30.0
"""Beyond it erfc underflows, and the asymptotic form is exact to a part in a million."""

KEY_BYTES = 12
"""96 bits: no two of a million prompts share a key by chance."""


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
class Estimate:
    """Mean and sample std (n - 1) of one prompt's lengths, in tokens; the std of a single candidate is unknown."""

    mean: float
    std: float | None


def estimate(observations: Sequence[Observation]) -> Estimate:
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


def completed(observations: Sequence[Observation]) -> list[tuple[float, float]]:
    """The sample as (weight, length) pairs, with each candidate that was stopped at the length it was likely to reach.

    The weights add up to the number of candidates that generated anything. For distributions over many prompts; mean
    and std of one prompt are `estimate`'s.
    """
    finished = [o.tokens for o in observations if not o.censored]
    censored = sorted(o.tokens for o in observations if o.censored and o.tokens > 0)
    if not censored or not finished:
        return [(1.0, float(o.tokens)) for o in observations if o.tokens > 0]
    return [(weight, first) for weight, first, _ in _completed(finished, censored)]


Moments = tuple[float, float]
"""E[x] and E[x²] of one candidate's length."""
Weighted = tuple[float, float, float]
"""The same, after the weight that it has in the sample."""


def _summary(lengths: Sequence[Weighted]) -> Estimate:
    """Mean and std of a weighted sample: with equal weights it divides by n - 1, and else by what stands for that."""
    n = len(lengths)
    mean = math.fsum(weight * first for weight, first, _ in lengths) / n
    if n == 1:
        return Estimate(mean, None)
    # (first - mean)² keeps its digits where the spread is small against the mean.
    squares = math.fsum(weight * ((first - mean) ** 2 + (second - first * first)) for weight, first, second in lengths)
    return Estimate(mean, math.sqrt(max(squares, 0.0) / (n - math.fsum(weight**2 for weight, _, _ in lengths) / n)))


def _completed(finished: Sequence[int], censored: Sequence[int]) -> list[Weighted]:
    """The sample with the censored ones (shortest first) completed.

    Each hands its weight on in equal votes to those that are known to be longer, and keeps the shape's share for
    itself. A longer one that was censored too hands on what it was given.
    """
    shape = _Shape.fit(finished, censored)
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


# --- the fitted shape -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shape:
    """Lengths whose root is normal with ``mean`` and ``std``; mean time to an ending so far: ``wait`` tokens."""

    mean: float
    std: float
    wait: float

    @staticmethod
    def fit(finished: Sequence[int], censored: Sequence[int]) -> "_Shape":
        roots = [_root(x) for x in finished]
        limits = Counter(_root(c + 0.5) for c in censored)  # longer than c means at least c + 1, rounded
        scale = (math.fsum(roots) + math.fsum(limits.elements())) / (len(finished) + len(censored))
        likelihood = _Likelihood.of([y / scale for y in roots], {c / scale: n for c, n in limits.items()})
        location, precision = likelihood.maximum()
        wait = (sum(finished) + sum(censored)) / len(finished)
        return _Shape(scale * location / precision, scale / precision, wait)

    def beyond(self, tokens: int) -> Moments:
        """E[x | x > tokens] and E[x² | x > tokens]."""
        z = (_root(tokens + 0.5) - self.mean) / self.std
        powers = [1.0, _hazard(z)]  # E[Z^j | Z > z]
        for j in range(2, 2 * SHAPE_ROOT + 1):
            powers.append((j - 1) * powers[j - 2] + z ** (j - 1) * powers[1])
        first, second = self._moment(SHAPE_ROOT, powers), self._moment(2 * SHAPE_ROOT, powers)
        return (
            min(first, tokens + self.wait),
            min(second, tokens**2 + 2 * tokens * self.wait + 2 * self.wait**2),
        )

    def _moment(self, order: int, powers: Sequence[float]) -> float:
        """E[(mean + std Z)^order]."""
        return math.fsum(
            math.comb(order, j) * self.mean ** (order - j) * self.std**j * powers[j] for j in range(order + 1)
        )


@dataclass(frozen=True, slots=True)
class _Likelihood:
    """Penalised log-likelihood of a right-censored normal sample, a concave function of Olsen's parameters.

    These are ``location`` = mean / std and ``precision`` = 1 / std. The prior counts as `PRIOR_VOTES` deviations, and
    the mean takes one degree of freedom, so that without censoring the fitted variance would be the sample's (n - 1)
    but for the prior.
    """

    count: int
    total: float
    squares: float
    freedom: float
    limits: Mapping[float, int]

    @staticmethod
    def of(known: Sequence[float], limits: Mapping[float, int]) -> "_Likelihood":
        """``known`` and ``limits`` (value -> how many were censored there) on a scale where all average to one."""
        prior = PRIOR_VOTES * (PRIOR_VARIATION / SHAPE_ROOT) ** 2
        return _Likelihood(
            count=len(known),
            total=math.fsum(known),
            squares=math.fsum(y * y for y in known) + prior,
            freedom=len(known) - 1 + PRIOR_VOTES,
            limits=limits,
        )

    def maximum(self) -> tuple[float, float]:
        """Location and precision, by Newton's method with halved steps where a whole one overshoots."""
        precision = math.sqrt(self.freedom / (self.squares - self.total**2 / self.count))
        location = precision * self.total / self.count
        value = self.value(location, precision)
        steps, moved = NEWTON_STEPS, math.inf
        while steps and moved > NEWTON_TOLERANCE * (abs(location) + precision):
            by_location, by_precision = self.step(location, precision)
            while (better := self.value(location + by_location, precision + by_precision)) < value - ROUNDING:
                by_location, by_precision = by_location / 2, by_precision / 2
            location, precision, value = location + by_location, precision + by_precision, better
            steps, moved = steps - 1, abs(by_location) + abs(by_precision)
        return location, precision

    def value(self, location: float, precision: float) -> float:
        if precision <= 0:
            return -math.inf
        deviations = precision**2 * self.squares - 2 * precision * location * self.total + self.count * location**2
        survived = sum(n * _log_survival(precision * c - location) for c, n in self.limits.items())
        return self.freedom * math.log(precision) - deviations / 2 + survived

    def step(self, location: float, precision: float) -> tuple[float, float]:
        """Newton's step: minus the inverse of the second derivatives, times the first."""
        to_location = precision * self.total - self.count * location
        to_precision = self.freedom / precision - precision * self.squares + location * self.total
        twice_location, mixed = -float(self.count), self.total
        twice_precision = -self.freedom / precision**2 - self.squares
        for c, n in self.limits.items():
            z = precision * c - location
            hazard = _hazard(z)
            bend = n * hazard * (hazard - z)
            to_location += n * hazard
            to_precision -= n * hazard * c
            twice_location -= bend
            twice_precision -= bend * c * c
            mixed += bend * c
        determinant = twice_location * twice_precision - mixed**2
        return (
            (mixed * to_precision - twice_precision * to_location) / determinant,
            (mixed * to_location - twice_location * to_precision) / determinant,
        )


def _root(tokens: float) -> float:
    return float(tokens ** (1 / SHAPE_ROOT))


def _hazard(z: float) -> float:
    """Density over survival of the standard normal."""
    if z > ERFC_RANGE:
        return z + 1 / z
    return math.sqrt(2 / math.pi) * math.exp(-z * z / 2) / math.erfc(z / math.sqrt(2))


def _log_survival(z: float) -> float:
    """log P(Z > z) of the standard normal."""
    if z > ERFC_RANGE:
        return -z * z / 2 - math.log(z * math.sqrt(2 * math.pi))
    return math.log(math.erfc(z / math.sqrt(2)) / 2)


# --- what is remembered -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class PromptStats:
    """One prompt's length statistics over the groups so far. Plain fields: ``PromptStats(**json)`` restores it.

    ``std_ema``, ``mean_ema``: exponential moving averages in tokens; no spread is known while no group had two
    candidates. ``groups``, ``candidates``: how many went into them. ``weight_version``: the last group's.
    """

    std_ema: float | None
    mean_ema: float
    groups: int
    candidates: int
    weight_version: int | None

    def __post_init__(self) -> None:
        known = [self.mean_ema, self.groups, self.candidates, *([] if self.std_ema is None else [self.std_ema])]
        if not all(isinstance(x, int | float) and 0 <= x < math.inf for x in known):
            raise ValueError(f"statistics of a prompt must be finite numbers of at least 0, got {self}")


def updated(
    stats: PromptStats | None,
    observations: Sequence[Observation],
    weight_version: int | None,
    alpha: float = EMA_ALPHA,
) -> PromptStats:
    """The statistics after one more group. The first value is taken as it is, later ones with weight ``alpha``.

    Raises:
        ValueError: ``alpha`` is out of range, or no candidate generated anything.
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    now = estimate(observations)
    if stats is None:
        return PromptStats(now.std, now.mean, 1, len(observations), weight_version)
    return PromptStats(
        std_ema=_average(stats.std_ema, now.std, alpha),
        mean_ema=alpha * now.mean + (1 - alpha) * stats.mean_ema,
        groups=stats.groups + 1,
        candidates=stats.candidates + len(observations),
        weight_version=weight_version,
    )


def _average(old: float | None, new: float | None, alpha: float) -> float | None:
    if old is None or new is None:
        return new if old is None else old
    return alpha * new + (1 - alpha) * old


@dataclass(frozen=True, slots=True)
class DatasetStats:
    """The whole data set's lengths. Plain fields: ``DatasetStats(**json)`` restores it.

    ``recent_stds``: for each of the last `WINDOW_STEPS` steps that had any, the mean of its prompts' length stds.
    ``mean``: l-bar, the last step's mean length. ``steps``: how many there were.
    """

    recent_stds: tuple[float, ...] = ()
    mean: float | None = None
    steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "recent_stds", tuple(self.recent_stds))  # JSON knows lists only

    @property
    def std(self) -> float | None:
        """Sigma-bar: the mean over the window; ``None`` before any spread is known."""
        return math.fsum(self.recent_stds) / len(self.recent_stds) if self.recent_stds else None

    def step(self, prompts: Iterable[Estimate]) -> "DatasetStats":
        """After a step with these ``prompts``; each counts once, however many candidates it had.

        Weighting by candidates would tie the mean to the allocation that it steers. An empty step changes nothing.
        """
        estimates = list(prompts)
        if not estimates:
            return self
        stds = [e.std for e in estimates if e.std is not None]
        recent = (*self.recent_stds, math.fsum(stds) / len(stds)) if stds else self.recent_stds
        return DatasetStats(
            recent_stds=recent[-WINDOW_STEPS:],
            mean=math.fsum(e.mean for e in estimates) / len(estimates),
            steps=self.steps + 1,
        )


def prompt_key(token_ids: Sequence[int]) -> str:
    """The name of a prompt whose caller gave none: a hash of its tokens, the same in every process and host."""
    return blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=KEY_BYTES).hexdigest()
