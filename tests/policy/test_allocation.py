"""Candidates of prompts: in a cohort, one at a time, and under load."""

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.allocation import (
    WINDOW,
    Brownout,
    ShadowPrice,
    allocate,
    allocate_by_std,
    allocate_evenly,
    cv_log_mean,
    reduce_candidates,
)

LOW, HIGH, TARGET = 8, 16, 12.0
TARGETS = [8.3, *(pytest.param(target, marks=pytest.mark.nightly) for target in (8, 15.5))]
SMALL_WEIGHTS = st.lists(st.integers(1, 6), min_size=1, max_size=5)
WEIGHTS = st.lists(
    st.integers(1, 3).map(float) | st.floats(1e-9, 100) | st.floats(1e-100, 1e100), min_size=1, max_size=40
)
BOUNDS = st.tuples(st.integers(1, 12), st.integers(0, 12)).map(lambda b: (b[0], b[0] + b[1]))


def cost(weights: Sequence[int], counts: Sequence[int]) -> Fraction:
    return sum((Fraction(w, m) for w, m in zip(weights, counts, strict=True)), Fraction(0))


# --- the batch optimum ------------------------------------------------------


@given(SMALL_WEIGHTS, st.integers(1, 3), st.integers(0, 4), st.data())
def test_the_budget_is_shared_optimally(weights: list[int], low: int, more: int, data: st.DataObject) -> None:
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
def test_a_larger_weight_never_gets_fewer_candidates(
    weights: list[float], budget: int, bounds: tuple[int, int]
) -> None:
    counts = allocate(weights, budget, *bounds)
    for (w, m), (v, k) in itertools.combinations(zip(weights, counts, strict=True), 2):
        assert w <= v or m >= k
        assert w >= v or m <= k
        assert w != v or m - k in (0, 1)  # equal weights share evenly, the earlier first


@given(WEIGHTS, st.integers(0, 1000), BOUNDS, st.integers(-30, 30))
def test_the_unit_of_the_weights_does_not_matter(
    weights: list[float], budget: int, bounds: tuple[int, int], power: int
) -> None:
    scaled = [math.ldexp(w, power) for w in weights]
    assert allocate(scaled, budget, *bounds) == allocate(weights, budget, *bounds)


def test_equal_weights_share_evenly_and_the_earlier_come_first() -> None:
    assert allocate([3.0] * 4, 38, LOW, HIGH) == [10, 10, 9, 9]
    assert allocate([1.0] * 5000, 5000 * 12 + 7, LOW, HIGH) == [13] * 7 + [12] * 4993


def test_an_empty_batch_gets_nothing() -> None:
    assert allocate([], 0, LOW, HIGH) == []
    assert allocate_by_std([], budget=12, low=LOW, high=HIGH) == []


# --- from stds to candidates ------------------------------------------------


@pytest.mark.parametrize(
    ("stds", "weights"),
    [
        ([10.0, 30.0, 20.0], [1 / 20, 21 / 20, 11 / 20]),
        ([4.0, 4.0], [1.0, 1.0]),
        ([0.0, 5e-324], [1.0, 1.0]),
        ([5.0, None, 100.0, None, 30.0], [1 / 95, 41 / 95, 96 / 95, 41 / 95, 26 / 95]),
        ([None] * 3, [1.0] * 3),
    ],
)
def test_weights_are_the_formula_of_the_paper_and_an_unknown_std_is_the_mean_of_known_stds(
    stds: list[float | None], weights: list[float]
) -> None:
    for budget in range(LOW * len(stds), HIGH * len(stds) + 1):
        assert allocate_by_std(stds, budget=budget, low=LOW, high=HIGH) == allocate(weights, budget, LOW, HIGH)


@given(st.floats(1, 50), st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_even_shares_keep_their_mean_over_all_cohorts(mean: float, cohorts: list[int]) -> None:
    carried = 0.0
    counts = list[int]()
    for groups in cohorts:
        some, carried = allocate_evenly(mean, groups, carried)
        counts += some
    assert max(counts) - min(counts) <= 1
    assert abs(sum(counts) - mean * sum(cohorts)) <= 0.5 + 1e-9


# --- shadow price ------------------------------------------------------------


RNG = np.random.default_rng(0)


STATIONARY = RNG.lognormal(4, 1, 2000).tolist()
DRIFTING = (RNG.lognormal(4, 0.7, 2000) * np.exp(np.linspace(3, -3, 2000))).tolist()
STREAMS = [
    pytest.param(DRIFTING, id="drifting down"),
    pytest.param(DRIFTING[::-1], id="drifting up"),
    pytest.param(sorted(STATIONARY), id="sorted"),
    pytest.param(sorted(STATIONARY, reverse=True), id="sorted, widest first"),
    pytest.param(sorted(STATIONARY)[::2] + sorted(STATIONARY, reverse=True)[::2], id="up and down"),
    pytest.param(([0.0] * 500 + [1000.0] * 500) * 2, id="blocks"),
    pytest.param([0.0, 1000.0] * 1000, id="by turns"),
    pytest.param([7.0] * 2000, id="constant"),
    pytest.param([float(10 ** (i / 100)) for i in range(2000)], id="exploding"),
    pytest.param([std if i % 3 else None for i, std in enumerate(STATIONARY)], id="a third unseen"),
    pytest.param([None] * 2000, id="all unseen"),
]


@pytest.mark.untraced
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_mean_stays_at_the_target(stream: list[float | None], target: float) -> None:
    price = ShadowPrice()
    counts = [price.allocate(std, target, LOW, HIGH) for std in stream]
    assert statistics.fmean(counts) == pytest.approx(target, rel=0.02)
    assert all(LOW <= m <= HIGH for m in counts)


@pytest.mark.untraced
@pytest.mark.parametrize("target", TARGETS)
def test_the_mean_is_at_the_target_throughout_the_stream(target: float) -> None:
    price = ShadowPrice()
    counts = [price.allocate(std, target, LOW, HIGH) for std in STATIONARY]
    for begin in range(WINDOW, len(counts), WINDOW):
        assert statistics.fmean(counts[begin : begin + WINDOW]) == pytest.approx(target, rel=0.05)


def test_a_request_gets_nearly_as_many_candidates_as_in_a_cohort() -> None:
    price = ShadowPrice()
    singles = [price.allocate(std, TARGET, LOW, HIGH) for std in STATIONARY[-3 * WINDOW :]]
    last = STATIONARY[-WINDOW:]
    batch = allocate_by_std(last, budget=round(TARGET * WINDOW), low=LOW, high=HIGH)
    apart = [abs(m - k) for m, k in zip(singles[-WINDOW:], batch, strict=True)]
    assert max(apart) <= 3
    assert statistics.fmean(apart) < 1


@given(st.lists(st.floats(0, 1e6), max_size=30), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_wider_prompt_gets_at_least_as_many_candidates_except_for_its_own_effect_on_the_price(
    before: list[float], one: float, two: float
) -> None:
    counts = []
    for std in sorted([one, two]):
        price = ShadowPrice()
        for known in before:
            price.allocate(known, TARGET, LOW, HIGH)
        counts.append(price.allocate(std, TARGET, LOW, HIGH))
    assert counts[0] <= counts[1] + 1


def test_a_request_without_std_is_allocated_like_an_average_request() -> None:
    price = ShadowPrice([10.0, 50.0])
    known = ShadowPrice([10.0, 50.0])
    assert price.allocate(None, TARGET, LOW, HIGH) == known.allocate(30.0, TARGET, LOW, HIGH)
    assert price.recent == [10.0, 50.0]


def test_the_state_survives_json_and_continues_unchanged() -> None:
    price = ShadowPrice()
    for std in STATIONARY[:300]:
        price.allocate(std, TARGET, LOW, HIGH)
    twin = ShadowPrice(**json.loads(json.dumps(asdict(price))))
    assert twin == price
    for std in STATIONARY[300:500]:
        assert twin.allocate(std, TARGET, LOW, HIGH) == price.allocate(std, TARGET, LOW, HIGH)


def test_the_target_can_change_between_requests() -> None:
    price = ShadowPrice()
    for std in STATIONARY[:800]:
        price.allocate(std, 10, LOW, HIGH)
    counts = [price.allocate(std, 14, LOW, HIGH) for std in STATIONARY[800:]]
    assert statistics.fmean(counts) == pytest.approx(14, rel=0.02)


@pytest.mark.parametrize(
    "wrong", [{"recent": [1.0, math.nan]}, {"recent": [-1.0]}, {"debt": math.nan}, {"carry": 0.5}], ids=str
)
def test_a_state_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a number in"):
        ShadowPrice(**wrong)


# --- brownout ----------------------------------------------------------------


START, END = 100, 300
QUEUES = st.lists(st.integers(0, 500), max_size=30)


def line(waiting: int, start: float = START) -> float:
    return min(max((END - (START - start) - waiting) / (END - START), 0), 1)


@given(QUEUES)
def test_the_scale_stays_between_its_falling_and_its_rising_line(queues: list[int]) -> None:
    brownout = Brownout(START, END)
    for waiting in queues:
        assert line(waiting, start=START / 2) <= brownout.update(waiting) <= line(waiting)


@given(QUEUES)
def test_reading_the_scale_for_another_queue_changes_nothing(queues: list[int]) -> None:
    brownout = Brownout(START, END)
    for count in queues:
        before = brownout.scale
        assert brownout.scale_at(count) == brownout.scale_at(count)
        assert brownout.scale == before
        assert brownout.scale_at(count) == brownout.update(count) == brownout.scale


@given(QUEUES)
def test_the_scale_changes_no_more_than_its_lines_require(queues: list[int]) -> None:
    brownout = Brownout(START, END)
    for waiting in queues:
        before = brownout.scale
        after = brownout.update(waiting)
        assert after in (before, line(waiting), line(waiting, start=START / 2))
        assert before == after or not line(waiting, start=START / 2) <= before <= line(waiting)


def test_redundancy_falls_linearly_and_is_full_again_at_half_of_start() -> None:
    brownout = Brownout(START, END)
    assert [brownout.update(waiting) for waiting in (100, 200, 300, 900)] == [1, 0.5, 0, 0]
    assert [brownout.update(waiting) for waiting in (300, 250, 150, 50)] == [0, 0, 0.5, 1]


@given(st.integers(1, 64), st.integers(0, 64), st.floats(0, 1))
def test_a_reduced_group_has_at_least_its_size_and_at_most_its_candidates(size: int, extra: int, scale: float) -> None:
    assert size <= reduce_candidates(size + extra, size, scale) <= size + extra


def test_brownout_starts_at_half_of_the_queue_but_not_below_the_capacity() -> None:
    assert [Brownout.for_queue(400, 50).update(waiting) for waiting in (200, 300)] == [1, 0.5]
    assert [Brownout.for_queue(400, 300).update(waiting) for waiting in (300, 350)] == [1, 0.5]
    assert Brownout.for_queue(400, 400).update(10_000) == 1
    assert Brownout.for_queue(400, 500).update(10_000) == 1


def test_cv_log_is_the_formula_of_the_public_code() -> None:
    assert cv_log_mean(0, 300, 8) == 8
    assert cv_log_mean(60, 300, 8) == 8  # 5 std / mean = 1
    assert cv_log_mean(75, 300, 8) == pytest.approx(8 * (1 + 1.5 * math.log(1.25)))
    assert cv_log_mean(300, 300, 8) == 14


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6), st.integers(1, 64))
def test_cv_log_is_clipped(std: float, mean: float, size: int) -> None:
    open_form = size * (1 + 1.5 * math.log(5 * std / mean))
    assert cv_log_mean(std, mean, size) == pytest.approx(min(max(open_form, size), 1.75 * size))


def test_full_half_and_no_redundancy() -> None:
    assert [reduce_candidates(12, 8, scale) for scale in (1.0, 0.5, 0.0)] == [12, 10, 8]
