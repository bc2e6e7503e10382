"""Probabilities of signal, and candidates that give as many groups as possible a signal."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.estimates.pass_rates import Beta
from darts_server.policy.signal import UNINFORMATIVE, allocate_by_signal, signal_chances

PARAMETERS = st.floats(0.01, 100)
POSTERIORS = st.builds(Beta, PARAMETERS, PARAMETERS)
SMALL = st.lists(st.builds(Beta, st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5)
EDGE = Beta(2.0, 15.0)
EVEN = Beta(8.0, 8.0)
HOPELESS = Beta(0.01, 64.0)
SATURATED = Beta(64.0, 0.01)


def exact_chance(posterior: Beta, candidates: int) -> Fraction:
    """Compute 1 - E[p^n] - E[(1 - p)^n] by the moments of the Beta distribution."""
    right, wrong = map(Fraction, posterior)
    all_right = all_wrong = Fraction(1)
    for n in range(candidates):
        all_right *= (right + n) / (right + wrong + n)
        all_wrong *= (wrong + n) / (right + wrong + n)
    return 1 - all_right - all_wrong


# --- the probability --------------------------------------------------------


@given(POSTERIORS, st.integers(1, 40))
def test_the_probability_is_exact(posterior: Beta, candidates: int) -> None:
    [chance] = signal_chances([posterior], candidates)
    assert chance == pytest.approx(float(exact_chance(posterior, candidates)), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("posterior", [EDGE, EVEN, Beta(0.5, 0.5), Beta(30.0, 2.5)])
@pytest.mark.parametrize("candidates", [2, 8, 24])
def test_the_probability_is_the_closed_form_by_beta_functions(posterior: Beta, candidates: int) -> None:
    def log_beta(a: float, b: float) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    a, b = posterior
    none = math.exp(log_beta(a + candidates, b) - log_beta(a, b)) + math.exp(
        log_beta(a, b + candidates) - log_beta(a, b)
    )
    assert signal_chances([posterior], candidates) == [pytest.approx(1 - none, rel=1e-9)]


def test_the_probability_is_the_share_of_groups_with_different_rewards() -> None:
    rng = np.random.default_rng(0)
    rates = rng.beta(*EDGE, size=200_000)
    right = rng.binomial(8, rates)
    assert signal_chances([EDGE], 8)[0] == pytest.approx(((right > 0) & (right < 8)).mean(), abs=0.005)


def test_the_probability_stays_exact_for_a_prompt_that_is_almost_surely_solved() -> None:
    sure = Beta(1e15, 1e-3)
    assert signal_chances([sure], 8) == [pytest.approx(float(exact_chance(sure, 8)), rel=1e-9)]
    assert signal_chances([sure, EVEN], 1) == [0, 0]


# --- a cohort ---------------------------------------------------------------


@given(SMALL, st.integers(1, 3), st.integers(0, 4), st.data())
def test_the_allocation_has_the_largest_expected_number_of_groups_with_signal(
    posteriors: list[Beta], low: int, more: int, data: st.DataObject
) -> None:
    high = low + more
    budget = data.draw(st.integers(low * len(posteriors), high * len(posteriors)))

    def expected(counts: Sequence[int]) -> Fraction:
        return sum((exact_chance(*pair) for pair in zip(posteriors, counts, strict=True)), Fraction(0))

    counts = allocate_by_signal(posteriors, budget, low, high)
    assert sum(counts) == budget
    assert low <= min(counts) <= max(counts) <= high
    ways = itertools.product(range(low, high + 1), repeat=len(posteriors))
    best = max(expected(way) for way in ways if sum(way) == budget)
    assert float(best - expected(counts)) <= 1e-12


def test_prompts_near_the_edge_get_more_and_hopeless_saturated_and_even_prompts_get_no_more() -> None:
    assert allocate_by_signal([HOPELESS, EDGE, EVEN, SATURATED], 40, 8, 16) == [8, 16, 8, 8]


def test_equal_prompts_share_the_budget_evenly() -> None:
    assert allocate_by_signal([EDGE] * 4, 4 * 12 + 2, 8, 16) == [13, 13, 12, 12]


@pytest.mark.parametrize(("budget", "counts"), [(0, [8, 8]), (1000, [16, 16])])
def test_a_budget_outside_the_limits_is_clipped(budget: int, counts: list[int]) -> None:
    assert allocate_by_signal([EDGE, EVEN], budget, 8, 16) == counts


def test_without_room_above_the_size_or_without_prompts_nothing_is_allocated() -> None:
    assert allocate_by_signal([EDGE, EVEN], 100, 8, 8) == [8, 8]
    assert allocate_by_signal([], 100, 8, 16) == []
    assert signal_chances([], 8) == []


# --- skipping ---------------------------------------------------------------


def test_weights_of_prompts_that_ran_by_chance_keep_the_sum_of_gradients() -> None:
    """Enumerate all draws, and all outcomes of groups under GRPO, in a world with two prompts that may be skipped."""
    rates = [Fraction(1, 50), Fraction(1, 3), Fraction(49, 50)]
    posteriors = [HOPELESS, EVEN, SATURATED]
    floor = Fraction(1, 4)
    counts = allocate_by_signal(posteriors, 10, 2, 6)
    chances = signal_chances(posteriors, 2)
    probabilities = [floor if chance < UNINFORMATIVE else Fraction(1) for chance in chances]
    assert probabilities == [floor, 1, floor]

    def gradient(rate: Fraction, candidates: int) -> Fraction:
        """Return the expected gradient of a group: a right answer pushes by 1 - rate, a wrong answer by -rate."""
        total = Fraction(0)
        for outcome in itertools.product((1, 0), repeat=candidates):
            chance = math.prod((rate if right else 1 - rate for right in outcome), start=Fraction(1))
            mean = Fraction(sum(outcome), candidates)
            total += chance * sum((right - mean) * (right - rate) for right in outcome) / candidates
        return total

    gradients = [gradient(*pair) for pair in zip(rates, counts, strict=True)]
    weighted = Fraction(0)
    unweighted = Fraction(0)
    for runs in itertools.product((True, False), repeat=3):
        chance = math.prod((p if run else 1 - p for p, run in zip(probabilities, runs, strict=True)), start=Fraction(1))
        ran = [(g, p) for g, p, run in zip(gradients, probabilities, runs, strict=True) if run]
        weighted += chance * sum((g / p for g, p in ran), Fraction(0))
        unweighted += chance * sum((g for g, _ in ran), Fraction(0))
    assert abs(float(weighted - sum(gradients))) < 1e-9
    assert abs(float(unweighted - sum(gradients))) > 1e-3
