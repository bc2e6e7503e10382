"""A group that is stopped and restarted."""

import numpy as np
import pytest

from darts_server.exceptions import IllegalMove
from darts_server.group.events import Complete, DeadlineSet, Deliver, Failed, Finished, Start, Started, Stop
from darts_server.group.group import Group
from darts_server.group.selection import DualEnd, InOrder
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs
from tests.group.world import running

STOP = FinishReason.STOP


def test_a_restart_discards_all_candidates_and_starts_the_allocated_number() -> None:
    group = running(DualEnd(2), 4)
    group.handle(Finished(3, 5, STOP))
    assert group.handle(Failed(0, RuntimeError("x"), retryable=True)) == []
    assert group.restart() == [Stop(1, DiscardReason.RESTARTED), Stop(2, DiscardReason.RESTARTED)]
    assert [c.reason for c in group.candidates] == [DiscardReason.FAILED, *[DiscardReason.RESTARTED] * 3]
    assert group.is_paused
    assert group.resume() == [Start((4, 5, 6, 7))]
    assert not group.is_paused
    group.handle(*(Started(i) for i in range(4, 8)))
    decisions = group.handle(
        *(Finished(i, length, STOP) for i, length in zip(range(4, 8), (12, 9, 9, 12), strict=True))
    )
    assert decisions[-1] == Complete({5: SelectedAs.SHORT, 6: SelectedAs.SHORT})


def test_candidates_before_a_restart_do_not_count() -> None:
    group = running(DualEnd(2), 3)
    group.handle(Finished(0, 5, STOP))
    group.restart()
    assert group.handle(Finished(1, 6, STOP), DeadlineSet(9)) == []
    assert group.selector.nth_shortest_length(1) is None
    group.resume()
    group.handle(*(Started(i) for i in (3, 4, 5)))
    group.handle(Finished(5, 8, STOP))
    assert group.selector.nth_shortest_length(1) == 8
    assert group.check_at.keys() <= {3, 4}


def test_a_group_that_has_delivered_or_is_paused_cannot_be_restarted() -> None:
    delivered = running(DualEnd(2), 2, early=True)
    paused = running(DualEnd(1), 1)
    assert delivered.can_restart
    assert Deliver(0) in delivered.handle(Finished(0, 5, STOP))
    paused.restart()
    for group in (delivered, paused):
        assert not group.can_restart
        with pytest.raises(IllegalMove):
            group.restart()


def test_an_unopened_group_restarts_its_candidates_and_the_candidates_added_meanwhile() -> None:
    group = Group(rng=np.random.default_rng(0))
    group.add_candidate()
    group.add_candidate()
    group.handle(Started(0), Started(1))
    group.restart()
    assert group.add_candidate() == []
    assert group.resume() == [Start((2, 3, 4))]
    assert group.add_candidate() == [Start((5,))]
    assert group.open(InOrder(4), 5) == [Start((6,))]


def test_a_group_that_opens_while_it_is_paused_selects_by_its_rule() -> None:
    group = Group(rng=np.random.default_rng(0))
    group.restart()
    assert group.open(DualEnd(2), 3) == []
    assert group.resume() == [Start((0, 1, 2))]
    group.handle(Started(0), Started(1), Started(2))
    decisions = group.handle(*(Finished(i, 5, STOP) for i in range(3)))
    assert decisions == [Complete({0: SelectedAs.SHORT, 1: SelectedAs.SHORT})]


@pytest.mark.parametrize(("added", "granted", "started"), [(2, 4, 4), (4, 2, 4)])
def test_a_group_may_be_opened_while_it_is_paused(added: int, granted: int, started: int) -> None:
    group = Group(rng=np.random.default_rng(0))
    for _ in range(added):
        group.add_candidate()
    group.restart()
    assert group.open(InOrder(2), granted) == []
    assert group.resume() == [Start(tuple(range(added, added + started)))]


def test_a_group_without_candidates_restarts_no_candidate() -> None:
    group = Group(rng=np.random.default_rng(0))
    group.restart()
    assert group.resume() == []
    assert group.resume() == []


def test_a_group_that_is_cancelled_while_paused_stays_cancelled() -> None:
    group = running(DualEnd(1), 2)
    group.restart()
    assert group.cancel() == []
    assert group.resume() == []
    assert group.outcome is Outcome.CANCELLED
