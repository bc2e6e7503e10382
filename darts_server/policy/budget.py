"""How many candidates in total (DARTS, adaptive redundancy allocation, part a).

More candidates make shorter groups, and cost time or save it: each takes a place in the batch, but with early stopping
the long ones need not be waited for. `best_mean` weighs the two by simulation,

    U(m) = E(m) - budget_aversion * T(m),        m = mean candidates per prompt (the paper's M-bar),

    E(m) = 1 - mean returned length at m / mean returned length of the unshaped batch,
    T(m) = seconds of the rollout at m / seconds of the unshaped batch,

where the unshaped batch starts ``size`` candidates a prompt and waits for all of them. ``budget_aversion`` is thus a
plain number: how many per cent shorter groups must get for rollouts that last one per cent longer.

Lengths are drawn from the recorded distribution and stopped as the selection rules do it. All m are tried on the same
draws: a prompt's first candidates are the same, whatever their number. What differs between two m is therefore due to
m, and the same draws give the same answer. Every prompt gets m candidates; how `allocation` spreads them is not
simulated.

`cv_log` is what the paper's public code does instead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.deadline import QUANTILE
from darts_server.policy.latency import LatencyCurve
from darts_server.policy.shaping import Tail

Floats = NDArray[np.float64]

CV_GAIN, CV_SCALE, CV_MOST = 1.5, 5.0, 1.75
"""Constants of the public code."""
SIMULATED = 8192
"""Candidates that are simulated: smaller batches several times over, larger ones by some of their prompts. With M = 8
and M_up = 16 the m found is then worse than the best by 0.006 of utility on the average, and is found in 10 ms."""
QUEUED = 4096
"""The same where the engine cannot run all at once: a queue takes that much longer to simulate."""
STEP = 0.5
"""Between the m that are tried."""


def cv_log(std: float, mean: float, size: int) -> float:
    """Mean candidates per prompt by the closed form of the public code: clip(M (1 + 1.5 ln(5 std / mean)), M, 1.75 M).

    ``std``: mean over the last steps of the step's mean length std; ``mean``: the last step's mean length, both in
    tokens; see `DatasetStats`. ``size``: M.

    Raises:
        ValueError: ``std`` is negative, ``mean`` is not above 0, one is not finite, or ``size`` is below 1.
    """
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"std must be finite and at least 0, got {std}")
    if not (math.isfinite(mean) and mean > 0):
        raise ValueError(f"mean must be finite and above 0, got {mean}")
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    spread = CV_SCALE * std / mean
    return size * min(1 + CV_GAIN * math.log(spread), CV_MOST) if spread > 1 else float(size)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A batch to come.

    ``means``: mean length of each prompt in tokens, in order of arrival. ``ratios``: equally likely values of length
    over the prompt's mean, as from `LengthProfile.quantiles`. ``size``: M. ``num_longest``: L, the places of the
    ``tail``, which without them does not matter. ``max_tokens``: the length limit. ``cut``: the tail ends at a
    deadline, the `deadline.QUANTILE` over prompts of the M-th shortest length, but not before the prompt's own M-th
    shortest. ``capacity``: most sequences that the engine runs at once; the others queue.

    Raises:
        ValueError: there are no means or no ratios, one of these is not finite and above 0, or another is out of range.
    """

    means: Sequence[float]
    ratios: Sequence[float] | Floats
    size: int
    num_longest: int = 0
    tail: Tail = Tail.SAMPLED
    max_tokens: int | None = None
    cut: bool = False
    capacity: int | None = None

    def __post_init__(self) -> None:
        for name, values in (("means", self.means), ("ratios", self.ratios)):
            x = np.asarray(values, dtype=np.float64)
            if not x.size or not (np.isfinite(x) & (x > 0)).all():
                raise ValueError(f"{name} must be at least one, all finite and above 0")
        if not 0 <= self.num_longest < self.size:
            raise ValueError(f"num_longest must be in [0, {self.size}), got {self.num_longest}")
        for name, bound in (("max_tokens", self.max_tokens), ("capacity", self.capacity)):
            if bound is not None and bound < 1:
                raise ValueError(f"{name} must be at least 1, got {bound}")


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a rollout of the whole batch comes to.

    ``returned_mean``: mean length of the returned trajectories, in tokens. ``generated_tokens``: of all candidates.
    ``seconds``: until the last candidate has ended, prefill left aside.
    """

    returned_mean: float
    generated_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One m that was tried, and its utility."""

    mean_candidates: float
    utility: float
    expectation: Expectation


@dataclass(frozen=True, slots=True)
class Decision:
    """The best of the ``trials``, which are in ascending order of m, and the ``unshaped`` batch to compare with."""

    mean_candidates: float
    utility: float
    trials: tuple[Trial, ...]
    unshaped: Expectation


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Lengths and lots of all candidates that may be started.

    ``lengths`` (tokens, not above the limit) and ``lots`` (the lowest win a place in the tail) have the shape (rounds,
    prompts, candidates): the batch is simulated ``rounds`` times. ``ranks``: place of each prompt in the order of
    means. ``weight``: prompts that each of them stands for.
    """

    lengths: Floats
    lots: Floats
    ranks: NDArray[np.int64]
    weight: float

    @staticmethod
    def of(workload: Workload, most: int, rng: np.random.Generator) -> "Draws":
        """Draws for up to ``most`` candidates per prompt."""
        means = np.asarray(workload.means, dtype=np.float64)
        queues = workload.capacity is not None and means.size * most > workload.capacity
        simulated = max(1, (QUEUED if queues else SIMULATED) // most)
        prompts = min(means.size, simulated)
        rounds = simulated // prompts
        # Of a large batch, prompts at even distances in the order of means.
        chosen = np.argsort(means, kind="stable")[((np.arange(prompts) + 0.5) * means.size / prompts).astype(np.int64)]
        known = means[np.sort(chosen)]
        ratios = np.sort(np.asarray(workload.ratios, dtype=np.float64))
        # Stratified: each candidate's ratios, over prompts and rounds, are spread evenly over the distribution.
        rows = rounds * prompts
        strata = rng.permuted(np.tile(np.arange(rows, dtype=np.float64), (most, 1)), axis=1)
        uniforms = (strata + rng.random((most, rows))) / rows
        drawn = ratios[(uniforms * ratios.size).astype(np.int64).clip(max=ratios.size - 1)]
        lengths = known[:, None] * drawn.T.reshape(rounds, prompts, most)
        return Draws(
            lengths=lengths if workload.max_tokens is None else np.minimum(lengths, workload.max_tokens),
            lots=rng.random((rounds, prompts, most)),
            ranks=np.argsort(np.argsort(known, kind="stable")),
            weight=means.size / prompts,
        )


def expected(workload: Workload, mean_candidates: float, curve: LatencyCurve, draws: Draws) -> Expectation:
    """What the batch comes to with so many candidates per prompt; a fraction is the share of prompts with one more.

    These are spread evenly over the prompts in the order of their means.

    Raises:
        ValueError: ``mean_candidates`` is below the workload's ``size`` or above what ``draws`` were made for.
    """
    most = draws.lengths.shape[-1]
    if not workload.size <= mean_candidates <= most:
        raise ValueError(f"mean_candidates must be in [{workload.size}, {most}], got {mean_candidates}")
    few = math.floor(mean_candidates)
    share = mean_candidates - few
    more = np.floor((draws.ranks + 1) * share) > np.floor(draws.ranks * share)
    width = few + (1 if share else 0)
    # A candidate that is not started has no end, so it is the last in every order, and no time of its own.
    absent = (np.arange(width) >= (few + more)[:, None])[None]
    lengths = np.where(absent, np.inf, draws.lengths[..., :width])
    order = np.argsort(lengths, axis=-1, kind="stable")  # ties go to the earlier one, as in selection
    ordered = np.take_along_axis(lengths, order, axis=-1)
    lots = np.take_along_axis(draws.lots[..., :width], order, axis=-1)
    returned, run = _shaped(workload, ordered, lots)
    return _expectation(workload, returned, _unsorted(np.where(np.isinf(ordered), 0.0, run), order), curve, draws)


def unshaped(workload: Workload, curve: LatencyCurve, draws: Draws) -> Expectation:
    """What the batch comes to with ``size`` candidates per prompt that all run to their end and are all returned."""
    run = draws.lengths[..., : workload.size]
    return _expectation(workload, run.mean(axis=-1), run, curve, draws)


def best_mean(
    workload: Workload,
    low: int,
    high: int,
    curve: LatencyCurve,
    budget_aversion: float,
    rng: np.random.Generator,
) -> Decision:
    """The mean candidates per prompt in [``low``, ``high``] with the largest utility, among whole and half numbers.

    Of equal ones the smallest. A generator with the same seed gives the same answer.

    Raises:
        ValueError: ``low`` and ``high`` do not hold size <= low <= high, or ``budget_aversion`` is negative or not
            finite.
    """
    if not workload.size <= low <= high:
        raise ValueError(f"low and high must hold {workload.size} <= low <= high, got low = {low} and high = {high}")
    if not (math.isfinite(budget_aversion) and budget_aversion >= 0):
        raise ValueError(f"budget_aversion must be finite and at least 0, got {budget_aversion}")
    draws = Draws.of(workload, high, rng)
    base = unshaped(workload, curve, draws)
    trials = []
    for mean_candidates in np.arange(low, high + STEP, STEP).tolist():
        found = expected(workload, mean_candidates, curve, draws)
        shortening = 1 - found.returned_mean / base.returned_mean
        utility = shortening - budget_aversion * found.seconds / base.seconds
        trials.append(Trial(mean_candidates, utility, found))
    best = max(trials, key=lambda trial: trial.utility)
    return Decision(best.mean_candidates, best.utility, tuple(trials), base)


# --- one simulated batch ----------------------------------------------------


def _shaped(workload: Workload, ordered: Floats, lots: Floats) -> tuple[Floats, Floats]:
    """Mean returned length per prompt, and for each candidate how many tokens it runs, shortest first.

    A drawn tail counts in the former with the mean of all that it may be, which is the same but for the noise.
    """
    size, longest = workload.size, workload.num_longest
    shortest = size - longest
    whole = ordered[..., size - 1 : size]
    if not longest:
        return ordered[..., :size].mean(axis=-1), np.minimum(ordered, whole)
    deadline = np.full_like(whole, np.inf)
    if workload.cut:
        deadline = np.maximum(np.quantile(whole, QUANTILE, axis=1, keepdims=True, method="inverted_cdf"), whole)
    ends = np.minimum(ordered, deadline)
    short = ordered[..., :shortest].sum(axis=-1)
    place = np.arange(ordered.shape[-1])
    rest = (place >= shortest) & np.isfinite(ordered)
    if workload.tail is Tail.LONGEST:
        # Candidates that are late or hit the limit do not count, unless the group would not be full without them.
        limit = workload.max_tokens or np.inf
        last = ((ordered < limit) & (ordered <= deadline)).sum(axis=-1, keepdims=True).clip(min=size)
        tail = np.where((place >= last - longest) & (place < last), ordered, 0.0).sum(axis=-1)
        return (short + tail) / size, ends
    tail = longest * np.where(rest, ends, 0.0).sum(axis=-1) / rest.sum(axis=-1)
    lots = np.where(rest, lots, np.inf)
    drawn = lots <= np.partition(lots, longest - 1, axis=-1)[..., longest - 1 : longest]
    # Losers are stopped behind the K-th shortest, or where the deadline hangs on the M-th shortest, behind that.
    bar = whole if workload.cut else ordered[..., shortest - 1 : shortest]
    return (short + tail) / size, np.where(drawn, ends, np.minimum(ordered, bar))


def _unsorted(values: Floats, order: NDArray[np.int64]) -> Floats:
    """``values`` back in the order in which the candidates started."""
    back = np.empty_like(values)
    np.put_along_axis(back, order, values, axis=-1)
    return back


def _expectation(workload: Workload, returned: Floats, run: Floats, curve: LatencyCurve, draws: Draws) -> Expectation:
    rounds = run.shape[0]
    seconds = curve.rollouts_seconds(run.reshape(rounds, -1), workload.capacity, draws.weight)
    return Expectation(
        returned_mean=float(returned.mean()),
        generated_tokens=float(run.sum()) * draws.weight / rounds,
        seconds=float(seconds.mean()),
    )
