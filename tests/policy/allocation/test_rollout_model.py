"""The model of a rollout, against closed forms and against counting candidate by candidate."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.allocation.optimum import allocate_by_std
from darts_server.policy.allocation.rollout_model import (
    QUEUED,
    SIMULATED,
    RolloutEstimate,
    SampledRollouts,
    Workload,
    estimate_shaped,
    estimate_unshaped,
)
from darts_server.policy.latency.curve import LatencyCurve
from darts_server.policy.shaping import Tail
from tests.policy.allocation.test_budget import (
    FLAT,
    GPU,
    HIGH,
    MEAN,
    PROPORTIONAL,
    SIZE,
    prompts,
    rng,
)


def foresee(workload: Workload, mean_candidates: float, curve: LatencyCurve) -> RolloutEstimate:
    return estimate_shaped(workload, mean_candidates, curve, SampledRollouts.of(workload, HIGH, rng()))


def order_statistic(k: int, n: int) -> float:
    """Mean of the k-th shortest of n exponential lengths, over their mean."""
    return sum(1 / j for j in range(n - k + 1, n + 1))


@pytest.mark.parametrize("candidates", [8, 10, 12, 16])
def test_exponential_lengths_give_the_known_order_statistics(candidates: int) -> None:
    found = foresee(prompts(64), candidates, FLAT)
    returned = sum(order_statistic(k, candidates) for k in range(1, SIZE + 1)) / SIZE
    assert found.returned_mean == pytest.approx(MEAN * returned, rel=0.02)
    # They have no memory: each of the M that end takes the mean length of tokens, whichever candidate generates these.
    assert found.generated_tokens == pytest.approx(64 * SIZE * MEAN, rel=0.02)


@pytest.mark.parametrize("candidates", [8, 12, 16])
def test_with_flat_steps_the_longest_candidate_of_a_prompt_decides_the_time(candidates: int) -> None:
    found = foresee(prompts(1), candidates, FLAT)
    assert found.seconds == pytest.approx(0.02 * MEAN * order_statistic(SIZE, candidates), rel=0.03)


@pytest.mark.parametrize("candidates", [8, 11.5, 16])
def test_with_proportional_steps_the_sum_of_tokens_decides_the_time(candidates: float) -> None:
    for workload in (prompts(3), replace(prompts(50), capacity=100), prompts(5000)):
        found = foresee(workload, candidates, PROPORTIONAL)
        assert found.seconds == pytest.approx(0.004 * found.generated_tokens)


@pytest.mark.parametrize("workload", [prompts(3), replace(prompts(50), capacity=100), prompts(5000)])
@pytest.mark.parametrize("candidates", [8, 11.5, 16])
def test_each_candidate_that_starts_costs_the_same(workload: Workload, candidates: float) -> None:
    found = foresee(replace(workload, start_seconds=0.5), candidates, GPU)
    started = round(candidates * len(workload.means)) if len(workload.means) < 1000 else candidates * 5000
    assert found.seconds - foresee(workload, candidates, GPU).seconds == pytest.approx(0.5 * started, rel=1e-3)


def test_a_sampled_tail_has_the_mean_length_of_the_rest() -> None:
    candidates, shortest = 12, SIZE - 1
    found = foresee(replace(prompts(64), num_longest=1), candidates, PROPORTIONAL)
    ordered = [order_statistic(k, candidates) for k in range(1, candidates + 1)]
    tail = sum(ordered[shortest:]) / (candidates - shortest)
    assert found.returned_mean == pytest.approx(MEAN * (sum(ordered[:shortest]) + tail) / SIZE, rel=0.02)
    run = sum(ordered[:shortest]) + (candidates - shortest - 1) * ordered[shortest - 1] + tail
    assert found.generated_tokens == pytest.approx(64 * MEAN * run, rel=0.03)


@pytest.mark.parametrize("candidates", [8, 12, 15])
def test_half_a_candidate_more_has_half_the_effect_of_one_more(candidates: int) -> None:
    few, some, many = (foresee(prompts(64), candidates + more, FLAT).returned_mean for more in (0, 0.5, 1))
    assert few > some > many
    assert some == pytest.approx((few + many) / 2, rel=0.01)


@pytest.mark.parametrize("count", [1, 100, SIMULATED // HIGH, SIMULATED])
def test_a_scaled_down_batch_takes_the_time_of_the_full_one(count: int) -> None:
    alike = Workload(means=[MEAN] * count, ratios=[1.0], size=SIZE)
    found = foresee(alike, 12, GPU)
    assert found.returned_mean == pytest.approx(MEAN)
    assert found.generated_tokens == pytest.approx(12 * count * MEAN)
    assert found.seconds == pytest.approx(MEAN * GPU.step_seconds(12 * count))


@pytest.mark.parametrize("count", [4, QUEUED // HIGH, 1000])
def test_candidates_beyond_the_capacity_queue(count: int) -> None:
    alike = Workload(means=[MEAN] * count, ratios=[1.0], size=SIZE, capacity=4 * count)
    found = foresee(alike, 12, GPU)
    assert found.seconds == pytest.approx(3 * MEAN * GPU.step_seconds(4 * count), rel=0.01)


def test_large_batches_are_represented_by_prompts_at_even_distances() -> None:
    means = np.random.default_rng(0).lognormal(5, 0.7, 20_000)
    found = foresee(Workload(means=list(means), ratios=[1.0], size=SIZE), SIZE, FLAT)
    assert found.returned_mean == pytest.approx(float(means.mean()), rel=0.01)


def test_a_group_larger_than_the_simulation_is_simulated_with_one_prompt() -> None:
    size = SIMULATED + 1
    alike = Workload(means=[MEAN] * 2, ratios=[1.0], size=size)
    found = estimate_shaped(alike, size, FLAT, SampledRollouts.of(alike, size, rng()))
    assert found.generated_tokens == pytest.approx(2 * size * MEAN)


def test_the_odd_candidates_are_spread_over_long_and_short_prompts() -> None:
    means = [100.0] * 50 + [900.0] * 50
    found = foresee(Workload(means=means, ratios=[1.0], size=SIZE), 8.5, FLAT)
    assert found.generated_tokens == pytest.approx(8.5 * sum(means))


def test_a_prompt_with_a_larger_spread_is_given_more_candidates_and_a_saturated_one_has_no_tail() -> None:
    workload = replace(prompts(2), stds=[10.0, None], num_longest=1)
    draws = SampledRollouts.of(replace(workload, stds=[10.0, 90.0]), HIGH, rng())
    assert draws.allocate(12, SIZE).tolist() == [SIZE, HIGH]
    whole = estimate_shaped(workload, 12, FLAT, draws)
    saturated = estimate_shaped(replace(workload, saturated_at=HIGH), 12, FLAT, draws)
    assert saturated.returned_mean < whole.returned_mean
    assert saturated.seconds < whole.seconds
    shortest = sum(order_statistic(k, HIGH) for k in range(1, SIZE + 1)) / SIZE
    assert saturated.returned_mean == pytest.approx(MEAN * (1 + shortest) / 2, rel=0.02)


def counted(workload: Workload, mean_candidates: float, curve: LatencyCurve, draws: SampledRollouts) -> RolloutEstimate:
    """The same without arrays."""
    rounds, count, most = draws.lengths.shape
    few = math.floor(mean_candidates)
    odd = [math.floor((r + 1) * (mean_candidates - few)) > math.floor(r * (mean_candidates - few)) for r in draws.ranks]
    counts = [few + more for more in odd]
    if workload.stds is not None:
        budget = math.floor(count * mean_candidates + 0.5)
        counts = allocate_by_std(workload.stds, budget=budget, low=workload.size, high=most)
    returned, tokens, seconds = 0.0, 0.0, 0.0
    for lengths, tail_draws in zip(draws.lengths.tolist(), draws.tail_draws.tolist(), strict=True):
        groups = [lengths[i][: counts[i]] for i in range(count)]
        needs = [sorted(group)[workload.size - 1] for group in groups]
        deadline = sorted(needs)[math.ceil(0.9 * count) - 1] if workload.cut else math.inf
        batch = []
        for i, group in enumerate(groups):
            saturated = workload.saturated_at is not None and counts[i] >= workload.saturated_at
            rule = replace(workload, num_longest=0) if saturated else workload
            mean, run = counted_group(rule, group, tail_draws[i], max(deadline, needs[i]))
            returned += mean / (rounds * count)
            batch += run
        tokens += sum(batch) / rounds
        seconds += curve.rollout_seconds(batch, workload.capacity) / rounds
    return RolloutEstimate(returned, tokens, seconds)


def counted_group(
    workload: Workload, group: list[float], tail_draws: list[float], end: float
) -> tuple[float, list[float]]:
    size, tail = workload.size, workload.num_longest
    order = sorted(range(len(group)), key=lambda j: group[j])
    short, rest = order[: size - tail], order[size - tail :]
    total = sum(group[j] for j in short)
    need, last = group[order[size - 1]], group[short[-1]]
    if not tail:
        return total / size, [min(x, need) for x in group]
    if workload.tail is Tail.LONGEST:
        valid = [j for j in rest if group[j] <= end and group[j] < (workload.max_tokens or math.inf)]
        chosen = valid[-tail:] if len(valid) >= tail else rest[:tail]
        return (total + sum(group[j] for j in chosen)) / size, [min(x, end) for x in group]
    drawn = sorted(rest, key=lambda j: tail_draws[j])[:tail]
    stop = need if workload.cut else last
    run = [min(x, end) if j in drawn or j in short else min(x, stop) for j, x in enumerate(group)]
    return (total + tail * sum(min(group[j], end) for j in rest) / len(rest)) / size, run


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    size = draw(st.integers(1, 4))
    means = draw(st.lists(st.floats(5, 500), min_size=1, max_size=3)) * draw(st.integers(1, 40))
    spreads = st.lists(st.none() | st.floats(0, 400), min_size=len(means), max_size=len(means))
    return Workload(
        means=means,
        stds=draw(st.none() | spreads),
        saturated_at=draw(st.none() | st.just(size + 4)),
        ratios=draw(st.lists(st.floats(0.05, 8), min_size=1, max_size=40)),
        size=size,
        num_longest=draw(st.integers(0, size - 1)),
        tail=draw(st.sampled_from(Tail)),
        max_tokens=draw(st.none() | st.integers(20, 500)),
        cut=draw(st.booleans()),
        capacity=draw(st.none() | st.integers(1, 40)),
    )


@given(workloads(), st.integers(0, 8), st.sampled_from([FLAT, GPU]))
def test_the_estimate_equals_a_count_candidate_by_candidate(
    workload: Workload, halves: int, curve: LatencyCurve
) -> None:
    whole = SampledRollouts.of(workload, workload.size + 4, rng())
    few = replace(whole, lengths=whole.lengths[:2], tail_draws=whole.tail_draws[:2])  # rounds
    found = estimate_shaped(workload, workload.size + halves / 2, curve, few)
    by_hand = counted(workload, workload.size + halves / 2, curve, few)
    assert found.returned_mean == pytest.approx(by_hand.returned_mean)
    assert found.generated_tokens == pytest.approx(by_hand.generated_tokens)
    assert found.seconds == pytest.approx(by_hand.seconds)


@given(workloads(), st.sampled_from([FLAT, GPU]))
def test_without_extra_candidates_and_deadline_the_estimate_is_the_unshaped_one(
    workload: Workload, curve: LatencyCurve
) -> None:
    workload = replace(workload, cut=False)
    draws = SampledRollouts.of(workload, workload.size + 1, rng())
    plain, shaped = estimate_unshaped(workload, curve, draws), estimate_shaped(workload, workload.size, curve, draws)
    assert shaped.returned_mean == pytest.approx(plain.returned_mean)
    assert shaped.generated_tokens == pytest.approx(plain.generated_tokens)
    assert shaped.seconds == pytest.approx(plain.seconds)


@given(workloads(), st.integers(0, 8))
def test_a_deadline_never_makes_a_rollout_longer(workload: Workload, halves: int) -> None:
    draws = SampledRollouts.of(workload, workload.size + 4, rng())
    cut, whole = (
        estimate_shaped(replace(workload, cut=cut), workload.size + halves / 2, FLAT, draws).returned_mean
        for cut in (True, False)
    )
    assert cut <= whole * (1 + 1e-12)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [math.nan], [math.inf]])
def test_means_and_ratios_out_of_range_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="means must be at least one, all finite and above 0"):
        Workload(means=values, ratios=[1.0], size=8)
    with pytest.raises(ValueError, match="ratios must be at least one, all finite and above 0"):
        Workload(means=[1.0], ratios=values, size=8)


def test_a_workload_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="stds must be as many as means, 2, got 1"):
        Workload(means=[1.0, 2.0], ratios=[1.0], size=8, stds=[None])
    for size, longest in ((8, 8), (8, -1), (0, 0)):
        with pytest.raises(ValueError, match="num_longest must be in"):
            Workload(means=[1.0], ratios=[1.0], size=size, num_longest=longest)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        Workload(means=[1.0], ratios=[1.0], size=8, max_tokens=0)
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        Workload(means=[1.0], ratios=[1.0], size=8, capacity=0)


@pytest.mark.parametrize("mean_candidates", [7.5, 16.5, math.nan])
def test_more_candidates_than_were_sampled_are_refused(mean_candidates: float) -> None:
    with pytest.raises(ValueError, match=r"mean_candidates must be in \[8, 16\]"):
        foresee(prompts(2), mean_candidates, FLAT)
