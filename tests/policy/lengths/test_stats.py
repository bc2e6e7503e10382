"""Length statistics of prompts and of the data set, and keys of prompts."""

import json
import math
import statistics
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.lengths.estimate import LengthEstimate
from darts_server.policy.lengths.stats import WINDOW_STEPS, DatasetStats, PromptStats, make_prompt_key, update_stats
from tests.policy.lengths.test_estimate import ended, stopped


def test_the_first_group_counts_fully_and_later_ones_are_averaged() -> None:
    first = update_stats(None, ended(10, 20), 1)
    assert first == PromptStats(math.sqrt(50), 15, 1, 2, 1)
    second = update_stats(first, ended(30, 30, 30), 4)
    assert second == PromptStats(0.7 * math.sqrt(50), 0.3 * 30 + 0.7 * 15, 2, 5, 4)
    assert update_stats(first, ended(30, 30, 30), None, alpha=1) == PromptStats(0, 30, 2, 5, None)


def test_a_group_of_one_does_not_change_the_std() -> None:
    first = update_stats(None, ended(10), 1)
    assert first.std_ema is None
    second = update_stats(first, ended(10, 20), 1)
    assert second.std_ema == pytest.approx(math.sqrt(50))
    assert update_stats(second, ended(99), 1).std_ema == second.std_ema


@pytest.mark.parametrize("alpha", [0, -0.1, 1.1, math.nan])
def test_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"alpha must be in \(0, 1\]"):
        update_stats(None, ended(1, 2), 0, alpha)


def test_the_data_set_averages_stds_over_ten_steps_and_takes_the_last_mean() -> None:
    stats = DatasetStats()
    assert (stats.std, stats.mean) == (None, None)
    for number in range(15):
        stats = stats.with_step(
            [LengthEstimate(number, number), LengthEstimate(number + 2, number + 4), LengthEstimate(number + 1, None)]
        )
    assert WINDOW_STEPS == 10
    assert stats.std == pytest.approx(statistics.fmean(range(5 + 2, 15 + 2)))
    assert stats.mean == 15
    assert stats.steps == 15


def test_a_step_without_stds_keeps_the_window_and_an_empty_one_changes_nothing() -> None:
    stats = DatasetStats().with_step([LengthEstimate(10, 3)])
    assert stats.with_step([]) is stats
    assert stats.with_step([LengthEstimate(20, None)]) == DatasetStats((3,), 20, 2)


def test_statistics_survive_json() -> None:
    prompt = update_stats(None, ended(10, 20) + stopped(20), 3)
    dataset = DatasetStats().with_step([LengthEstimate(10, 3)]).with_step([LengthEstimate(11, 4.5)])
    assert PromptStats(**json.loads(json.dumps(asdict(prompt)))) == prompt
    assert DatasetStats(**json.loads(json.dumps(asdict(dataset)))) == dataset


def test_a_key_is_the_same_in_every_process() -> None:
    assert make_prompt_key([1, 2, 3]) == "ab44942e43d9d2af667cb73e"
    assert make_prompt_key((1, 2, 3)) == make_prompt_key(np.array([1, 2, 3], dtype=np.int32).tolist())


@given(st.lists(st.integers(0, 200_000), max_size=6), st.lists(st.integers(0, 200_000), max_size=6))
def test_different_tokens_have_different_keys(one: list[int], other: list[int]) -> None:
    assert (make_prompt_key(one) == make_prompt_key(other)) == (one == other)
    assert len(make_prompt_key(one)) == 24
