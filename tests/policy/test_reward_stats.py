"""Moments that merge, and what the lengths of right and wrong trajectories say of a prompt."""

import json
import math
from typing import Any, SupportsFloat

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from darts_server.policy.reward_stats import (
    MIN_TRAJECTORIES,
    MeanDifference,
    Moments,
    RewardStats,
    TailPattern,
    restore_stats,
    single_length,
)

LENGTHS = st.lists(st.integers(1, 40) | st.integers(1, 40_000), max_size=40)
SOME = st.lists(st.integers(1, 40_000), min_size=2, max_size=40)


def of(lengths: list[int]) -> Moments:
    return sum(map(single_length, lengths), Moments())


def close(got: float | None, wanted: SupportsFloat) -> bool:
    return got == pytest.approx(float(wanted), rel=1e-9, abs=1e-6)


# --- moments ----------------------------------------------------------------


@given(st.lists(LENGTHS, max_size=6))
def test_moments_of_parts_add_up_to_those_of_the_whole(parts: list[list[int]]) -> None:
    whole = [length for part in parts for length in part]
    merged = sum(map(of, parts), Moments())
    assert merged.count == len(whole)
    if whole:
        assert close(merged.mean, np.mean(whole))
        assert close(merged.m2, np.var(whole) * len(whole))


@given(SOME)
def test_the_error_is_that_of_the_mean(lengths: list[int]) -> None:
    assert close(of(lengths).error, np.std(lengths, ddof=1) / math.sqrt(len(lengths)))


def test_a_single_length_and_a_single_weight_have_no_error() -> None:
    assert single_length(7).error is None
    assert Moments().error is None
    assert Moments(2, 5.0, 0.0, 1.0, 1.0).error is None


# --- patterns ---------------------------------------------------------------


@given(SOME, SOME)
def test_the_difference_has_welchs_error(right: list[int], wrong: list[int]) -> None:
    result = RewardStats(of(right), of(wrong)).difference
    assert close(result.tokens, np.mean(right) - np.mean(wrong))
    assert close(result.error, math.sqrt(sum(np.var(x, ddof=1) / len(x) for x in (right, wrong))))


@given(SOME, SOME)
def test_a_pattern_needs_enough_lengths_and_means_far_enough_apart(right: list[int], wrong: list[int]) -> None:
    result = RewardStats(of(right), of(wrong)).difference
    assert result.tokens is not None
    assert result.error is not None
    assume(abs(abs(result.tokens) - 2 * result.error) > 1e-6)
    enough = min(len(right), len(wrong)) >= MIN_TRAJECTORIES
    if enough and abs(result.tokens) > 2 * result.error:
        assert result.pattern == ("II" if np.mean(right) > np.mean(wrong) else "I")
    else:
        assert result.pattern == "unclear"


@pytest.mark.parametrize(
    ("right", "wrong", "result"),
    [
        ([], [5, 6], MeanDifference()),
        ([5, 6], [], MeanDifference()),
        ([5], [9, 9], MeanDifference(-4, None, TailPattern.UNCLEAR)),
        ([5, 5], [9], MeanDifference(-4, None, TailPattern.UNCLEAR)),
        ([5] * MIN_TRAJECTORIES, [5] * MIN_TRAJECTORIES, MeanDifference(0, 0, TailPattern.UNCLEAR)),
        ([5] * MIN_TRAJECTORIES, [9] * MIN_TRAJECTORIES, MeanDifference(-4, 0, TailPattern.VERBOSITY)),
        ([9] * MIN_TRAJECTORIES, [5] * MIN_TRAJECTORIES, MeanDifference(4, 0, TailPattern.DEPTH)),
        ([9] * MIN_TRAJECTORIES, [5] * (MIN_TRAJECTORIES - 1), MeanDifference(4, 0, TailPattern.UNCLEAR)),
    ],
)
def test_small_samples_give_the_expected_pattern(right: list[int], wrong: list[int], result: MeanDifference) -> None:
    assert RewardStats(of(right), of(wrong)).difference == result


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 9)), min_size=2, max_size=30))
def test_a_whole_weight_counts_as_so_many_lengths(lengths: list[tuple[int, int]]) -> None:
    weighted = sum((single_length(tokens, float(weight)) for tokens, weight in lengths), Moments())
    repeated = of([tokens for tokens, weight in lengths for _ in range(weight)])
    assert weighted.count == len(lengths)
    assert weighted.weight == repeated.count
    assert weighted.mean == pytest.approx(repeated.mean)
    assert weighted.m2 == pytest.approx(repeated.m2, abs=1e-6)


def test_the_error_of_a_weighted_mean_is_that_of_repeated_samples() -> None:
    rng = np.random.default_rng(0)
    weights = [1.0] * 7 + [5.0]
    samples = rng.normal(100, 10, (4000, 8)).tolist()
    sums = [sum((Moments(1, x, 0.0, w, w * w) for x, w in zip(s, weights, strict=True)), Moments()) for s in samples]
    errors = [moments.square_error for moments in sums if moments.square_error is not None]
    assert np.mean(errors) == pytest.approx(np.var([moments.mean for moments in sums]), rel=0.1)


# --- what is kept -----------------------------------------------------------


def test_statistics_add_up_and_have_a_pass_rate() -> None:
    first = RewardStats(of([5, 7]), of([9]), groups=1)
    second = RewardStats(of([6]), Moments(), groups=1, zero_variance=1)
    both = first + second
    assert (both.rewarded, both.pass_rate, both.groups, both.zero_variance) == (4, 0.75, 2, 1)
    assert both.right == Moments(3, 6.0, 2.0, 3, 3)
    assert restore_stats(both.state) == both
    assert RewardStats().pass_rate is None


@given(LENGTHS, LENGTHS)
def test_the_state_survives_json(right: list[int], wrong: list[int]) -> None:
    stats = RewardStats(of(right), of(wrong), 3, 2)
    assert restore_stats(json.loads(json.dumps(stats.state))) == stats


WHOLE = [3, 5.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    "state",
    [
        None,
        [WHOLE, WHOLE],
        [WHOLE, WHOLE, [1, 2]],
        [WHOLE, WHOLE, [1, -1]],
        [WHOLE, WHOLE, [2.0, 1]],
        [WHOLE, WHOLE, [10**400, 1]],
        [WHOLE, [-1, 5.0, 2.0, 3.0, 3.0], [2, 1]],
        [WHOLE, [True, 5.0, 2.0, 3.0, 3.0], [2, 1]],
        [WHOLE, [3, 5.0, 1e301, 3.0, 3.0], [2, 1]],
        [WHOLE, [3, math.nan, 2.0, 3.0, 3.0], [2, 1]],
        [WHOLE, [3, 5.0, math.inf, 3.0, 3.0], [2, 1]],
        [WHOLE, [3, "5", 2.0, 3.0, 3.0], [2, 1]],
        [WHOLE, [0, 5.0, 2.0, 3.0, 3.0], [2, 1]],
        [WHOLE, [3, 5.0, 2.0, 0.0, 3.0], [2, 1]],
        [WHOLE, [3, 5.0, 2.0, 10**400, 3.0], [2, 1]],
    ],
    ids=repr,
)
def test_an_invalid_state_is_refused(state: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        restore_stats(state)


def test_any_accepted_state_can_be_added_to() -> None:
    most = [2**52, 2.0**52, 1e300, 2.0**52, 2.0**52]
    stats = restore_stats([most, most, [2**52, 2**52]])
    more = RewardStats(of([1, 2]), of([3]), 1, 1)
    assert (stats + more + stats).groups == 2**53 + 1
    assert (stats + more).difference.pattern == "unclear"
