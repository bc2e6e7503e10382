"""Single steps of a group: its decisions on events, and the events that it refuses."""

import numpy as np
import pytest

from darts_server.exceptions import GroupAborted, IllegalMove
from darts_server.group.candidate import State
from darts_server.group.events import (
    Complete,
    Cut,
    DeadlineSet,
    Deliver,
    Failed,
    Finished,
    GiveUp,
    Lost,
    Progress,
    Start,
    Started,
    Stop,
)
from darts_server.group.group import Group, selection_weights
from darts_server.group.sampled_tail import CutTail, SampledTail
from darts_server.group.selection import DualEnd, InOrder, SelectionRule
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs
from tests.group.world import Draws


def unopened(*, draws: tuple[float, ...] = (), replacements: int | None = 0, early: bool = False) -> Group:
    return Group(
        rng=Draws(*draws) if draws else np.random.default_rng(0), max_replacements=replacements, deliver_early=early
    )


def opened(
    rule: SelectionRule, candidates: int, *, draws: tuple[float, ...] = (), replacements: int = 0, early: bool = False
) -> Group:
    """Return an open group whose candidates all run."""
    group = unopened(draws=draws, replacements=replacements, early=early)
    assert group.open(rule, candidates) == [Start(tuple(range(candidates)))]
    group.handle(*(Started(i) for i in range(candidates)))
    return group


def unopened_with(candidates: int, *, replacements: int | None = 0) -> Group:
    """Return a group that is not open yet, with running candidates."""
    group = unopened(replacements=replacements)
    for i in range(candidates):
        assert group.add_candidate() == [Start((i,))]
        assert group.handle(Started(i)) == []
    return group


def stop(index: int, tokens: int) -> Finished:
    return Finished(index, tokens, FinishReason.STOP)


def truncated(index: int, tokens: int) -> Finished:
    return Finished(index, tokens, FinishReason.LENGTH)


def reasons(group: Group) -> list[DiscardReason | None]:
    return [c.reason for c in group.candidates]


# --- opening ----------------------------------------------------------------


def test_fewer_candidates_than_the_size_are_refused() -> None:
    group = unopened()
    with pytest.raises(ValueError, match="at least the group size 3, got 2"):
        group.open(DualEnd(3), 2)
    assert not group.is_open
    assert group.open(DualEnd(3), 3) == [Start((0, 1, 2))]
    assert (group.is_open, group.rule) == (True, DualEnd(3))


def test_an_open_group_takes_no_more_candidates() -> None:
    group = opened(DualEnd(1), 1)
    with pytest.raises(IllegalMove, match="open already"):
        group.open(DualEnd(1), 1)
    with pytest.raises(IllegalMove, match="open already"):
        group.add_candidate()


def test_a_group_that_was_cancelled_before_it_opened_does_not_open() -> None:
    group = unopened()
    assert group.cancel() == []
    assert group.outcome is Outcome.CANCELLED
    assert group.open(DualEnd(1), 1) == []
    assert group.add_candidate() == []
    assert not group.candidates


def test_tail_draws_come_from_the_given_generator() -> None:
    draws = list(np.random.default_rng(0).random(3))
    assert [c.tail_draw for c in opened(DualEnd(1), 3).candidates] == draws
    group = unopened_with(2)
    group.open(DualEnd(1), 3)
    assert [c.tail_draw for c in group.candidates] == draws


# --- before the opening --------------------------------------------------


def test_nothing_is_decided_before_a_group_is_open() -> None:
    group = unopened_with(3)
    assert group.handle(stop(0, 2), truncated(1, 9), Progress(2, 5)) == []
    assert group.handle(DeadlineSet(1)) == []
    assert group.check_at == {}
    assert group.open(DualEnd(1), 3) == [Stop(2, DiscardReason.LONGER_THAN_NEEDED), Complete({0: SelectedAs.SHORT})]


def test_opening_starts_the_missing_candidates() -> None:
    group = unopened_with(2)
    assert group.open(DualEnd(2), 4) == [Start((2, 3))]
    assert group.check_at == {}
    group.handle(stop(0, 2), stop(1, 6))
    assert group.check_at == {2: 5, 3: 5}


def test_opening_with_too_many_candidates_starts_and_stops_none() -> None:
    group = unopened_with(4)
    assert group.open(DualEnd(2), 3) == []
    assert len(group.candidates) == 4


def test_failures_before_the_opening_do_not_count_as_replacements() -> None:
    group = unopened_with(3, replacements=1)
    assert group.handle(Lost(0), Failed(2, RuntimeError())) == []
    assert group.open(DualEnd(3), 3) == [Start((3, 4))]
    assert group.handle(Lost(3)) == [Start((5,))]
    stopped = [Stop(i, DiscardReason.CANCELLED) for i in (1, 5)]
    assert group.handle(Lost(4))[:-1] == stopped


def test_a_failure_that_is_not_retryable_ends_a_group_that_is_not_open() -> None:
    group = unopened_with(2)
    error = RuntimeError("the engine is dead")
    assert group.handle(Failed(0, error, retryable=False)) == [Stop(1, DiscardReason.CANCELLED), GiveUp(error)]
    assert group.outcome is Outcome.FAILED
    assert reasons(group) == [DiscardReason.FAILED, DiscardReason.CANCELLED]
    assert group.add_candidate() == []
    assert group.open(DualEnd(2), 2) == []


def test_a_group_may_lose_as_many_candidates_as_it_returns_three_times_by_default() -> None:
    group = unopened_with(1, replacements=None)
    assert group.open(DualEnd(2), 2) == [Start((1,))]
    for first in (0, 2, 4):
        assert group.handle(Lost(first), Lost(first + 1)) == [Start((first + 2, first + 3))]
    assert isinstance(group.handle(Lost(6))[-1], GiveUp)


def test_as_many_candidates_start_as_were_lost_so_that_those_that_finish_early_do_not_fill_the_group() -> None:
    group = unopened(replacements=None)
    group.open(DualEnd(2), 6)
    group.handle(*(Started(i) for i in range(6)), stop(0, 8), stop(1, 9))
    assert group.handle(Lost(2)) == [Start((6,))]
    assert group.handle(Lost(3), Lost(4), Lost(5)) == [Start((7, 8, 9))]
    # No more losses are free, so what is lost now is replaced only if too few candidates are left.
    group.handle(*(Started(i) for i in range(6, 10)))
    assert group.handle(Lost(6)) == []
    group.handle(stop(7, 4), stop(8, 10))
    assert group.handle(stop(9, 5)) == [Complete({7: SelectedAs.SHORT, 9: SelectedAs.SHORT})]


def test_a_candidate_that_its_caller_aborts_is_replaced_and_is_no_loss_of_the_engine() -> None:
    group = opened(DualEnd(2), 3, replacements=1)
    assert group.handle(Lost(0, by_caller=True)) == []
    assert group.handle(Lost(1, by_caller=True)) == [Start((3,))]
    group.handle(Started(3), stop(2, 4), stop(3, 5))
    assert group.outcome is Outcome.COMPLETED
    assert reasons(group) == [DiscardReason.ABORTED, DiscardReason.ABORTED, None, None]
    assert selection_weights(group) == {2: 1.0, 3: 1.0}


def test_a_decided_group_has_the_delivered_trajectories() -> None:
    group = opened(InOrder(3), 3, early=True)
    assert group.handle(stop(1, 5)) == [Deliver(1)]
    assert group.end_as_decided() == [Stop(0, DiscardReason.DECIDED), Stop(2, DiscardReason.DECIDED)]
    assert group.outcome is Outcome.DECIDED
    assert reasons(group) == [DiscardReason.DECIDED, None, DiscardReason.DECIDED]
    assert group.end_as_decided() == []


def test_a_carried_group_discards_all_but_failed_candidates_as_carried() -> None:
    group = opened(DualEnd(1), 4, replacements=4)
    group.handle(Failed(0, RuntimeError(), retryable=True), Progress(1, 9))
    group.restart()
    group.resume()
    group.handle(Started(4), Started(5), Lost(5))
    assert {stopped.index for stopped in group.end_as_carried() if isinstance(stopped, Stop)} == {4, 6, 7}
    assert group.outcome is Outcome.CANCELLED
    carried = DiscardReason.CARRIED
    failed = DiscardReason.FAILED
    restarted = DiscardReason.RESTARTED
    assert reasons(group) == [failed, restarted, restarted, restarted, carried, failed, carried, carried]
    assert group.end_as_carried() == []


@pytest.mark.parametrize("index", [-1, 2])
def test_an_event_of_an_unknown_candidate_is_refused(index: int) -> None:
    with pytest.raises(IllegalMove, match=f"no candidate {index} was started"):
        opened(DualEnd(1), 2).handle(Started(index))


def test_a_failure_before_an_illegal_event_counts_at_the_next_call() -> None:
    group = opened(DualEnd(2), 2)
    error = RuntimeError()
    with pytest.raises(IllegalMove):
        group.handle(Failed(0, error), Started(1))
    assert group.handle() == [Stop(1, DiscardReason.CANCELLED), GiveUp(error)]


def test_the_group_is_complete_as_soon_as_the_other_candidates_are_longer() -> None:
    group = opened(DualEnd(2), 4)
    assert group.handle(stop(3, 2)) == []
    assert group.handle(stop(1, 5)) == []
    assert group.check_at == {0: 5, 2: 4}
    assert group.handle(Progress(2, 4)) == [Stop(2, DiscardReason.LONGER_THAN_NEEDED)]
    assert group.check_at == {0: 5}
    assert group.handle(Progress(0, 5)) == [
        Stop(0, DiscardReason.LONGER_THAN_NEEDED),
        Complete({1: SelectedAs.SHORT, 3: SelectedAs.SHORT}),
    ]
    assert group.outcome is Outcome.COMPLETED
    assert group.check_at == {}
    assert reasons(group) == [DiscardReason.LONGER_THAN_NEEDED, None, DiscardReason.LONGER_THAN_NEEDED, None]


# --- failing ----------------------------------------------------------------


def test_failures_are_replaced_until_the_replacements_are_used_up() -> None:
    group = opened(DualEnd(2), 2, replacements=2)
    assert group.handle(Lost(0)) == [Start((2,))]
    assert group.handle(Failed(2, RuntimeError())) == [Start((3,))]
    error = RuntimeError("no memory")
    assert group.handle(Failed(3, error)) == [Stop(1, DiscardReason.CANCELLED), GiveUp(error)]
    assert group.outcome is Outcome.FAILED
    failed = DiscardReason.FAILED
    assert reasons(group) == [failed, DiscardReason.CANCELLED, failed, failed]


def test_giving_up_does_not_report_a_candidate_that_the_group_stopped() -> None:
    group = opened(SampledTail(1, 1), 3, draws=(0.9, 0.8, 0.1))
    error = RuntimeError("no memory")
    assert group.handle(stop(0, 2), Progress(1, 2), Progress(2, 2)) == [Stop(1, DiscardReason.TAIL_PRUNED)]
    assert group.handle(Failed(2, error), Lost(1)) == [GiveUp(error)]


def test_no_candidate_is_started_after_a_failure_that_is_not_retryable() -> None:
    error = RuntimeError("the engine is dead")
    group = opened(DualEnd(1), 1, replacements=5)
    assert group.handle(Failed(0, error, retryable=False)) == [GiveUp(error)]


@pytest.mark.parametrize(("by_caller", "who"), [(True, "caller"), (False, "engine")])
def test_the_error_after_an_abort_names_the_candidate_and_who_aborted_it(by_caller: bool, who: str) -> None:
    [gave_up] = opened(DualEnd(1), 1).handle(Lost(0, by_caller))
    assert isinstance(gave_up, GiveUp)
    assert isinstance(gave_up.error, GroupAborted)  # a 503: nothing is wrong with the request
    assert str(gave_up.error) == f"the {who} aborted candidate 0, and too few others are left"


# --- limits -----------------------------------------------------------------


def test_a_running_tail_is_cut_when_it_reaches_the_deadline() -> None:
    group = opened(CutTail(1, 1), 4, draws=(0.9, 0.2, 0.1, 0.8))
    assert group.handle(DeadlineSet(6), stop(0, 2), Progress(1, 2), Progress(2, 3), Progress(3, 3)) == []
    assert group.check_at == {}
    assert group.handle(stop(3, 5)) == []
    assert group.check_at == {1: 5, 2: 5}
    assert group.handle(Progress(1, 5)) == [Stop(1, DiscardReason.TAIL_PRUNED)]
    assert group.handle(Progress(2, 5)) == []
    assert group.check_at == {2: 6}
    assert group.handle(Progress(2, 7)) == [Cut(2, 6), Complete({0: SelectedAs.SHORT, 2: SelectedAs.LONG})]
    assert (group.candidates[2].tokens, group.candidates[2].state) == (6, State.SELECTED)


def test_a_tail_that_finished_beyond_the_cut_length_is_cut_at_once() -> None:
    group = opened(CutTail(1, 1), 3, draws=(0.9, 0.1, 0.8))
    assert group.handle(DeadlineSet(3, 6), stop(1, 9)) == [Cut(1, 6)]
    assert group.handle(stop(0, 2), stop(2, 4)) == [
        Cut(1, 4),
        Complete({0: SelectedAs.SHORT, 1: SelectedAs.LONG}),
    ]


def test_a_delivered_tail_is_not_cut() -> None:
    group = opened(CutTail(1, 2), 5, draws=(0.9, 0.1, 0.2, 0.8, 0.7), early=True)
    assert group.handle(stop(0, 2), stop(1, 9)) == [Deliver(1)]
    assert group.handle(DeadlineSet(5), Progress(2, 4), stop(3, 3), stop(4, 4)) == [Deliver(0)]
    assert group.handle(Progress(2, 5)) == [
        Cut(2, 5),
        Complete({0: SelectedAs.SHORT, 1: SelectedAs.LONG, 2: SelectedAs.LONG}),
    ]


# --- cancelling -------------------------------------------------------------


def test_a_cancelled_group_stops_running_candidates_and_discards_all() -> None:
    group = opened(DualEnd(2), 3)
    group.handle(stop(0, 2), Lost(1))
    assert group.cancel() == [Stop(2, DiscardReason.CANCELLED)]
    assert reasons(group) == [DiscardReason.CANCELLED, DiscardReason.FAILED, DiscardReason.CANCELLED]
    assert group.outcome is Outcome.CANCELLED
    assert group.handle(stop(2, 1)) == []
    assert group.cancel() == []


def test_only_the_first_deadline_counts() -> None:
    group = opened(CutTail(1, 1), 3, draws=(0.9, 0.8, 0.1))
    group.handle(DeadlineSet(6), stop(0, 2), stop(1, 3))
    assert group.handle(DeadlineSet(4), Progress(2, 5)) == []
    assert (group.deadline, group.check_at) == (6, {2: 6})


def test_a_certain_trajectory_is_delivered_once_before_the_group_is_complete() -> None:
    group = opened(DualEnd(2), 2, early=True)
    assert group.handle(stop(1, 4))[-1] == Deliver(1)
    assert group.handle(Progress(0, 5)) == []
    assert group.handle(stop(0, 6)) == [Complete({0: SelectedAs.SHORT, 1: SelectedAs.SHORT})]


def test_the_longest_is_delivered_before_the_shortest_is_certain() -> None:
    group = opened(DualEnd(1, 2), 4, early=True)
    assert group.handle(stop(0, 5), stop(1, 6)) == []
    assert group.handle(stop(2, 7)) == [Deliver(2)]
