"""Groups that give up candidates before anything was generated: they are as if they had been opened with fewer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.events import DeadlineSet, Decision, Failed, Finished, Lost, Progress, Start, Started, Stop
from darts_server.policy.group import Group, selection_weights
from darts_server.policy.sampled_tail import CutTail, SampledTail
from darts_server.policy.selection import DualEnd, InOrder, SelectionRule
from darts_server.types import DiscardReason, FinishReason, Outcome

LOAD = DiscardReason.LOAD
RULES: list[SelectionRule] = [DualEnd(3), SampledTail(3, 1), DualEnd(3, 1), CutTail(3, 1), InOrder(3)]


def opened(rule: SelectionRule, candidates: int, *, prunes: bool = False, early: bool = False) -> Group:
    survival = np.random.default_rng(1) if prunes else None
    group = Group(rng=np.random.default_rng(0), deliver_early=early, survival_rng=survival)
    group.open(rule, candidates)
    return group


def run(group: Group, lengths: list[int], deadline: int | None, first: int = 0) -> list[Decision]:
    """Run all candidates from ``first`` on side by side, and return what was decided."""
    decided: list[Decision] = []
    if deadline is not None:
        decided += group.handle(DeadlineSet(deadline, 2 * deadline))
    for tokens in range(1, max(lengths) + 1):
        for index in range(first, len(group.candidates)):
            if group.candidates[index].running:
                length = lengths[index - first]
                event = Finished(index, tokens, FinishReason.STOP) if tokens == length else Progress(index, tokens)
                decided += group.handle(event)
    return decided


@given(
    rule=st.sampled_from(RULES),
    kept=st.integers(0, 8),
    started=st.integers(0, 8),
    lengths=st.lists(st.integers(1, 12), min_size=8, max_size=8),
    deadline=st.none() | st.integers(1, 12),
    early=st.booleans(),
)
def test_a_reduced_group_is_as_if_it_had_been_opened_with_fewer(
    rule: SelectionRule, kept: int, started: int, lengths: list[int], deadline: int | None, early: bool
) -> None:
    reduced, small = opened(rule, 8, early=early), opened(rule, max(kept, rule.size), early=early)
    left = len(small.candidates)
    reduced.handle(*(Started(index) for index in range(started)))
    assert reduced.reduce(kept) == [Stop(index, LOAD) for index in range(left, 8)]
    reduced.handle(*(Started(index) for index in range(started, left)))
    small.handle(*(Started(index) for index in range(left)))
    assert run(reduced, lengths, deadline) == run(small, lengths, deadline)
    assert reduced.outcome is small.outcome is Outcome.COMPLETED
    assert selection_weights(reduced) == selection_weights(small)
    assert [(c.reason, c.selected_as, c.tokens) for c in reduced.candidates[:left]] == [
        (c.reason, c.selected_as, c.tokens) for c in small.candidates
    ]
    assert {c.reason for c in reduced.candidates[left:]} <= {LOAD}


def test_a_group_can_be_reduced_again_but_not_enlarged() -> None:
    group = opened(DualEnd(2), 8)
    assert [stop.index for stop in group.reduce(6) if isinstance(stop, Stop)] == [6, 7]
    assert group.reduce(7) == []
    assert [stop.index for stop in group.reduce(0) if isinstance(stop, Stop)] == [2, 3, 4, 5]
    assert group.reduce(0) == []


def test_nothing_is_given_up_once_a_length_is_known_in_part() -> None:
    for event in (Progress(0, 1), Finished(0, 5, FinishReason.STOP)):
        group = opened(DualEnd(2), 8)
        group.handle(Started(0), event)
        assert group.reduce(2) == []
        assert all(c.alive for c in group.candidates)


@pytest.mark.parametrize("event", [Failed(0, RuntimeError()), Lost(0), Lost(0, by_caller=True)])
def test_a_group_that_lost_a_candidate_keeps_the_others(event: Failed | Lost) -> None:
    group = opened(DualEnd(2), 8)
    group.handle(Started(0), event)
    assert group.reduce(2) == []


def test_a_group_that_prunes_has_ended_or_is_paused_is_not_reduced() -> None:
    assert opened(DualEnd(2), 8, prunes=True).reduce(2) == []
    cancelled, paused = opened(DualEnd(2), 8), opened(DualEnd(2), 8)
    cancelled.cancel()
    paused.restart()
    unopened = Group(rng=np.random.default_rng(0))
    unopened.add_candidate()
    assert cancelled.reduce(2) == paused.reduce(2) == unopened.reduce(0) == []


def test_a_reduced_group_starts_as_many_again_after_a_restart_and_may_be_reduced_further() -> None:
    group = opened(DualEnd(2), 8)
    group.reduce(5)
    group.restart()
    [start] = group.resume()
    assert start == Start((8, 9, 10, 11, 12))
    assert [stop.index for stop in group.reduce(4) if isinstance(stop, Stop)] == [12]


def test_what_was_given_up_is_not_carried_over() -> None:
    group = opened(DualEnd(2), 4)
    group.reduce(3)
    group.carry()
    assert [c.reason for c in group.candidates] == [DiscardReason.CARRIED] * 3 + [LOAD]


def test_a_replacement_comes_for_one_that_fails_after_the_reduction() -> None:
    group = opened(DualEnd(2), 4)
    group.reduce(2)
    group.handle(Started(0), Started(1))
    assert group.handle(Lost(0)) == [Start((4,))]
