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

    def __init__(self, groups: int, rule: Deadline = SURE, explored: bool = False, tokens: int | None = None) -> None:
        self.records: list[CohortRecord] = []
        self.now = 10.0
        record = CohortRecord("cut", groups, 12.5, explored=explored, predicted_seconds=3.25)
        self.cohort = Cohort(record, rule, self.records.append, lambda: self.now, tokens=tokens)
        self.deadlines: list[list[tuple[int, int]]] = []

    def join(self, count: int = 1) -> None:
        for _ in range(count):
            self.deadlines.append([])
            group = len(self.deadlines) - 1
            self.cohort.join(group, partial(self._set_deadline, group))

    def _set_deadline(self, group: int, tokens: int, bound: int) -> None:
        self.deadlines[group].append((tokens, bound))

    def need(self, *tokens: int) -> None:
        """The first groups report what they need, in order."""
        for group, each in enumerate(tokens):
            self.cohort.report_need(group, each)


async def turn() -> None:
    await asyncio.sleep(0)


# --- the deadline -----------------------------------------------------------------


@pytest.mark.parametrize(("groups", "quantile", "rank"), [(1, 0.9, 1), (10, 0.9, 9), (20, 0.5, 10)])
async def test_the_deadline_is_set_once_in_the_turn_after_it_is_known(groups: int, quantile: float, rank: int) -> None:
    harness = CohortHarness(groups, Deadline(quantile, exploration=0.0))
    harness.join(groups)
    harness.need(*range(1, rank))
    await turn()
    assert harness.cohort.deadline.tokens is None
    harness.cohort.report_need(rank - 1, 10 * rank)
    assert harness.deadlines == [[]] * groups, "the group that has just reported has not acted on its event yet"
    await turn()
    harness.cohort.report_minimum(groups - 1, 1)
    await turn()
    assert harness.deadlines == [[(10 * rank, 20 * rank)]] * groups


async def test_groups_that_end_without_a_report_do_not_delay_the_deadline() -> None:
    harness = CohortHarness(10)
    harness.join(9)
    harness.need(1, 2, 3, 4, 5)
    for failed in (5, 6, 7, None):  # the tenth never came
        harness.cohort.end_group(failed)
    await turn()
    assert harness.cohort.deadline.tokens is None, "five of six are known, and 0.9 of six are all six"
    harness.cohort.report_minimum(8, None)
    await turn()
    assert harness.deadlines[:5] == [[(5, 10)]] * 5


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


# --- the record ----------------------------------------------------------------


@pytest.mark.parametrize("tokens", [None, 33])
async def test_explored_groups_get_no_deadline_but_the_record_has_it(tokens: int | None) -> None:
    harness = CohortHarness(2, explored=True, tokens=tokens)
    harness.join(2)
    harness.need(7, 8)
    await turn()
    assert harness.deadlines == [[], []]
    for group in range(2):
        harness.cohort.end_group(group)
    [record] = harness.records
    assert (record.explored, record.deadline) == (True, tokens or 8)


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
    assert harness.records == [CohortRecord("cut", 4, 12.5, 7, False, 3.25, 4.5)]
    none_started = CohortHarness(1)
    none_started.now = 18.0
    none_started.cohort.end_group()
    assert none_started.records[0].measured_seconds == 0.0
