"""Lengths generated against lengths returned."""

import pytest

from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.observers.length_bias import MAX_GROUPS, LengthBias
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs


def group(*returned: int, stopped: tuple[int, ...] = (), outcome: Outcome = Outcome.COMPLETED) -> GroupRecord:
    kept = [
        CandidateRecord(i, n, FinishReason.STOP, SelectedAs.SHORT, None, False, 0, 1, 0, 0)
        for i, n in enumerate(returned)
    ]
    gone = [CandidateRecord(9, n, None, None, DiscardReason.TAIL_PRUNED, False, 0, 1, 0, 0) for n in stopped]
    return GroupRecord("g", "p", "uniform", len(kept), outcome, (*kept, *gone), 0.0, 1.0, None)


def test_there_is_no_value_before_the_first_group() -> None:
    bias = LengthBias()
    bias.group_ended(group(outcome=Outcome.CANCELLED))
    assert bias.mean("returned") is bias.quantile("generated", 0.5) is None


def test_without_shaping_there_is_no_bias() -> None:
    bias = LengthBias()
    bias.group_ended(group(10, 20, 30, 100))
    assert bias.mean("generated") == bias.mean("returned") == 40
    assert [bias.quantile("returned", share) for share in (0.25, 0.5, 1.0)] == [10, 20, 100]
    assert bias.quantile("generated", 0.5) == 20


def test_lengths_of_stopped_candidates_are_estimated() -> None:
    bias = LengthBias()
    bias.group_ended(group(10, 12, 14, stopped=(14, 14, 14)))
    generated, returned = bias.mean("generated"), bias.mean("returned")
    assert returned == 12
    assert generated is not None
    assert generated > 14
    tail = bias.quantile("generated", 0.9)
    assert tail is not None
    assert tail > 14


def test_a_truncated_trajectory_counts_with_its_length() -> None:
    bias = LengthBias()
    truncated = CandidateRecord(0, 256, FinishReason.LENGTH, SelectedAs.FILL, None, False, 0, 1, 0, 0)
    bias.group_ended(GroupRecord("g", "p", "uniform", 1, Outcome.COMPLETED, (truncated,), 0.0, 1.0, None))
    assert bias.mean("generated") == bias.mean("returned") == 256


def test_old_groups_are_dropped() -> None:
    bias = LengthBias()
    bias.group_ended(group(1000))
    for _ in range(MAX_GROUPS):
        bias.group_ended(group(10))
    assert bias.mean("returned") == pytest.approx(10)
