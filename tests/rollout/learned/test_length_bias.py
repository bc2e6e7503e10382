"""Lengths generated against lengths returned."""

from dataclasses import replace

import pytest

from darts_server.records import GroupRecord
from darts_server.rollout.learned.statistics import BIAS_GROUPS, LengthBias
from darts_server.types import FinishReason, Outcome, SelectedAs
from tests.rollout.learned.test_prompts import candidate, record


def group(*returned: int, stopped: tuple[int, ...] = ()) -> GroupRecord:
    kept = [candidate(i, tokens, FinishReason.STOP, SelectedAs.SHORT) for i, tokens in enumerate(returned)]
    return record(*kept, *(candidate(9, tokens, None) for tokens in stopped))


def bias_of(*groups: GroupRecord) -> LengthBias:
    bias = LengthBias()
    for each in groups:
        bias.group_ended(each)
    return bias


def test_there_is_no_value_before_a_group_was_completed() -> None:
    bias = bias_of(replace(group(5), outcome=Outcome.CANCELLED))
    assert bias.mean("returned") is bias.quantile("generated", 0.5) is None


def test_without_shaping_there_is_no_bias() -> None:
    bias = bias_of(group(10, 20, 30, 100))
    assert bias.mean("generated") == bias.mean("returned") == 40
    assert [bias.quantile("returned", share) for share in (0.25, 0.5, 1.0)] == [10, 20, 100]
    assert bias.quantile("generated", 0.5) == 20


def test_lengths_of_stopped_candidates_are_estimated() -> None:
    bias = bias_of(group(10, 12, 14, stopped=(14, 14, 14)))
    assert bias.mean("returned") == 12
    assert (bias.mean("generated") or 0) > 14
    assert (bias.quantile("generated", 0.9) or 0) > 14


def test_no_length_is_estimated_beyond_what_the_request_allows() -> None:
    stopped = group(10, 12, 14, stopped=(14, 14, 14))
    assert (bias_of(stopped).quantile("generated", 1.0) or 0) > 16
    assert bias_of(replace(stopped, max_tokens=16)).quantile("generated", 1.0) == 16


def test_a_truncated_trajectory_counts_with_its_length() -> None:
    bias = bias_of(record(candidate(0, 256, FinishReason.LENGTH, SelectedAs.FILL)))
    assert bias.mean("generated") == bias.mean("returned") == 256


def test_old_groups_are_dropped() -> None:
    bias = bias_of(group(1000), *[group(10)] * BIAS_GROUPS)
    assert bias.mean("returned") == pytest.approx(10)
