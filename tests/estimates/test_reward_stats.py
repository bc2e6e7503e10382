"""Mean lengths that merge, and whether the long answers of a prompt are worth their tokens."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.estimates.reward_stats import (
    MIN_TRAJECTORIES,
    MeanLength,
    RewardStats,
    restore_stats,
    single_length,
)

LENGTHS = st.lists(st.integers(1, 40) | st.integers(1, 40_000), max_size=40)
SOME = st.lists(st.integers(1, 40_000), min_size=2, max_size=40)


def of(lengths: list[int]) -> MeanLength:
    return sum(map(single_length, lengths), MeanLength())


# --- mean lengths -----------------------------------------------------------


@given(st.lists(LENGTHS, max_size=6))
def test_mean_lengths_of_parts_add_up_to_the_mean_length_of_the_whole(parts: list[list[int]]) -> None:
    whole = [length for part in parts for length in part]
    merged = sum(map(of, parts), MeanLength())
    assert merged.count == len(whole)
    if whole:
        assert merged.mean == pytest.approx(float(np.mean(whole)))


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 9)), min_size=2, max_size=30))
def test_a_whole_weight_counts_as_that_number_of_lengths(lengths: list[tuple[int, int]]) -> None:
    weighted = sum((single_length(tokens, float(weight)) for tokens, weight in lengths), MeanLength())
    repeated = of([tokens for tokens, weight in lengths for _ in range(weight)])
    assert weighted.count == len(lengths)
    assert weighted.weight == repeated.count
    assert weighted.mean == pytest.approx(repeated.mean)


@pytest.mark.parametrize(
    ("right", "wrong", "difference"),
    [
        ([], [9] * 50, None),
        ([9] * MIN_TRAJECTORIES, [5] * (MIN_TRAJECTORIES - 1), None),
        ([9] * (MIN_TRAJECTORIES - 1), [5] * MIN_TRAJECTORIES, None),
        ([5] * MIN_TRAJECTORIES, [9] * MIN_TRAJECTORIES, -4),
        ([9] * MIN_TRAJECTORIES, [5] * MIN_TRAJECTORIES, 4),
    ],
)
def test_long_answers_are_worth_their_tokens_if_right_answers_are_longer(
    right: list[int], wrong: list[int], difference: float | None
) -> None:
    assert RewardStats(of(right), of(wrong)).difference == difference


# --- what is kept -----------------------------------------------------------


def test_statistics_add_up_and_have_a_pass_rate() -> None:
    first = RewardStats(of([5, 7]), of([9]), groups=1)
    second = RewardStats(of([6]), MeanLength(), groups=1, zero_variance=1)
    both = first + second
    assert (both.rewarded, both.pass_rate, both.groups, both.zero_variance) == (4, 0.75, 2, 1)
    assert both.right == MeanLength(3, 6.0, 3.0)
    assert restore_stats(both.state) == both
    assert RewardStats().pass_rate is None


@given(LENGTHS, LENGTHS)
def test_a_part_that_is_taken_away_leaves_the_other_part(left: list[int], taken: list[int]) -> None:
    rest = of(left + taken) - of(taken)
    assert rest.count == len(left)
    assert rest.mean == pytest.approx(of(left).mean, abs=1e-6)


def test_statistics_can_be_replaced() -> None:
    whole = RewardStats(of([5, 7]), of([9]), groups=2, zero_variance=1)
    assert whole - RewardStats(of([7]), of([9]), groups=1, zero_variance=1) == RewardStats(of([5]), groups=1)
    # After a restore of an earlier state, more may be taken away than there is.
    assert RewardStats(of([5])) - RewardStats(of([5, 5]), of([1]), 3, 2) == RewardStats()
    assert RewardStats(of([5, 5]), groups=1, zero_variance=1) - RewardStats(groups=1) == RewardStats(of([5, 5]))
    assert MeanLength(2, 5.0, 1.0) - MeanLength(1, 5.0, 2.0) == MeanLength(), "a weight that is not there"
    assert MeanLength(3, 1.0, 3.0) - MeanLength(1, 100.0, 1.0) == MeanLength(2, 0.0, 2.0), "lengths are not negative"


@given(LENGTHS, LENGTHS)
def test_the_state_survives_json(right: list[int], wrong: list[int]) -> None:
    stats = RewardStats(of(right), of(wrong), 3, 2)
    assert restore_stats(json.loads(json.dumps(stats.state))) == stats


def test_a_state_with_squared_deviations_is_still_read() -> None:
    saved: list[list[float]] = [[3, 6.0, 2.0, 3.5, 4.25], [1, 9.0, 0.0, 1.0, 1.0], [2, 1]]
    assert restore_stats(saved) == RewardStats(MeanLength(3, 6.0, 3.5), MeanLength(1, 9.0, 1.0), 2, 1)


WHOLE = [3, 5.0, 3.0]


@pytest.mark.parametrize(
    "state",
    [
        None,
        [WHOLE, WHOLE],
        [WHOLE, WHOLE, [1, 2]],
        [WHOLE, WHOLE, [1, -1]],
        [WHOLE, WHOLE, [2.0, 1]],
        [WHOLE, WHOLE, [10**400, 1]],
        [WHOLE, [3, 5.0], [2, 1]],
        [WHOLE, [3, 5.0, 3.0, 3.0], [2, 1]],
        [WHOLE, [-1, 5.0, 3.0], [2, 1]],
        [WHOLE, [True, 5.0, 3.0], [2, 1]],
        [WHOLE, [3, math.nan, 3.0], [2, 1]],
        [WHOLE, [3, math.inf, 3.0], [2, 1]],
        [WHOLE, [3, 1e301, 3.0], [2, 1]],
        [WHOLE, [3, "5", 3.0], [2, 1]],
        [WHOLE, [0, 5.0, 3.0], [2, 1]],
        [WHOLE, [3, 5.0, 0.0], [2, 1]],
        [WHOLE, [3, 5.0, 10**400], [2, 1]],
    ],
    ids=repr,
)
def test_an_invalid_state_is_refused(state: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        restore_stats(state)


def test_any_accepted_state_can_be_added_to() -> None:
    most = [2**52, 2.0**52, 2.0**52]
    stats = restore_stats([most, most, [2**52, 2**52]])
    more = RewardStats(of([1, 2]), of([3]), 1, 1)
    assert (stats + more + stats).groups == 2**53 + 1
    assert (stats + more).difference is not None
