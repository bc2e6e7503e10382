"""The mean number of candidates: the public code's formula, and the best by utility."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from darts_server.policy.allocation.budget import choose_mean_candidates, cv_log_mean
from darts_server.policy.allocation.rollout_model import (
    Workload,
)
from darts_server.policy.latency.curve import LatencyCurve

Floats = NDArray[np.float64]

SIZE, HIGH, MEAN = 8, 16, 300.0
FLAT = LatencyCurve((1.0,), (0.02,))
PROPORTIONAL = LatencyCurve((1.0,), (0.004,), 0.004)
GPU = LatencyCurve((1.0, 128.0, 256.0), (0.02, 0.02, 0.04), 0.0002)

MIDDLES = (np.arange(4000) + 0.5) / 4000
EXPONENTIAL = -np.log(1 - MIDDLES)
NARROW = np.sort(np.random.default_rng(0).lognormal(-0.02, 0.2, 2000))
WIDE = np.sort(np.random.default_rng(0).lognormal(-0.125, 0.5, 2000))


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def prompts(count: int, ratios: Floats = EXPONENTIAL) -> Workload:
    return Workload(means=[MEAN] * count, ratios=ratios, size=SIZE)


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


def test_whole_and_half_numbers_are_tried_and_the_best_is_chosen() -> None:
    decision = choose_mean_candidates(prompts(16, WIDE), 9, 12, GPU, 0.5, rng())
    assert [trial.mean_candidates for trial in decision.trials] == [9, 9.5, 10, 10.5, 11, 11.5, 12]
    assert decision.utility == max(trial.utility for trial in decision.trials)
    assert decision.mean_candidates in [t.mean_candidates for t in decision.trials if t.utility == decision.utility]
    for trial in decision.trials:
        found, plain = trial.estimate, decision.unshaped
        shorter = 1 - found.returned_mean / plain.returned_mean
        assert trial.utility == pytest.approx(shorter - 0.5 * found.seconds / plain.seconds)


def test_equal_bounds_leave_no_choice() -> None:
    decision = choose_mean_candidates(prompts(4), 12, 12, GPU, 1.0, rng())
    assert (decision.mean_candidates, len(decision.trials)) == (12, 1)


@pytest.mark.parametrize("ratios", [NARROW, WIDE, EXPONENTIAL])
def test_without_budget_aversion_the_maximum_is_chosen(ratios: Floats) -> None:
    assert choose_mean_candidates(prompts(64, ratios), SIZE, HIGH, PROPORTIONAL, 0.0, rng()).mean_candidates == HIGH


def test_with_high_aversion_no_candidates_are_added_if_they_cost_time() -> None:
    for workload in (prompts(64, NARROW), replace(prompts(64, NARROW), num_longest=1, capacity=100)):
        assert choose_mean_candidates(workload, SIZE, HIGH, PROPORTIONAL, 1e6, rng()).mean_candidates == SIZE


def test_with_high_aversion_the_maximum_is_chosen_if_candidates_save_time() -> None:
    assert choose_mean_candidates(prompts(8), SIZE, HIGH, FLAT, 1e6, rng()).mean_candidates >= HIGH - 1


def test_equal_lengths_leave_nothing_to_gain() -> None:
    assert choose_mean_candidates(prompts(8, np.ones(1)), SIZE, HIGH, FLAT, 0.0, rng()).mean_candidates == SIZE


def test_a_moderate_aversion_gives_a_mean_between_the_bounds() -> None:
    for count, curve in ((64, PROPORTIONAL), (1000, GPU)):
        assert SIZE < choose_mean_candidates(prompts(count, WIDE), SIZE, HIGH, curve, 1.0, rng()).mean_candidates < HIGH


@given(
    st.sampled_from([NARROW, WIDE, EXPONENTIAL]),
    st.sampled_from([FLAT, GPU, PROPORTIONAL]),
    st.sampled_from([0, 1]),
    st.lists(st.floats(0, 20), min_size=2, max_size=2).map(sorted),
)
def test_higher_aversion_never_gives_a_longer_rollout(
    ratios: Floats, curve: LatencyCurve, tail: int, aversions: list[float]
) -> None:
    workload = replace(prompts(32, ratios), num_longest=tail)
    cheap, dear = (chosen_seconds(workload, curve, aversion) for aversion in aversions)
    assert dear <= cheap * (1 + 1e-9)


def chosen_seconds(workload: Workload, curve: LatencyCurve, aversion: float) -> float:
    decision = choose_mean_candidates(workload, SIZE, SIZE + 2, curve, aversion, rng())
    return next(t.estimate.seconds for t in decision.trials if t.mean_candidates == decision.mean_candidates)


def test_the_same_seed_gives_the_same_decision() -> None:
    workload = replace(prompts(64, WIDE), num_longest=1, cut=True)
    assert choose_mean_candidates(workload, SIZE, HIGH, GPU, 1.0, rng()) == choose_mean_candidates(
        workload, SIZE, HIGH, GPU, 1.0, rng()
    )


def test_another_seed_chooses_a_mean_that_is_hardly_worse() -> None:
    draws = [np.random.default_rng(seed) for seed in range(12)]
    found = [choose_mean_candidates(prompts(64, WIDE), SIZE, HIGH, GPU, 1.0, each) for each in draws]
    utility = np.mean([[trial.utility for trial in decision.trials] for decision in found], axis=0)
    for decision in found:
        chosen = utility[round(2 * (decision.mean_candidates - SIZE))]
        assert chosen > utility.max() - 0.05 * np.ptp(utility)


def test_the_choice_follows_from_the_allocation_and_the_saturation_that_will_be_used() -> None:
    means = [MEAN / 3] * 32 + [MEAN] * 32
    alike = replace(prompts(64, WIDE), means=means, num_longest=1)
    adaptive = replace(alike, stds=[mean / 2 for mean in means], saturated_at=HIGH)
    chosen_alike, chosen = (choose_mean_candidates(w, SIZE, HIGH, GPU, 1.0, rng()) for w in (alike, adaptive))
    # The long prompts alone set the time. From 12 on average on all of these are saturated, and no tail is waited for.
    assert (chosen_alike.mean_candidates, chosen.mean_candidates) == (11, 13)
    utility = {trial.mean_candidates: trial.utility for trial in chosen.trials}
    assert utility[13] > utility[11] + 0.3


def test_the_order_of_the_ratios_does_not_matter() -> None:
    one, two = (choose_mean_candidates(prompts(8, r), SIZE, HIGH, GPU, 1.0, rng()) for r in (WIDE, WIDE[::-1].copy()))
    assert one == two


# --- what is refused --------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(7, 12), (12, 11)])
def test_bounds_in_the_wrong_order_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="8 <= low <= high"):
        choose_mean_candidates(prompts(2), low, high, FLAT, 1.0, rng())


@pytest.mark.parametrize("aversion", [-0.1, math.nan, math.inf])
def test_an_aversion_out_of_range_is_refused(aversion: float) -> None:
    with pytest.raises(ValueError, match="budget_aversion must be finite and at least 0"):
        choose_mean_candidates(prompts(2), 8, 9, FLAT, aversion, rng())
