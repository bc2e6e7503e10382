"""Scores from token log-probs."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.pruning.logprob_scores import logprob_to_score, lowest_window_logprob, mean_logprob

LOGPROBS = st.lists(st.floats(-30, 0), min_size=1, max_size=30)


@given(LOGPROBS, st.integers(1, 40))
def test_the_lowest_window_is_the_minimum_of_all_windows(logprobs: list[float], window: int) -> None:
    width = min(window, len(logprobs))
    windows = [statistics.fmean(logprobs[i : i + width]) for i in range(len(logprobs) - width + 1)]
    assert lowest_window_logprob(logprobs, window) == pytest.approx(min(windows))
    assert mean_logprob(logprobs) == pytest.approx(statistics.fmean(logprobs))


@given(LOGPROBS, st.integers(1, 40))
def test_scores_are_in_range_and_the_windows_is_the_lower(logprobs: list[float], window: int) -> None:
    harsh, mild = logprob_to_score(lowest_window_logprob(logprobs, window)), logprob_to_score(mean_logprob(logprobs))
    assert 0 <= harsh <= 1
    assert 0 <= mild <= 1
    assert harsh <= mild + 1e-12 or len(logprobs) % window


def test_a_token_of_probability_zero_scores_zero() -> None:
    assert logprob_to_score(mean_logprob([0.0, -math.inf])) == 0.0
    assert logprob_to_score(lowest_window_logprob([0.0, -math.inf, 0.0, 0.0], 2)) == 0.0


@pytest.mark.parametrize("wrong", [[], [0.1], [math.nan]])
def test_invalid_logprobs_are_refused(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="logprobs must"):
        mean_logprob(wrong)
    with pytest.raises(ValueError, match="logprobs must"):
        lowest_window_logprob(wrong)


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window must"):
        lowest_window_logprob([-1.0], 0)
