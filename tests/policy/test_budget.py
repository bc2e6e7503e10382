"""The mean number of candidates: the public code's formula, and the best by utility."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from darts_server.policy.budget import (
    BudgetTrial,
    choose_mean_candidates,
    cv_log_mean,
    predict_seconds,
    try_mean_candidates,
)
from darts_server.policy.deadline import Deadline
from darts_server.policy.latency.curve import LatencyCurve
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.shaping import BudgetKind, Shaping
from darts_server.policy.simulation.batch import Plan
from darts_server.policy.simulation.forecast import Expectation, forecast
from darts_server.policy.simulation.machine import Machine, StepTime

Floats = NDArray[np.float64]

SIZE, HIGH, MEAN = 8, 16, 300.0
FLAT = LatencyCurve((1.0,), (0.02,))
PROPORTIONAL = LatencyCurve((1.0,), (0.004,), 0.004)
GPU = LatencyCurve((1.0, 128.0, 256.0), (0.02, 0.02, 0.04), 0.0002)
UNLIMITED = {"max_num_seqs": 1 << 20}

MIDDLES = (np.arange(4000) + 0.5) / 4000
EXPONENTIAL = -np.log(1 - MIDDLES)
NARROW = np.sort(np.random.default_rng(0).lognormal(-0.02, 0.2, 2000))
WIDE = np.sort(np.random.default_rng(0).lognormal(-0.125, 0.5, 2000))


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def prompts(count: int, ratios: Floats = EXPONENTIAL) -> Expectation:
    return Expectation([MEAN] * count, [None] * count, ratios)


def policy(aversion: float = 1.0, longest: int = 0, most: float = HIGH / SIZE) -> Shaping:
    return Shaping(
        budget=BudgetKind.UTILITY, budget_aversion=aversion, num_longest=longest, redundancy=1.0, max_redundancy=most
    )


def tried(shaping: Shaping, expectation: Expectation, curve: LatencyCurve, **machine: int) -> list[BudgetTrial]:
    return try_mean_candidates(shaping, SIZE, expectation, Machine(StepTime(curve), **UNLIMITED | machine), rng())


def chosen(shaping: Shaping, expectation: Expectation, curve: LatencyCurve, **machine: int) -> BudgetTrial:
    return choose_mean_candidates(shaping, SIZE, expectation, Machine(StepTime(curve), **UNLIMITED | machine), rng())


# --- the public code's closed form ------------------------------------------


def test_cv_log_is_the_formula_of_the_public_code() -> None:
    assert cv_log_mean(0, 300, 8) == 8
    assert cv_log_mean(60, 300, 8) == 8  # 5 std / mean = 1
    assert cv_log_mean(75, 300, 8) == pytest.approx(8 * (1 + 1.5 * math.log(1.25)))
    assert cv_log_mean(300, 300, 8) == 14


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6), st.integers(1, 64))
def test_cv_log_is_clipped(std: float, mean: float, size: int) -> None:
    open_form = size * (1 + 1.5 * math.log(5 * std / mean))
    assert cv_log_mean(std, mean, size) == pytest.approx(min(max(open_form, size), 1.75 * size))


def test_cv_log_refuses_values_out_of_range() -> None:
    for std in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="std must be finite and at least 0"):
            cv_log_mean(std, 300, 8)
    for mean in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="mean must be finite and above 0"):
            cv_log_mean(10, mean, 8)
    with pytest.raises(ValueError, match="size must be at least 1"):
        cv_log_mean(10, 300, 0)
    assert cv_log_mean(1e308, 1e-308, 8) == 14


# --- the best of them -------------------------------------------------------


@pytest.mark.parametrize("longest", [0, 1])
def test_whole_and_half_numbers_are_tried_and_the_best_is_chosen(longest: int) -> None:
    shaping, expectation = policy(0.5, longest, most=1.5), prompts(16, WIDE)
    trials = tried(shaping, expectation, GPU)
    assert [trial.mean_candidates for trial in trials] == [8, 8.5, 9, 9.5, 10, 10.5, 11, 11.5, 12]
    batches, machine = expectation.sample(12, rng()), Machine(StepTime(GPU), **UNLIMITED)
    plain = forecast(Plan.of(None, SIZE, expectation.stds), batches, machine)
    for trial in trials:
        found = forecast(Plan.of(shaping, SIZE, expectation.stds, trial.mean_candidates), batches, machine)
        assert trial.seconds == found.seconds
        shorter = 1 - found.mean_length / plain.mean_length
        assert trial.utility == pytest.approx(shorter - 0.5 * found.seconds / plain.seconds)
    assert chosen(shaping, expectation, GPU) == max(trials, key=lambda trial: trial.utility)


def test_equal_bounds_leave_no_choice() -> None:
    [trial] = tried(policy(most=1.0), prompts(4), GPU)
    assert trial.mean_candidates == SIZE


@pytest.mark.parametrize("ratios", [NARROW, WIDE, EXPONENTIAL])
def test_without_budget_aversion_the_maximum_is_chosen(ratios: Floats) -> None:
    assert chosen(policy(0.0), prompts(64, ratios), PROPORTIONAL).mean_candidates == HIGH


def test_with_high_aversion_no_candidates_are_added_if_they_cost_time() -> None:
    for longest, places in ((0, 1 << 20), (1, 100)):
        found = chosen(policy(1e6, longest), prompts(64, NARROW), PROPORTIONAL, max_num_seqs=places)
        assert found.mean_candidates == SIZE


def test_with_high_aversion_the_maximum_is_chosen_if_candidates_save_time() -> None:
    assert chosen(policy(1e6), prompts(8), FLAT).mean_candidates >= HIGH - 1


def test_equal_lengths_leave_nothing_to_gain() -> None:
    assert chosen(policy(0.0), prompts(8, np.ones(1)), FLAT).mean_candidates == SIZE


def test_a_moderate_aversion_gives_a_mean_between_the_bounds() -> None:
    for count, curve in ((64, PROPORTIONAL), (1000, GPU)):
        assert SIZE < chosen(policy(), prompts(count, WIDE), curve).mean_candidates < HIGH


@given(
    st.sampled_from([NARROW, WIDE, EXPONENTIAL]),
    st.sampled_from([FLAT, GPU, PROPORTIONAL]),
    st.sampled_from([0, 1]),
    st.lists(st.floats(0, 20), min_size=2, max_size=2).map(sorted),
)
def test_higher_aversion_never_gives_a_longer_rollout(
    ratios: Floats, curve: LatencyCurve, longest: int, aversions: list[float]
) -> None:
    cheap, dear = (
        chosen(policy(aversion, longest, most=1.25), prompts(32, ratios), curve).seconds for aversion in aversions
    )
    assert dear <= cheap * (1 + 1e-9)


def test_the_same_seed_gives_the_same_choice() -> None:
    cut = replace(policy(longest=1), deadline=Deadline())
    assert chosen(cut, prompts(64, WIDE), GPU) == chosen(cut, prompts(64, WIDE), GPU)


@pytest.mark.parametrize(("count", "longest"), [(64, 0), (64, 1), (1000, 1)])
def test_another_seed_chooses_a_mean_that_is_hardly_worse(count: int, longest: int) -> None:
    machine = Machine(StepTime(GPU), **UNLIMITED)
    draws = [np.random.default_rng(seed) for seed in range(12)]
    found = [try_mean_candidates(policy(longest=longest), SIZE, prompts(count, WIDE), machine, each) for each in draws]
    utilities = np.asarray([[trial.utility for trial in trials] for trials in found])
    usual = utilities.mean(axis=0)
    worse = usual.max() - usual[utilities.argmax(axis=1)]  # per cent of length, or of time
    assert worse.mean() < 0.015
    assert worse.max() < 0.05


def test_the_choice_follows_from_the_allocation_and_the_saturation_that_will_be_used() -> None:
    means = [MEAN / 3] * 32 + [MEAN] * 32
    alike = replace(prompts(64, WIDE), means=means)
    spread = replace(alike, stds=[mean / 2 for mean in means])
    adaptive = replace(policy(longest=1), adaptive=True)
    # The long prompts alone set the time. From 12 on average on all of these are saturated, and no tail is waited for.
    assert chosen(policy(longest=1), alike, GPU).mean_candidates < 12 <= chosen(adaptive, spread, GPU).mean_candidates
    utility = {trial.mean_candidates: trial.utility for trial in tried(adaptive, spread, GPU)}
    assert utility[13] > utility[11] + 0.3


def test_the_order_of_the_prompts_does_not_matter() -> None:
    means = [100.0 + 10 * number for number in range(64)]
    one, two = (
        chosen(policy(longest=1), Expectation(order, [None] * 64, NARROW), GPU) for order in (means, means[::-1])
    )
    assert one.mean_candidates == pytest.approx(two.mean_candidates, abs=0.5)


def test_what_prunes_is_forecast_as_its_choice_by_length() -> None:
    by_length = policy(longest=1)
    expected = chosen(by_length, prompts(32, WIDE), GPU)
    pruning = replace(by_length, pruning=Pruning(), target_positive_ratio=0.5, refill=True)
    for shaping in (pruning, replace(pruning, sample_survivors=True)):
        assert chosen(shaping, prompts(32, WIDE), GPU) == expected


def test_a_group_of_one_has_no_tail() -> None:
    machine = Machine(StepTime(GPU), **UNLIMITED)
    found = try_mean_candidates(policy(longest=1), 1, prompts(32, WIDE), machine, rng())
    assert [trial.mean_candidates for trial in found] == [1, 1.5, 2]


def test_a_batch_is_predicted_with_any_mean_that_is_wanted() -> None:
    shaping, expectation, machine = policy(longest=1), prompts(32, WIDE), Machine(StepTime(GPU), **UNLIMITED)
    trials = {trial.mean_candidates: trial.seconds for trial in tried(shaping, expectation, GPU)}
    for wanted, used in ((11.5, 11.5), (1, SIZE), (99, HIGH)):
        assert predict_seconds(wanted, shaping, SIZE, expectation, machine, rng()) == trials[used]


def test_of_a_wide_range_some_are_tried() -> None:
    trials = tried(policy(most=4.0), prompts(16, WIDE), GPU)
    found = [trial.mean_candidates for trial in trials]
    assert (found[0], found[-1], len(found)) == (SIZE, 4 * SIZE, 17)
    assert {later - earlier for earlier, later in pairwise(found)} == {1.5}


@pytest.mark.parametrize("places", [16, 40, 64, 300])
def test_a_large_batch_takes_as_long_as_all_of_it(places: int) -> None:
    """Of 2,000 prompts 256 are simulated: a place stands for 8 sequences, so that 64 are 8, and 300 not 38."""
    expectation, machine = prompts(2000, NARROW), Machine(StepTime(GPU), max_num_seqs=places)
    plan = Plan.of(policy(longest=1), SIZE, expectation.stds, 12)
    whole = forecast(plan, expectation.sample(12, rng(), 1), machine)
    found = predict_seconds(12, policy(longest=1), SIZE, expectation, machine, rng())
    assert found == pytest.approx(whole.seconds, rel=0.03)


def test_a_large_batch_of_large_groups_keeps_its_deadline() -> None:
    wide = replace(policy(longest=1, most=150.0), deadline=Deadline())
    expectation, machine = prompts(64, EXPONENTIAL), Machine(StepTime(FLAT), **UNLIMITED)
    cut, whole = (
        predict_seconds(12, shaping, SIZE, expectation, machine, rng())
        for shaping in (wide, replace(wide, deadline=None))
    )
    assert cut < 0.8 * whole
