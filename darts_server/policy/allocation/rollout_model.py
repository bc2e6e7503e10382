"""Model of a shaped rollout."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.deadline import QUANTILE
from darts_server.policy.latency.curve import LatencyCurve
from darts_server.policy.shaping import Tail

Floats = NDArray[np.float64]

SIMULATED = 8192
"""Candidates that are simulated: smaller batches several times over, larger ones by some of their prompts. With M = 8
and M_up = 16 the m found is then worse than the best by 0.006 of utility on the average, and is found in 10 ms."""
QUEUED = 4096
"""The same where the engine cannot run all at once: a queue takes that much longer to simulate."""


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
class RolloutEstimate:
    """What a rollout of the whole batch comes to.

    ``returned_mean``: mean length of the returned trajectories, in tokens. ``generated_tokens``: of all candidates.
    ``seconds``: until the last candidate has ended, prefill left aside.
    """

    returned_mean: float
    generated_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class SampledRollouts:
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
    def of(workload: Workload, most: int, rng: np.random.Generator) -> "SampledRollouts":
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
        return SampledRollouts(
            lengths=lengths if workload.max_tokens is None else np.minimum(lengths, workload.max_tokens),
            lots=rng.random((rounds, prompts, most)),
            ranks=np.argsort(np.argsort(known, kind="stable")),
            weight=means.size / prompts,
        )


def estimate_shaped(
    workload: Workload, mean_candidates: float, curve: LatencyCurve, draws: SampledRollouts
) -> RolloutEstimate:
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


def estimate_unshaped(workload: Workload, curve: LatencyCurve, draws: SampledRollouts) -> RolloutEstimate:
    """What the batch comes to with ``size`` candidates per prompt that all run to their end and are all returned."""
    run = draws.lengths[..., : workload.size]
    return _expectation(workload, run.mean(axis=-1), run, curve, draws)


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


def _expectation(
    workload: Workload, returned: Floats, run: Floats, curve: LatencyCurve, draws: SampledRollouts
) -> RolloutEstimate:
    rounds = run.shape[0]
    seconds = curve.rollout_seconds_batch(run.reshape(rounds, -1), workload.capacity, draws.weight)
    return RolloutEstimate(
        returned_mean=float(returned.mean()),
        generated_tokens=float(run.sum()) * draws.weight / rounds,
        seconds=float(seconds.mean()),
    )
