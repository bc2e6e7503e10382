"""Pass rates as Beta distributions: counting, ageing, the prior, and saved states."""

import json
from dataclasses import astuple
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.estimates.checks import LARGEST
from darts_server.estimates.pass_rates import (
    HALF_LIFE,
    MAX_STRENGTH,
    MIN_STRENGTH,
    Answers,
    Beta,
    PassCounts,
    RecentPassRates,
    count_answers,
)

ANSWERS = st.lists(st.tuples(st.booleans(), st.floats(1e-3, 1e3)), min_size=1, max_size=12)
JEFFREYS = RecentPassRates().prior


def plain(right: int, wrong: int) -> Answers:
    return count_answers([(True, 1.0)] * right + [(False, 1.0)] * wrong)


# --- counting ---------------------------------------------------------------


def test_equal_weights_count_one_each_whatever_they_are() -> None:
    for weight in (1.0, 2.5, 1e-3):
        counted = count_answers([(True, weight)] * 3 + [(False, weight)] * 5)
        assert counted == pytest.approx((3, 5, 3 * 2 / (8 * 7)))


def test_unequal_weights_count_as_their_effective_sample_size() -> None:
    counted = count_answers([(True, 1.0), (False, 3.0)])
    assert counted.right + counted.wrong == pytest.approx(4**2 / (1 + 9))
    assert counted.right / (counted.right + counted.wrong) == pytest.approx(1 / 4)
    assert counted.both_right == 0


def test_a_single_answer_has_no_pairs() -> None:
    assert count_answers([(True, 2.0)]) == Answers(1.0, 0.0, None)


@given(ANSWERS)
def test_counts_are_valid_for_any_weights(answers: list[tuple[bool, float]]) -> None:
    counted = count_answers(answers)
    assert counted.right >= 0
    assert counted.wrong >= 0
    assert 1 - 1e-9 <= counted.right + counted.wrong <= len(answers) + 1e-9
    assert counted.both_right is None or 0 <= counted.both_right <= 1


def test_the_pairs_estimate_the_square_of_the_pass_rate() -> None:
    rng = np.random.default_rng(0)
    for rate in (0.1, 0.5, 0.9):
        rights = rng.binomial(8, rate, size=4000)
        mean = np.mean([plain(right, 8 - right).both_right for right in rights.tolist()])
        assert mean == pytest.approx(rate**2, abs=0.01)


# --- ageing -----------------------------------------------------------------


def test_an_answer_counts_half_after_each_half_life() -> None:
    counts = PassCounts().with_answers(plain(4, 12), 100)
    prior = Beta(0.5, 0.5)
    assert counts.posterior(prior, 100) == (4.5, 12.5)
    assert counts.posterior(prior, 100 + HALF_LIFE) == pytest.approx((2.5, 6.5))
    assert counts.posterior(prior, 100 + 3 * HALF_LIFE) == pytest.approx((1.0, 2.0))
    assert counts.posterior(prior, LARGEST) == prior


def test_older_answers_have_aged_when_new_answers_are_added() -> None:
    counts = PassCounts().with_answers(plain(4, 4), 0).with_answers(plain(0, 8), HALF_LIFE)
    assert counts == PassCounts(2.0, 10.0, HALF_LIFE)


def test_a_version_of_the_past_ages_nothing() -> None:
    counts = PassCounts(1.0, 2.0, 9)
    assert counts.posterior(Beta(1, 1), 3) == (2.0, 3.0)
    assert RecentPassRates(4.0, 2.0, 1.5, 9).with_group(plain(0, 8), 3) == RecentPassRates(5.0, 2.0, 1.5, 3)


# --- the prior --------------------------------------------------------------


def test_without_groups_neither_right_nor_wrong_is_expected() -> None:
    assert pytest.approx((0.5, 0.5)) == JEFFREYS


@pytest.mark.parametrize(("right", "wrong"), [(0.3, 1.2), (0.5, 0.5), (2.0, 0.5), (6.0, 3.0)])
def test_the_prior_is_the_distribution_of_the_pass_rates_of_recent_groups(right: float, wrong: float) -> None:
    rng = np.random.default_rng(1)
    rates = RecentPassRates()
    for version in range(40):
        for rate in rng.beta(right, wrong, size=400):
            passed = int(rng.binomial(16, rate))
            rates = rates.with_group(plain(passed, 16 - passed), version)
    assert rates.prior.right / sum(rates.prior) == pytest.approx(right / (right + wrong), abs=0.02)
    assert sum(rates.prior) == pytest.approx(right + wrong, rel=0.15)


def test_the_prior_follows_the_pass_rates() -> None:
    rates = RecentPassRates()
    means = []
    for version in range(30):
        rates = rates.with_group(plain(1, 7) if version < 15 else plain(7, 1), version)
        means.append(rates.prior.right / sum(rates.prior))
    assert means[14] == pytest.approx(1 / 8, abs=0.05)
    assert all(earlier < later for earlier, later in pairwise(means[14:]))
    assert means[-1] > 0.65


def test_the_strength_of_the_prior_is_limited() -> None:
    alike = RecentPassRates()
    apart = RecentPassRates()
    for number in range(1000):
        alike = alike.with_group(plain(4, 4), 0)
        apart = apart.with_group(plain(8 * (number % 2), 8 * (1 - number % 2)), 0)
    assert sum(alike.prior) == pytest.approx(MAX_STRENGTH)
    assert sum(apart.prior) == pytest.approx(MIN_STRENGTH)


def test_a_group_with_a_single_answer_does_not_change_the_prior() -> None:
    rates = RecentPassRates(4.0, 2.0, 1.5, 9)
    assert rates.with_group(plain(1, 0), 9) == rates


# --- saved states -----------------------------------------------------------


def test_saved_states_are_restored() -> None:
    counts = PassCounts(1.25, 3.5, 7)
    rates = RecentPassRates(4.0, 2.0, 1.5, 9)
    assert PassCounts(*json.loads(json.dumps(astuple(counts)))) == counts
    assert RecentPassRates(*json.loads(json.dumps(astuple(rates)))) == rates


@pytest.mark.parametrize(
    ("kind", "state", "field"),
    [
        (PassCounts, (-1.0, 0.0, 0), "right"),
        (PassCounts, (0.0, float("nan"), 0), "wrong"),
        (PassCounts, (0.0, 0.0, 1.5), "version"),
        (RecentPassRates, (2.0**53, 0.0, 0.0, 0), "groups"),
        (RecentPassRates, (1.0, 1.5, 0.0, 0), "rates"),
        (RecentPassRates, (1.0, 1.0, 1.5, 0), "squares"),
        (RecentPassRates, (1.0, 1.0, 1.0, -1), "version"),
    ],
)
def test_the_unusable_field_of_a_state_is_named(kind: Any, state: tuple[float, ...], field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be"):
        kind(*state)


def test_the_largest_accepted_state_can_be_learned_from_and_used() -> None:
    most = float(LARGEST)
    counts = PassCounts(most, most, LARGEST).with_answers(plain(4, 4), LARGEST)
    rates = RecentPassRates(most, most, most, LARGEST).with_group(plain(4, 4), LARGEST)
    assert min(counts.posterior(rates.prior, LARGEST)) > 0
    assert min(rates.prior) > 0
