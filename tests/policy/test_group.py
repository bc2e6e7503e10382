"""Single steps of a group: what it decides on which event, and what it refuses."""

from typing import Any

import numpy as np
import pytest

from darts_server.exceptions import GroupFailed, IllegalMove
from darts_server.policy.candidate import State
from darts_server.policy.events import (
    Complete,
    Cut,
    Deliver,
    Event,
    Failed,
    Finished,
    GiveUp,
    LimitSet,
    Lost,
    Progress,
    Start,
    Started,
    Stop,
)
from darts_server.policy.group import Group
from darts_server.policy.selection import LongestTail, SampledTail, SelectionRule, Shortest
from darts_server.types import End, FinishReason, Outcome, StopReason


class Lots(np.random.Generator):
    """Gives out the given lots, in their order."""

    def __init__(self, *lots: float) -> None:
        super().__init__(np.random.PCG64(0))
        self._lots = iter(lots)

    def random(self, *_: Any, **__: Any) -> Any:
        return next(self._lots)


def opened(
    rule: SelectionRule, candidates: int, *, lots: tuple[float, ...] = (), spare: int = 0, early: bool = False
) -> Group:
    """A group all of whose first candidates run."""
    rng = Lots(*lots) if lots else np.random.default_rng(0)
    group = Group(rule=rule, candidates=candidates, rng=rng, spare=spare, early=early)
    assert group.open() == [Start(tuple(range(candidates)))]
    group.handle(*(Started(i) for i in range(candidates)))
    return group


def stop(index: int, tokens: int) -> Finished:
    return Finished(index, tokens, FinishReason.STOP)


def truncated(index: int, tokens: int) -> Finished:
    return Finished(index, tokens, FinishReason.LENGTH)


def reasons(group: Group) -> list[StopReason | None]:
    return [c.reason for c in group.candidates]


# --- opening ----------------------------------------------------------------


def test_fewer_candidates_than_seats_are_refused() -> None:
    with pytest.raises(ValueError, match="at least the group size 3, got 2"):
        Group(rule=Shortest(3), candidates=2, rng=np.random.default_rng(0), spare=0)


def test_a_group_opens_once() -> None:
    group = opened(Shortest(1), 1)
    with pytest.raises(IllegalMove, match="open already"):
        group.open()


def test_a_group_that_was_cancelled_before_it_opened_does_not_open() -> None:
    group = Group(rule=Shortest(1), candidates=1, rng=np.random.default_rng(0), spare=0)
    assert group.cancel() == []
    assert group.outcome is Outcome.CANCELLED
    assert group.open() == []


def test_a_limit_may_be_set_before_the_group_opens() -> None:
    group = Group(rule=SampledTail(0, 1), candidates=1, rng=np.random.default_rng(0), spare=5)
    assert group.handle(LimitSet(3)) == []
    assert group.open() == [Start((0,))]
    assert group.handle(Started(0), Progress(0, 3)) == [Cut(0, 3), Complete({0: End.LONG})]


def test_lots_are_numbered_by_the_generator_it_was_given() -> None:
    group = opened(Shortest(1), 3)
    assert [c.draw for c in group.candidates] == list(np.random.default_rng(0).random(3))


# --- refusing ---------------------------------------------------------------


@pytest.mark.parametrize("index", [-1, 2])
def test_an_event_about_no_candidate_is_refused(index: int) -> None:
    with pytest.raises(IllegalMove, match=f"no candidate {index} was started"):
        opened(Shortest(1), 2).handle(Started(index))


def test_a_second_end_is_refused() -> None:
    group = opened(Shortest(2), 2)
    group.handle(stop(0, 4))
    with pytest.raises(IllegalMove):
        group.handle(stop(0, 4))


def test_a_failure_that_came_with_an_illegal_event_counts_at_the_next() -> None:
    group = opened(Shortest(2), 2)
    with pytest.raises(IllegalMove):
        group.handle(Failed(0, RuntimeError()), Started(1))
    stopped, gave_up = group.handle()
    assert stopped == Stop(1, StopReason.CANCELLED)
    assert isinstance(gave_up, GiveUp)
    assert str(gave_up.error) == "1 of 2 trajectories are missing"


# --- completing -------------------------------------------------------------


def test_the_shortest_complete_as_soon_as_the_others_are_known_to_be_longer() -> None:
    group = opened(Shortest(2), 4)
    assert group.handle(stop(3, 2)) == []
    assert group.handle(stop(1, 5)) == []
    assert group.alarms == {0: 5, 2: 4}
    assert group.handle(Progress(2, 4)) == [Stop(2, StopReason.LONGER_THAN_NEEDED)]
    assert group.alarms == {0: 5}
    assert group.handle(Progress(0, 5)) == [
        Stop(0, StopReason.LONGER_THAN_NEEDED),
        Complete({1: End.SHORT, 3: End.SHORT}),
    ]
    assert group.outcome is Outcome.COMPLETED
    assert group.alarms == {}
    assert reasons(group) == [StopReason.LONGER_THAN_NEEDED, None, StopReason.LONGER_THAN_NEEDED, None]


def test_surplus_candidates_are_discarded_with_the_reason_of_the_rule() -> None:
    group = opened(LongestTail(1, 1), 4)
    group.handle(stop(0, 2), stop(1, 3), truncated(2, 9))
    assert group.handle(stop(3, 5)) == [Complete({0: End.SHORT, 3: End.LONG})]
    assert reasons(group) == [None, StopReason.MIDDLE, StopReason.TRUNCATED, None]


def test_a_longest_tail_of_none_stops_those_that_are_longer() -> None:
    group = opened(LongestTail(1, 0), 2)
    assert group.handle(stop(0, 2), Progress(1, 2)) == [
        Stop(1, StopReason.LONGER_THAN_NEEDED),
        Complete({0: End.SHORT}),
    ]


def test_a_completed_group_hears_nothing_more() -> None:
    group = opened(Shortest(1), 2)
    group.handle(stop(0, 1), Progress(1, 3))
    assert group.handle(stop(1, 4)) == []
    assert group.cancel() == []
    assert group.outcome is Outcome.COMPLETED


def test_what_is_known_to_belong_is_delivered_once_before_the_group_is_complete() -> None:
    group = opened(Shortest(2), 2, early=True)
    assert group.handle(stop(1, 4)) == [Deliver(1)]
    assert group.handle(Progress(0, 5)) == []
    assert group.handle(stop(0, 6)) == [Complete({0: End.SHORT, 1: End.SHORT})]


# --- failing ----------------------------------------------------------------


@pytest.mark.parametrize("event", [Failed(0, RuntimeError("no memory")), Lost(0)])
def test_a_failure_that_others_can_cover_starts_nobody(event: Event) -> None:
    assert opened(Shortest(1), 2, spare=1).handle(event) == []


def test_failures_are_replaced_until_the_spare_ones_are_used_up() -> None:
    group = opened(Shortest(2), 2, spare=2)
    assert group.handle(Lost(0)) == [Start((2,))]
    assert group.handle(Failed(2, RuntimeError())) == [Start((3,))]
    error = RuntimeError("no memory")
    assert group.handle(Failed(3, error)) == [Stop(1, StopReason.CANCELLED), GiveUp(error)]
    assert group.outcome is Outcome.FAILED
    failed = StopReason.FAILED
    assert reasons(group) == [failed, StopReason.CANCELLED, failed, failed]


def test_giving_up_names_the_last_failure_whatever_else_was_heard() -> None:
    first, last = RuntimeError("first"), RuntimeError("last")
    group = opened(Shortest(2), 3)
    assert group.handle(Failed(0, first), Failed(1, last), Progress(2, 4))[-1] == GiveUp(last)


def test_nobody_is_started_after_a_failure_that_others_would_share() -> None:
    error = RuntimeError("the engine is dead")
    group = opened(Shortest(1), 1, spare=5)
    assert group.handle(Failed(0, error, retryable=False)) == [GiveUp(error)]


def test_giving_up_after_an_abort_says_which_candidate_was_aborted() -> None:
    [gave_up] = opened(Shortest(1), 1).handle(Lost(0))
    assert isinstance(gave_up, GiveUp)
    assert isinstance(gave_up.error, GroupFailed)
    assert str(gave_up.error) == "the engine aborted candidate 0"


def test_a_newcomer_takes_no_seat_from_one_that_was_delivered() -> None:
    group = opened(Shortest(2), 2, spare=1, early=True)
    assert group.handle(stop(1, 4), Progress(0, 4)) == [Deliver(1)]
    assert group.handle(Lost(0)) == [Start((2,))]
    assert group.handle(Started(2), stop(2, 1)) == [Complete({1: End.SHORT, 2: End.SHORT})]


def test_a_second_restart_keeps_the_seats_of_the_first() -> None:
    group = opened(Shortest(3), 3, spare=2, early=True)
    assert group.handle(stop(0, 4), Progress(1, 4), Progress(2, 4)) == [Deliver(0)]
    assert group.handle(Lost(1)) == [Start((3,))]
    assert group.handle(stop(2, 9), Lost(3)) == [Start((4,)), Deliver(2)]
    assert group.handle(Started(4), stop(4, 1)) == [Complete({0: End.SHORT, 2: End.SHORT, 4: End.SHORT})]


def test_a_restart_leaves_both_ends_of_the_group_as_they_were_wanted() -> None:
    group = opened(SampledTail(1, 2), 3, lots=(0.7, 0.1, 0.6, 0.2), spare=1, early=True)
    assert group.handle(stop(0, 5), truncated(1, 9)) == [Deliver(1)]
    assert group.handle(Lost(2)) == [Start((3,))]
    assert group.handle(Started(3), stop(3, 7)) == [Complete({0: End.SHORT, 1: End.FILL, 3: End.LONG})]


# --- cutting ----------------------------------------------------------------


def test_a_running_tail_is_cut_when_it_reaches_the_limit() -> None:
    group = opened(SampledTail(1, 1), 3, lots=(0.9, 0.2, 0.1))
    assert group.handle(LimitSet(6), stop(0, 2)) == []
    assert group.handle(Progress(1, 2), Progress(2, 3)) == [Stop(1, StopReason.TAIL_PRUNED)]
    assert group.alarms == {2: 6}
    assert group.handle(Progress(2, 7)) == [Cut(2, 6), Complete({0: End.SHORT, 2: End.LONG})]
    assert (group.candidates[2].tokens, group.candidates[2].state) == (6, State.SELECTED)


def test_a_tail_that_ended_beyond_the_limit_is_cut_afterwards() -> None:
    group = opened(SampledTail(1, 1), 2, lots=(0.9, 0.1))
    assert group.handle(stop(1, 9)) == []
    assert group.handle(stop(0, 2), LimitSet(5)) == [Cut(1, 5), Complete({0: End.SHORT, 1: End.LONG})]


def test_a_tail_that_was_delivered_whole_is_not_cut() -> None:
    group = opened(SampledTail(1, 2), 3, early=True)
    assert Deliver(1) in group.handle(stop(0, 2), stop(1, 9), Progress(2, 3))
    assert group.handle(LimitSet(5), Progress(2, 4)) == []
    assert group.handle(Progress(2, 5))[0] == Cut(2, 5)


def test_only_running_candidates_have_alarms() -> None:
    group = opened(SampledTail(0, 2), 2)
    group.handle(LimitSet(5), stop(0, 2))
    assert group.alarms == {1: 5}


def test_one_that_only_fills_up_is_returned_whole() -> None:
    group = opened(SampledTail(2, 0), 2)
    group.handle(LimitSet(5), stop(0, 2))
    assert group.handle(truncated(1, 9)) == [Complete({0: End.SHORT, 1: End.FILL})]
    assert group.candidates[1].tokens == 9


def test_a_newcomer_takes_no_seat_from_one_that_was_cut() -> None:
    group = opened(SampledTail(1, 2), 3, lots=(0.9, 0.5, 0.6, 0.0), spare=1)
    assert group.handle(LimitSet(4), stop(0, 2), Progress(1, 4)) == [Cut(1, 4)]
    assert group.handle(Lost(2)) == [Start((3,))]
    assert group.handle(Started(3), stop(3, 1)) == [Complete({0: End.LONG, 1: End.LONG, 3: End.SHORT})]


def test_what_the_engine_still_says_about_one_that_was_cut_changes_nothing() -> None:
    group = opened(SampledTail(0, 2), 2)
    assert group.handle(LimitSet(4), Progress(1, 4)) == [Cut(1, 4)]
    assert group.handle(truncated(1, 5)) == []
    assert group.handle(stop(0, 3)) == [Complete({0: End.LONG, 1: End.LONG})]
    assert group.candidates[1].tokens == 4


# --- cancelling -------------------------------------------------------------


def test_a_cancelled_group_stops_what_runs_and_discards_all() -> None:
    group = opened(Shortest(2), 3, early=True)
    group.handle(stop(0, 2), Lost(1))
    assert group.cancel() == [Stop(2, StopReason.CANCELLED)]
    assert reasons(group) == [StopReason.CANCELLED, StopReason.FAILED, StopReason.CANCELLED]
    assert group.outcome is Outcome.CANCELLED
    assert group.handle(stop(2, 1)) == []
    assert group.cancel() == []
