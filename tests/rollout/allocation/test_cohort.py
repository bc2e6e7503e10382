"""Batches: the deadline that their groups make together, and their record."""

import asyncio

import pytest

from darts_server.policy.deadline import Deadline
from darts_server.rollout.allocation.cohort import Cohort, CohortTerms
from darts_server.types import CohortRecord

pytestmark = pytest.mark.anyio
SURE = Deadline(exploration=0.0)


class Listener:
    """A group of a batch that remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def set_deadline(self, tokens: int) -> None:
        self.heard.append(tokens)


class Party:
    """A batch and its groups, all joined."""

    def __init__(self, groups: int, deadline: Deadline | None = SURE, **terms: int | bool) -> None:
        self.records: list[CohortRecord] = []
        self.now = 10.0
        self.cohort = Cohort(
            CohortTerms("cut", groups, 12.5, 3.25, deadline, **terms),  # type: ignore[arg-type]
            self.records.append,
            lambda: self.now,
        )
        self.members: list[Listener] = []

    def join(self, count: int = 1) -> list[Listener]:
        new = [Listener() for _ in range(count)]
        self.members += new
        for member in new:
            self.cohort.join(member)
        return new

    def need(self, *tokens: int) -> None:
        """The first groups tell what they need, in order."""
        for member, each in zip(self.members, tokens, strict=False):
            self.cohort.report_need(member, each)

    @property
    def heard(self) -> list[list[int]]:
        return [member.heard for member in self.members]


async def turn() -> None:
    await asyncio.sleep(0)


# --- how long a group needs -----------------------------------------------------


@pytest.mark.parametrize(("candidates", "place"), [(8, 6), (9, 6), (10, 7), (11, 8), (12, 8), (13, 8), (16, 8)])
def test_a_group_with_few_candidates_tells_the_same_share_of_them_and_no_group_more_than_its_size(
    candidates: int, place: int
) -> None:
    assert CohortTerms("cut", 16, 12.0).place(8, candidates) == place


# --- when the deadline is known -----------------------------------------------


@pytest.mark.parametrize(("groups", "quantile", "rank"), [(1, 0.9, 1), (8, 0.9, 8), (10, 0.9, 9), (20, 0.5, 10)])
async def test_the_deadline_is_told_when_the_group_of_the_quantiles_rank_knows_what_it_needs(
    groups: int, quantile: float, rank: int
) -> None:
    party = Party(groups, Deadline(quantile, exploration=0.0))
    party.join(groups)
    for told in range(1, rank):
        party.cohort.report_need(party.members[told - 1], 10 * told)
        await turn()
        assert party.cohort.tokens is None
    party.cohort.report_need(party.members[rank - 1], 10 * rank)
    assert party.heard == [[]] * groups, "the group that brought the news has not acted on it yet"
    await turn()
    assert party.heard == [[10 * rank]] * groups
    party.cohort.report_need(party.members[-1], 1)
    await turn()
    assert party.heard == [[10 * rank]] * groups, "told once"


async def test_the_order_in_which_needs_become_known_is_nothing_to_the_rank() -> None:
    party = Party(4, Deadline(0.75, exploration=0.0))
    party.join(4)
    party.need(50, 30, 40)
    await turn()
    assert party.heard == [[50]] * 4


@pytest.mark.parametrize(("floor", "ceiling", "told"), [(1, None, 30), (40, None, 40), (1, 20, 20)])
async def test_the_deadline_is_held_between_floor_and_ceiling(floor: int, ceiling: int | None, told: int) -> None:
    party = Party(1, Deadline(floor=floor, ceiling=ceiling))
    party.join()
    party.need(30)
    await turn()
    assert party.heard == [[told]]


async def test_a_policy_without_a_deadline_tells_nobody_anything() -> None:
    party = Party(2, None)
    party.join(2)
    party.need(3, 4)
    await turn()
    assert party.heard == [[], []]
    assert party.cohort.tokens is None


async def test_groups_that_end_without_knowing_what_they_need_do_not_keep_the_deadline_from_coming() -> None:
    party = Party(10)
    party.join(10)
    party.need(1, 2, 3, 4, 5)
    for failed in party.members[5:8]:
        party.cohort.end_group(failed)
    party.cohort.drop_group()  # the tenth never came
    await turn()
    assert party.cohort.tokens is None, "five of six are known, and 0.9 of six are all six"
    party.cohort.end_group(party.members[8])
    await turn()
    assert party.heard[:5] == [[5]] * 5


async def test_groups_that_ended_after_they_knew_still_count_and_hear_nothing() -> None:
    party = Party(3)
    party.join(3)
    party.need(7, 8)
    party.cohort.end_group(party.members[0])
    party.cohort.end_group(party.members[1])
    assert party.cohort.tokens is None
    party.cohort.report_need(party.members[2], 9)
    await turn()
    assert party.heard == [[], [], [9]]


async def test_a_group_that_ends_before_its_turn_is_not_told() -> None:
    party = Party(2)
    party.join(2)
    party.need(7, 8)
    party.cohort.end_group(party.members[1])
    await turn()
    assert party.heard == [[8], []]


async def test_a_group_that_begins_late_hears_the_deadline_once_and_in_a_turn_of_its_own() -> None:
    party = Party(3, Deadline(0.6, exploration=0.0))
    party.join(2)
    party.need(7, 8)
    await turn()
    [late] = party.join()
    assert late.heard == []
    await turn()
    assert party.heard == [[8], [8], [8]]


async def test_a_deadline_that_is_known_from_the_start_is_told_to_whoever_joins() -> None:
    party = Party(2, tokens=33)
    party.join(2)
    await turn()
    party.need(50, 60)
    await turn()
    assert party.heard == [[33], [33]]


@pytest.mark.parametrize("tokens", [None, 33])
async def test_explored_groups_are_not_told_but_the_record_says_what_they_would_have_been(tokens: int | None) -> None:
    party = Party(2, explored=True, tokens=tokens)  # type: ignore[arg-type]
    party.join(2)
    party.need(7, 8)
    await turn()
    assert party.heard == [[], []]
    for member in party.members:
        party.cohort.end_group(member)
    [record] = party.records
    assert (record.explored, record.deadline) == (True, tokens or 8)


# --- the record ----------------------------------------------------------------


async def test_the_record_is_made_once_when_the_last_group_has_ended_or_was_dropped() -> None:
    party = Party(4)
    party.join(3)
    party.need(5, 6, 7)
    party.cohort.end_group(party.members[0])
    party.cohort.drop_group()
    party.cohort.end_group(party.members[1])
    assert party.records == []
    party.now = 14.5
    party.cohort.end_group(party.members[2])
    assert party.records == [CohortRecord("cut", 4, 12.5, 7, False, 3.25, 4.5)]


async def test_a_batch_of_which_every_group_was_dropped_has_a_record_too() -> None:
    party = Party(2)
    party.cohort.drop_group()
    party.cohort.drop_group()
    [record] = party.records
    assert (record.groups, record.deadline) == (2, None)
