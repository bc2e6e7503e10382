"""Cohorts: the deadline that their groups determine together is passed on, and their record."""

import asyncio
from functools import partial

import pytest

from darts_server.policy.deadline import Deadline
from darts_server.records import CohortRecord
from darts_server.rollout.allocation.cohort import Cohort

pytestmark = pytest.mark.anyio
SURE = Deadline(exploration=0.0)


class CohortHarness:
    """A cohort whose groups are numbers, and the deadlines that they get."""

    def __init__(
        self, groups: int, rule: Deadline = SURE, tokens: int | None = None, starting: int | None = None
    ) -> None:
        self.records: list[CohortRecord] = []
        self.now = 10.0
        record = CohortRecord("cut", groups, 12.5)
        self.cohort = Cohort(
            record, rule, self.records.append, lambda: self.now, starting or groups, initial_deadline=tokens
        )
        self.deadlines: list[list[tuple[int, int]]] = []

    def join(self, count: int = 1) -> None:
        for _ in range(count):
            self.deadlines.append([])
            group = len(self.deadlines) - 1
            self.cohort.join(group, partial(self._set_deadline, group))

    def _set_deadline(self, group: int, tokens: int, cut_length: int) -> None:
        self.deadlines[group].append((tokens, cut_length))

    def need(self, *tokens: int) -> None:
        """The first groups report what they need, in order."""
        for group, each in enumerate(tokens):
            self.cohort.report_need(group, each)


async def turn() -> None:
    await asyncio.sleep(0)


async def test_the_deadline_is_set_once_in_the_turn_after_it_is_known() -> None:
    harness = CohortHarness(10)
    harness.join(10)
    harness.need(*range(1, 9))
    await turn()
    assert harness.cohort.deadline.tokens is None
    harness.cohort.report_need(8, 90)
    assert harness.deadlines == [[]] * 10, "the group that has just reported has not acted on its event yet"
    await turn()
    harness.cohort.report_minimum(9, 1)
    await turn()
    assert harness.deadlines == [[(90, 180)]] * 10


@pytest.mark.parametrize("ends_before", [False, True])
async def test_groups_that_ended_after_their_report_still_count_but_get_no_deadline(ends_before: bool) -> None:
    harness = CohortHarness(2)
    harness.join(2)
    harness.cohort.report_need(0, 8)
    if ends_before:
        harness.cohort.end_group(0)
    harness.cohort.report_need(1, 7)
    if not ends_before:  # in the turn in which it is known
        harness.cohort.end_group(0)
    await turn()
    assert harness.deadlines == [[], [(8, 16)]]


async def test_a_group_that_joins_late_gets_the_deadline_once_in_a_later_turn() -> None:
    harness = CohortHarness(3, Deadline(0.6, exploration=0.0))
    harness.join(2)
    harness.need(7, 8)
    await turn()
    harness.join()
    assert harness.deadlines[2] == []
    await turn()
    assert harness.deadlines == [[(8, 16)]] * 3
    known = CohortHarness(2, tokens=33)  # from the start
    known.join(2)
    await turn()
    known.need(50, 60)
    await turn()
    assert known.deadlines == [[(33, 66)]] * 2


async def test_the_record_is_created_once_when_the_last_group_has_ended_or_was_dropped() -> None:
    harness = CohortHarness(4)
    for harness.now in (11.0, 12.0, 13.0):  # its seconds count from the first
        harness.join()
    harness.need(5, 6, 7)
    for group in (0, None, 1):
        harness.cohort.end_group(group)
    assert harness.records == []
    harness.now = 15.5
    harness.cohort.end_group(2)
    assert harness.records == [CohortRecord("cut", 4, 12.5, 7, False, 4.5)]
    none_started = CohortHarness(1)
    none_started.now = 18.0
    none_started.cohort.end_group()
    assert none_started.records[0].measured_seconds == 0.0


async def test_a_deadline_does_not_wait_for_groups_that_start_only_in_place_of_others() -> None:
    harness = CohortHarness(30, starting=10)
    harness.join(10)
    harness.need(*range(1, 9))
    assert harness.cohort.deadline.tokens is None
    # The first group does not count, so another group starts in its place.
    harness.join()
    harness.cohort.report_need(8, 90)
    assert harness.cohort.deadline.tokens is None, "9 of 11 groups are less than the quantile"
    harness.cohort.report_need(9, 95)
    await turn()
    assert harness.deadlines == [[(95, 190)]] * 11


async def test_groups_that_never_start_are_not_missed_in_the_deadline() -> None:
    harness = CohortHarness(12, starting=10)
    harness.join(10)
    for _ in range(2):
        harness.cohort.end_group()
    harness.need(*range(1, 9))
    assert harness.cohort.deadline.tokens is None
    harness.cohort.report_need(8, 90)
    assert harness.cohort.deadline.tokens == 90
    for group in range(10):
        harness.cohort.end_group(group)
    assert [record.groups for record in harness.records] == [12]
