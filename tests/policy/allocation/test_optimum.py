"""Allocation of a cohort: the exact optimum, and from stds to candidates."""

import itertools
import math
import time
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.allocation.optimum import allocate, allocate_by_std, allocate_evenly, weights_from_stds
from darts_server.policy.allocation.shadow_price import ShadowPrice, ShadowPriceState

LOW, HIGH, TARGET = 8, 16, 12.0
SMALL_WEIGHTS = st.lists(st.integers(0, 6), min_size=1, max_size=5)
WEIGHTS = st.lists(
    st.integers(0, 3).map(float) | st.floats(0, 100) | st.floats(0, allow_infinity=False), min_size=1, max_size=40
)
BOUNDS = st.tuples(st.integers(1, 12), st.integers(0, 12)).map(lambda b: (b[0], b[0] + b[1]))


def cost(weights: Sequence[int], counts: Sequence[int]) -> Fraction:
    return sum((Fraction(w, m) for w, m in zip(weights, counts, strict=True)), Fraction(0))


def continuous(weights: Sequence[float], budget: float, low: int, high: int) -> list[float]:
    """clip(sqrt(w / mu), low, high) with the sum at ``budget``, by bisection of the scale."""
    roots = np.sqrt(weights)
    few, many = 0.0, high / float(roots.min())
    for _ in range(200):
        scale = (few + many) / 2
        few, many = (few, scale) if np.clip(scale * roots, low, high).sum() > budget else (scale, many)
    return [float(x) for x in np.clip(few * roots, low, high)]


# --- the batch optimum ------------------------------------------------------


@given(SMALL_WEIGHTS, st.integers(1, 3), st.integers(0, 4), st.data())
def test_no_other_way_to_share_the_budget_is_better(
    weights: list[int], low: int, more: int, data: st.DataObject
) -> None:
    high = low + more
    budget = data.draw(st.integers(low * len(weights), high * len(weights)))
    ways = itertools.product(range(low, high + 1), repeat=len(weights))
    counts = allocate(weights, budget, low, high)
    assert sum(counts) == budget
    assert cost(weights, counts) == min(cost(weights, way) for way in ways if sum(way) == budget)


@given(WEIGHTS, st.integers(-5, 1000), BOUNDS)
def test_the_budget_is_met_exactly_or_clipped_to_the_bounds(
    weights: list[float], budget: int, bounds: tuple[int, int]
) -> None:
    low, high = bounds
    counts = allocate(weights, budget, low, high)
    assert sum(counts) == min(max(budget, low * len(weights)), high * len(weights))
    assert all(low <= m <= high for m in counts)


@given(WEIGHTS, st.integers(0, 1000), BOUNDS)
def test_a_larger_weight_never_gets_fewer(weights: list[float], budget: int, bounds: tuple[int, int]) -> None:
    counts = allocate(weights, budget, *bounds)
    for (w, m), (v, k) in itertools.combinations(zip(weights, counts, strict=True), 2):
        assert w <= v or m >= k
        assert w >= v or m <= k
        assert w != v or m - k in (0, 1)  # equal weights share evenly, the earlier first


@given(WEIGHTS, st.integers(0, 1000), BOUNDS, st.integers(-30, 30))
def test_the_unit_of_the_weights_does_not_matter(
    weights: list[float], budget: int, bounds: tuple[int, int], power: int
) -> None:
    scaled = [math.ldexp(w, power) if 1e-200 < w < 1e200 else 0.0 for w in weights]
    kept = [w if 1e-200 < w < 1e200 else 0.0 for w in weights]
    assert allocate(scaled, budget, *bounds) == allocate(kept, budget, *bounds)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_large_batch_is_within_rounding_of_the_continuous_optimum(seed: int, share: float) -> None:
    weights = np.random.default_rng(seed).lognormal(3, 1, 5000)
    budget = round(len(weights) * (LOW + share * (HIGH - LOW)))
    counts = np.array(allocate(weights.tolist(), budget, LOW, HIGH))
    ideal = np.array(continuous(weights.tolist(), budget, LOW, HIGH))
    assert counts.sum() == budget
    assert np.abs(counts - ideal).max() < 1
    rounded = np.floor(ideal)  # the continuous optimum, rounded to the budget in some way
    rounded[np.argsort(rounded - ideal)[: budget - int(rounded.sum())]] += 1
    assert (weights / ideal).sum() * (1 - 1e-9) <= (weights / counts).sum() <= (weights / rounded).sum()


def test_a_large_batch_equals_the_greedy_allocation_candidate_by_candidate() -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 500, 300).tolist()  # with ties
    counts = [LOW] * len(weights)
    for _ in range(700):
        best = max(range(len(weights)), key=lambda i: gain(weights[i], counts[i]) if counts[i] < HIGH else -1)
        counts[best] += 1
    allotted = allocate(weights, 700 + LOW * len(weights), LOW, HIGH)
    assert cost(weights, allotted) == cost(weights, counts)


def gain(weight: int, m: int) -> Fraction:
    return Fraction(weight, m * (m + 1))


def test_equal_weights_share_evenly_and_the_earlier_come_first() -> None:
    assert allocate([3.0] * 4, 38, LOW, HIGH) == [10, 10, 9, 9]
    assert allocate([0.0] * 4, 38, LOW, HIGH) == [10, 10, 9, 9]
    assert allocate([1.0] * 5000, 5000 * 12 + 7, LOW, HIGH) == [13] * 7 + [12] * 4993


def test_weights_of_zero_get_more_only_when_the_others_are_full() -> None:
    assert allocate([0.0, 1e-9, 0.0, 5.0], 4 * LOW + 10, LOW, HIGH) == [8, 10, 8, 16]
    assert allocate([0.0, 1e-9, 0.0, 5.0], 4 * LOW + 17, LOW, HIGH) == [9, 16, 8, 16]
    assert allocate([1e-300, 1e-290, 5.0], 3 * LOW + 9, LOW, HIGH) == [8, 9, 16]


def test_an_empty_batch_gets_nothing() -> None:
    assert allocate([], 0, LOW, HIGH) == []
    assert allocate_by_std([], budget=12, low=LOW, high=HIGH) == []


def test_a_hundred_thousand_prompts_take_less_than_a_second() -> None:
    weights = np.random.default_rng(0).lognormal(3, 1, 100_000).tolist()
    for batch in (weights, [1.0] * len(weights)):
        began = time.process_time()
        allocate(batch, 12 * len(batch), LOW, HIGH)
        assert time.process_time() - began < 1


@pytest.mark.parametrize(("low", "high"), [(0, 4), (5, 4), (-1, 3)])
def test_bounds_in_the_wrong_order_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="1 <= low <= high"):
        allocate([1.0], 4, low, high)
    with pytest.raises(ValueError, match="1 <= low <= high"):
        ShadowPrice(4, low, high)


@pytest.mark.parametrize("nonsense", [-0.1, math.nan, math.inf])
def test_weights_and_stds_out_of_range_are_refused(nonsense: float) -> None:
    with pytest.raises(ValueError, match="weights must be finite and at least 0"):
        allocate([1.0, nonsense], 20, LOW, HIGH)
    with pytest.raises(ValueError, match="stds must be finite and at least 0"):
        weights_from_stds([1.0, nonsense])
    with pytest.raises(ValueError, match="stds must be finite and at least 0"):
        allocate_by_std([None, nonsense], budget=20, low=LOW, high=HIGH)
    with pytest.raises(ValueError, match="std must be finite and at least 0"):
        ShadowPrice(TARGET, LOW, HIGH).candidates(nonsense)
    with pytest.raises(ValueError, match="recent must be a number in"):
        ShadowPriceState((1.0, nonsense))


# --- from stds to candidates ------------------------------------------------


def test_weights_are_the_papers() -> None:
    assert weights_from_stds([10.0, 30.0, 20.0]) == [1 / 20, 21 / 20, 11 / 20]
    assert weights_from_stds([4.0, 4.0]) == [1.0, 1.0]
    assert weights_from_stds([0.0, 5e-324]) == [1.0, 1.0]
    assert weights_from_stds([]) == []


def test_a_wider_prompt_gets_more_candidates() -> None:
    assert allocate_by_std([5.0, 100.0, 30.0], budget=36, low=LOW, high=HIGH) == [8, 16, 12]


def test_a_prompt_without_std_takes_the_mean_of_the_known_ones() -> None:
    stds = [5.0, None, 100.0, None, 30.0]
    filled = [5.0, 45.0, 100.0, 45.0, 30.0]
    assert allocate_by_std(stds, budget=60, low=LOW, high=HIGH) == allocate(weights_from_stds(filled), 60, LOW, HIGH)


def test_without_any_known_std_all_share_evenly() -> None:
    assert allocate_by_std([None] * 3, budget=31, low=LOW, high=HIGH) == [11, 10, 10]


@given(st.floats(1, 50), st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_an_even_share_has_its_mean_over_all_cohorts(mean: float, cohorts: list[int]) -> None:
    carried, counts = 0.0, list[int]()
    for groups in cohorts:
        some, carried = allocate_evenly(mean, groups, carried)
        counts += some
    assert max(counts) - min(counts) <= 1
    assert abs(sum(counts) - mean * sum(cohorts)) <= 0.5 + 1e-9
