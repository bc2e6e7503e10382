"""Simulate a shaped rollout: lengths that are returned, tokens that are generated, and seconds that it takes.

Lengths are sampled from the recorded distribution (`lengths.profile`), candidates are stopped as the selection rules
stop them, and the time follows from the latency curve. Candidates are allocated to the simulated prompts as they would
be to the batch's. Left out: pruning, and what prefills take beyond the average cost of a start.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.allocation.optimum import allocation_order
from darts_server.policy.deadline import QUANTILE
from darts_server.policy.latency.curve import LatencyCurve
from darts_server.policy.shaping import Tail

Floats = NDArray[np.float64]

SIMULATED = 8192
"""Candidates that are simulated: smaller batches several times over, larger ones by some of their prompts. With M = 8
and M_up = 16 the m that `budget` chooses is then worse than the best by 0.006 of utility on average, in 10 ms."""
QUEUED = 4096
"""The same if the engine cannot run all at once: a queue takes about twice as long to simulate."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A batch that is about to start.

    ``means``: mean length of each prompt in tokens, in order of arrival. ``ratios``: equally likely values of length
    over the prompt's mean, as from `LengthProfile.quantiles`. ``size``: M. ``num_longest``: L, the places of the
    ``tail``. ``max_tokens``: the length limit. ``cut``: the tail ends at a deadline, the `deadline.QUANTILE` over
    prompts of the M-th shortest length, but not before the prompt's own M-th shortest. ``completion_place``: which of
    the shortest counts for that, if not the M-th. ``capacity``: how many sequences the engine runs at once; the others
    queue. ``stds``: length std of each prompt in tokens, ``None`` for an unknown one, by which candidates are
    allocated; ``None`` for a policy that gives all prompts the same number. ``saturated_at``: prompts with so many
    candidates return their M shortest, without a tail. ``start_seconds``: what a candidate costs besides its decode
    steps, see `latency.starts`.

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
    completion_place: int | None = None
    capacity: int | None = None
    stds: Sequence[float | None] | None = None
    saturated_at: int | None = None
    start_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, values in (("means", self.means), ("ratios", self.ratios)):
            x = np.asarray(values, dtype=np.float64)
            if not x.size or not (np.isfinite(x) & (x > 0)).all():
                raise ValueError(f"{name} must be at least one, all finite and above 0")
        if self.stds is not None and len(self.stds) != len(self.means):
            raise ValueError(f"stds must be as many as means, {len(self.means)}, got {len(self.stds)}")
        if not 0 <= self.num_longest < self.size:
            raise ValueError(f"num_longest must be in [0, {self.size}), got {self.num_longest}")
        for name, bound in (("max_tokens", self.max_tokens), ("capacity", self.capacity)):
            if bound is not None and bound < 1:
                raise ValueError(f"{name} must be at least 1, got {bound}")


@dataclass(frozen=True, slots=True)
class RolloutEstimate:
    """Estimate for a rollout of the whole batch.

    ``returned_mean``: mean length of the returned trajectories, in tokens. ``generated_tokens``: of all candidates.
    ``seconds``: until the last candidate has ended.
    """

    returned_mean: float
    generated_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class SampledRollouts:
    """Sampled lengths of all candidates that may be started.

    ``lengths`` (tokens, at most the limit) and ``tail_draws`` (random numbers; the lowest win a place in a sampled
    tail) have the shape (rounds, prompts, candidates): the batch is simulated ``rounds`` times. ``ranks``: place of
    each prompt in the order of means. ``weight``: how many prompts of the batch each simulated one stands for.
    ``gains``: the simulated prompt of each candidate above the workload's ``size``, in the order in which a larger
    budget gives them out; ``None`` if all prompts get the same number.
    """

    lengths: Floats
    tail_draws: Floats
    ranks: NDArray[np.int64]
    weight: float
    gains: NDArray[np.int64] | None = None

    @staticmethod
    def of(workload: Workload, max_candidates: int, rng: np.random.Generator) -> "SampledRollouts":
        """Sample lengths of up to ``max_candidates`` per prompt."""
        means = np.asarray(workload.means, dtype=np.float64)
        queues = workload.capacity is not None and means.size * max_candidates > workload.capacity
        simulated = max(1, (QUEUED if queues else SIMULATED) // max_candidates)
        prompts = min(means.size, simulated)
        rounds = simulated // prompts
        # Of a large batch, simulate prompts at even distances in the order of means.
        order = np.argsort(means, kind="stable")
        chosen = np.sort(order[((np.arange(prompts) + 0.5) * means.size / prompts).astype(np.int64)])
        chosen_means = means[chosen]
        ratios = np.sort(np.asarray(workload.ratios, dtype=np.float64))
        stds = None if workload.stds is None else [workload.stds[i] for i in chosen.tolist()]
        # Stratified sampling: over prompts and rounds, each candidate's ratios cover the distribution evenly. That is
        # much less noise than independent ones have, for the same number.
        rows = rounds * prompts
        strata = rng.permuted(np.tile(np.arange(rows, dtype=np.float64), (max_candidates, 1)), axis=1)
        uniforms = (strata + rng.random((max_candidates, rows))) / rows
        sampled = ratios[(uniforms * ratios.size).astype(np.int64).clip(max=ratios.size - 1)]
        lengths = chosen_means[:, None] * sampled.T.reshape(rounds, prompts, max_candidates)
        return SampledRollouts(
            lengths=lengths if workload.max_tokens is None else np.minimum(lengths, workload.max_tokens),
            tail_draws=rng.random((rounds, prompts, max_candidates)),
            ranks=np.argsort(np.argsort(chosen_means, kind="stable")),
            weight=means.size / prompts,
            gains=None if stds is None else allocation_order(stds, low=workload.size, high=max_candidates),
        )

    def allocate(self, mean_candidates: float, size: int) -> NDArray[np.int64]:
        """Allocate at least ``size`` candidates to each simulated prompt, and so many on average.

        Without ``gains`` a fraction is the share of prompts with one candidate more, which are spread evenly over the
        order of means.
        """
        if self.gains is not None:
            extra = math.floor((mean_candidates - size) * self.ranks.size + 0.5)
            return np.asarray(size + np.bincount(self.gains[:extra], minlength=self.ranks.size), dtype=np.int64)
        few = math.floor(mean_candidates)
        share = mean_candidates - few
        more = np.floor((self.ranks + 1) * share) > np.floor(self.ranks * share)
        return np.asarray(few + more, dtype=np.int64)


def estimate_shaped(
    workload: Workload, mean_candidates: float, curve: LatencyCurve, sample: SampledRollouts
) -> RolloutEstimate:
    """Estimate the rollout of a shaped batch with so many candidates per prompt, see `SampledRollouts.allocate`.

    Raises:
        ValueError: ``mean_candidates`` is below the workload's ``size`` or above the candidates in ``sample``.
    """
    most = sample.lengths.shape[-1]
    if not workload.size <= mean_candidates <= most:
        raise ValueError(f"mean_candidates must be in [{workload.size}, {most}], got {mean_candidates}")
    counts = sample.allocate(mean_candidates, workload.size)
    width = int(counts.max())
    # A candidate that is not started gets an infinite length, which makes it the last in every order; its time is 0.
    absent = (np.arange(width) >= counts[:, None])[None]
    lengths = np.where(absent, np.inf, sample.lengths[..., :width])
    order = np.argsort(lengths, axis=-1, kind="stable")  # ties go to the earlier index, as in selection
    ordered = np.take_along_axis(lengths, order, axis=-1)
    tail_draws = np.take_along_axis(sample.tail_draws[..., :width], order, axis=-1)
    returned, run = _stop_early(workload, ordered, tail_draws)
    if workload.saturated_at is not None:
        saturated = counts >= workload.saturated_at
        returned[:, saturated], run[:, saturated] = _stop_behind(ordered[:, saturated], workload.size, workload.size)
    return _estimate(workload, returned, _unsorted(np.where(np.isinf(ordered), 0.0, run), order), curve, sample)


def estimate_unshaped(workload: Workload, curve: LatencyCurve, sample: SampledRollouts) -> RolloutEstimate:
    """Estimate the rollout of an unshaped batch: ``size`` candidates per prompt, which all finish and are returned."""
    run = sample.lengths[..., : workload.size]
    return _estimate(workload, run.mean(axis=-1), run, curve, sample)


# --- one simulated batch ----------------------------------------------------


def _stop_early(workload: Workload, ordered: Floats, tail_draws: Floats) -> tuple[Floats, Floats]:
    """Return each prompt's mean returned length, and how many tokens each candidate runs, shortest first.

    A sampled tail counts in the mean with the average of all candidates it may be: the same expectation, without noise.
    """
    size, longest = workload.size, workload.num_longest
    shortest = size - longest
    needed = workload.completion_place or size
    mth_shortest = ordered[..., needed - 1 : needed]
    if not longest:
        return _stop_behind(ordered, size, needed)
    deadline = np.full_like(mth_shortest, np.inf)
    if workload.cut:
        deadline = np.maximum(
            np.quantile(mth_shortest, QUANTILE, axis=1, keepdims=True, method="inverted_cdf"), mth_shortest
        )
    ends = np.minimum(ordered, deadline)
    short = ordered[..., :shortest].sum(axis=-1)
    place = np.arange(ordered.shape[-1])
    rest = (place >= shortest) & np.isfinite(ordered)
    if workload.tail is Tail.LONGEST:
        # Candidates that are late or hit the limit count only if the group would not be full without them.
        limit = workload.max_tokens or np.inf
        last = ((ordered < limit) & (ordered <= deadline)).sum(axis=-1, keepdims=True).clip(min=size)
        tail = np.where((place >= last - longest) & (place < last), ordered, 0.0).sum(axis=-1)
        return (short + tail) / size, ends
    tail = longest * np.where(rest, ends, 0.0).sum(axis=-1) / rest.sum(axis=-1)
    tail_draws = np.where(rest, tail_draws, np.inf)
    sampled = tail_draws <= np.partition(tail_draws, longest - 1, axis=-1)[..., longest - 1 : longest]
    # The others are stopped behind the K-th shortest or, since the deadline needs the M-th shortest, behind that.
    threshold = mth_shortest if workload.cut else ordered[..., shortest - 1 : shortest]
    return (short + tail) / size, np.where(sampled, ends, np.minimum(ordered, threshold))


def _stop_behind(ordered: Floats, size: int, needed: int) -> tuple[Floats, Floats]:
    """Return the same where the ``size`` shortest are returned: the others are stopped behind the ``needed``-th."""
    return ordered[..., :size].mean(axis=-1), np.minimum(ordered, ordered[..., needed - 1 : needed])


def _unsorted(values: Floats, order: NDArray[np.int64]) -> Floats:
    """Return ``values`` in the order in which the candidates started, which is that of the engine's queue."""
    back = np.empty_like(values)
    np.put_along_axis(back, order, values, axis=-1)
    return back


def _estimate(
    workload: Workload, returned: Floats, run: Floats, curve: LatencyCurve, sample: SampledRollouts
) -> RolloutEstimate:
    rounds = run.shape[0]
    decoding = curve.rollout_seconds_batch(run.reshape(rounds, -1), workload.capacity, sample.weight)
    starting = workload.start_seconds * np.count_nonzero(run) * sample.weight / rounds
    return RolloutEstimate(
        returned_mean=float(returned.mean()),
        generated_tokens=float(run.sum()) * sample.weight / rounds,
        seconds=float(decoding.mean()) + starting,
    )
