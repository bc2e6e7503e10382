"""Cohorts: the deadline that their groups determine together, and their record."""

import asyncio

import pytest

from darts_server.policy.deadline import Deadline
from darts_server.records import CohortRecord
from darts_server.rollout.allocation.cohort import Cohort

pytestmark = pytest.mark.anyio
SURE = Deadline(exploration=0.0)


class RecordingMember:
    """A member that records the deadlines that it gets."""

    def __init__(self) -> None:
        self.deadlines: list[int] = []
        self.bounds: list[int] = []

    def set_deadline(self, tokens: int, bound: int) -> None:
        self.deadlines.append(tokens)
        self.bounds.append(bound)


class CohortHarness:
    """A cohort and its members."""

    def __init__(
        self, groups: int, rule: Deadline = SURE, *, explored: bool = False, tokens: int | None = None
    ) -> None:
        self.records: list[CohortRecord] = []
        self.now = 10.0
        record = CohortRecord("cut", groups, 12.5, explored=explored, predicted_seconds=3.25)
        self.cohort = Cohort(record, rule, self.records.append, lambda: self.now, tokens=tokens)
        self.members: list[RecordingMember] = []

    def join(self, count: int = 1) -> list[RecordingMember]:
        new = [RecordingMember() for _ in range(count)]
        self.members += new
        for member in new:
            self.cohort.join(member, member.set_deadline)
        return new

    def need(self, *tokens: int) -> None:
        """The first groups report what they need, in order."""
        for member, each in zip(self.members, tokens, strict=False):
            self.cohort.report_need(member, each)

    @property
    def deadlines(self) -> list[list[int]]:
        return [member.deadlines for member in self.members]


async def turn() -> None:
    await asyncio.sleep(0)


# --- how long it takes ----------------------------------------------------------


async def test_its_seconds_count_from_the_start_of_its_first_group() -> None:
    harness = CohortHarness(2)
    for harness.now in (15.0, 16.0):
        harness.join()
    harness.now = 18.0
    for member in harness.members:
        harness.cohort.end_group(member)
    assert [record.measured_seconds for record in harness.records] == [3.0]


async def test_a_cohort_of_which_nothing_started_took_no_time() -> None:
    harness = CohortHarness(1)
    harness.now = 18.0
    harness.cohort.end_group()
    assert [record.measured_seconds for record in harness.records] == [0.0]


# --- when the deadline is known -----------------------------------------------


@pytest.mark.parametrize(("groups", "quantile", "rank"), [(1, 0.9, 1), (8, 0.9, 8), (10, 0.9, 9), (20, 0.5, 10)])
async def test_the_deadline_is_set_when_the_group_of_the_quantiles_rank_has_reported(
    groups: int, quantile: float, rank: int
) -> None:
    harness = CohortHarness(groups, Deadline(quantile, exploration=0.0))
    harness.join(groups)
    for reports in range(1, rank):
        harness.cohort.report_need(harness.members[reports - 1], 10 * reports)
        await turn()
        assert harness.cohort.deadline.tokens is None
    harness.cohort.report_need(harness.members[rank - 1], 10 * rank)
    assert harness.deadlines == [[]] * groups, "the group that has just reported has not acted on its event yet"
    await turn()
    assert harness.deadlines == [[10 * rank]] * groups
    harness.cohort.report_need(harness.members[-1], 1)
    await turn()
    assert harness.deadlines == [[10 * rank]] * groups, "set once"


async def test_groups_that_end_without_a_report_do_not_delay_the_deadline() -> None:
    harness = CohortHarness(10)
    harness.join(10)
    harness.need(1, 2, 3, 4, 5)
    for failed in harness.members[5:8]:
        harness.cohort.end_group(failed)
    harness.cohort.end_group()  # the tenth never came
    await turn()
    assert harness.cohort.deadline.tokens is None, "five of six are known, and 0.9 of six are all six"
    harness.cohort.end_group(harness.members[8])
    await turn()
    assert harness.deadlines[:5] == [[5]] * 5


async def test_groups_that_ended_after_their_report_still_count_but_get_no_deadline() -> None:
    harness = CohortHarness(3)
    harness.join(3)
    harness.need(7, 8)
    harness.cohort.end_group(harness.members[0])
    harness.cohort.end_group(harness.members[1])
    assert harness.cohort.deadline.tokens is None
    harness.cohort.report_need(harness.members[2], 9)
    await turn()
    assert harness.deadlines == [[], [], [9]]


async def test_a_group_that_ends_before_the_next_turn_gets_no_deadline() -> None:
    harness = CohortHarness(2)
    harness.join(2)
    harness.need(7, 8)
    harness.cohort.end_group(harness.members[1])
    await turn()
    assert harness.deadlines == [[8], []]


async def test_a_group_that_joins_late_gets_the_deadline_once_in_a_later_turn() -> None:
    harness = CohortHarness(3, Deadline(0.6, exploration=0.0))
    harness.join(2)
    harness.need(7, 8)
    await turn()
    [late] = harness.join()
    assert late.deadlines == []
    await turn()
    assert harness.deadlines == [[8], [8], [8]]


async def test_a_deadline_known_from_the_start_is_set_for_every_member() -> None:
    harness = CohortHarness(2, tokens=33)
    harness.join(2)
    await turn()
    harness.need(50, 60)
    await turn()
    assert harness.deadlines == [[33], [33]]


async def test_groups_that_can_only_be_complete_beyond_the_bound_do_not_delay_the_deadline() -> None:
    harness = CohortHarness(8)
    harness.join(8)
    harness.need(10, 10, 10, 10, 10)
    assert harness.cohort.deadline.waits_beyond is None, "five of eight are too few"
    harness.cohort.report_need(harness.members[5], 12)
    assert harness.cohort.deadline.waits_beyond == 24
    harness.cohort.report_minimum(harness.members[6], None)
    harness.cohort.report_minimum(harness.members[7], 24)
    await turn()
    assert harness.deadlines == [[]] * 8
    harness.cohort.report_minimum(harness.members[7], 25)
    await turn()
    assert (harness.cohort.deadline.tokens, harness.cohort.deadline.waits_beyond) == (12, None)
    assert [(m.deadlines, m.bounds) for m in harness.members] == [([12], [24])] * 8


async def test_a_minimum_is_forgotten_once_the_group_reports_its_need_or_ends() -> None:
    harness = CohortHarness(9)
    harness.join(9)
    harness.need(10, 10, 10, 10, 10, 12, 12)
    harness.cohort.report_minimum(harness.members[7], 90)
    harness.cohort.report_need(harness.members[7], 13)
    assert (harness.cohort.deadline.tokens, harness.cohort.deadline.waits_beyond) == (None, 26)
    harness.cohort.report_minimum(harness.members[8], 20)
    harness.cohort.end_group(harness.members[8])
    assert harness.cohort.deadline.tokens == 13


@pytest.mark.parametrize("tokens", [None, 33])
async def test_explored_groups_get_no_deadline_but_the_record_has_it(tokens: int | None) -> None:
    harness = CohortHarness(2, explored=True, tokens=tokens)
    harness.join(2)
    harness.need(7, 8)
    await turn()
    assert harness.deadlines == [[], []]
    for member in harness.members:
        harness.cohort.end_group(member)
    [record] = harness.records
    assert (record.explored, record.deadline) == (True, tokens or 8)


# --- the record ----------------------------------------------------------------


async def test_the_record_is_created_once_when_the_last_group_has_ended_or_was_dropped() -> None:
    harness = CohortHarness(4)
    harness.join(3)
    harness.need(5, 6, 7)
    harness.cohort.end_group(harness.members[0])
    harness.cohort.end_group()
    harness.cohort.end_group(harness.members[1])
    assert harness.records == []
    harness.now = 14.5
    harness.cohort.end_group(harness.members[2])
    assert harness.records == [CohortRecord("cut", 4, 12.5, 7, False, 3.25, 4.5)]
