import asyncio
from dataclasses import replace

import pytest

from darts_server.policy.allocation import reduce_candidates
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.rollout.allocation.allocator import Allocator
from darts_server.rollout.allocation.budgets import MIN_COHORT
from darts_server.rollout.allocation.cohort import Allocation, CohortTerms
from darts_server.rollout.allocation.shared import CohortPart, Grant
from darts_server.rollout.learned.documents import Scalar
from darts_server.rollout.plan import Plan
from tests.rollout.helpers import Documents, new_allocator

pytestmark = pytest.mark.anyio
DARTS = Shaping(redundancy=1.5, adaptive=True)
SIZE = 8


def prompts(**stds: float) -> Documents:
    return Documents().add_stds(**stds)


async def together(allocator: Allocator, keys: list[str], shaping: Shaping = DARTS, size: int = SIZE) -> list[int]:
    allocations = await asyncio.gather(*(allocator.allocate(Plan("darts", shaping, size), key) for key in keys))
    return [grant.candidates for grant in allocations]


async def test_in_a_cohort_prompts_with_more_spread_get_more_and_the_budget_is_spent_exactly() -> None:
    stds = {f"p{i}": float(i * i) for i in range(16)}
    counts = await together(new_allocator(prompts(**stds), window=0.01), list(stds))
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert sum(counts) == 12 * 16
    assert min(counts) >= SIZE
    assert max(counts) <= 2 * SIZE


async def test_a_fractional_budget_is_met_over_several_cohorts() -> None:
    allocator = new_allocator(prompts(), window=0.001)
    shaping = Shaping(redundancy=1.3, adaptive=True)
    total = 0
    for _ in range(10):
        total += sum(await together(allocator, [f"p{i}" for i in range(9)], shaping))
    assert total == round(1.3 * SIZE * 9 * 10)


async def test_few_prompts_are_compared_with_recent_ones() -> None:
    stds = {f"p{i}": float(i) for i in range(50)}
    allocator = new_allocator(prompts(**stds), window=0)
    counts = {}
    for _ in range(6):
        for key in stds:
            [counts[key]] = await together(allocator, [key])
    assert counts["p49"] > counts["p0"]
    assert MIN_COHORT > 1


@pytest.mark.parametrize(("redundancy", "most"), [(3.0, 2.0), (1.3, 1.3)])
@pytest.mark.parametrize("prompts_at_once", [1, 16])
async def test_a_redundancy_above_the_bound_gives_every_group_the_bound(
    redundancy: float, most: float, prompts_at_once: int
) -> None:
    shaping = Shaping(redundancy=redundancy, adaptive=True, max_redundancy=most)
    counts = await together(new_allocator(prompts(), window=0.01), [f"p{i}" for i in range(prompts_at_once)], shaping)
    assert set(counts) == {shaping.bounds(SIZE)[1]}


async def test_group_sizes_are_allocated_separately() -> None:
    allocator = new_allocator(prompts(), window=0.01)
    eights, fours = await asyncio.gather(
        together(allocator, [f"p{i}" for i in range(8)]),
        together(allocator, [f"p{i}" for i in range(8)], size=4),
    )
    assert (set(eights), set(fours)) == ({12}, {6})


async def test_a_caller_that_leaves_before_the_allocation_takes_no_budget() -> None:
    allocator = new_allocator(prompts(), window=0.01)
    gone = asyncio.create_task(allocator.allocate(Plan("darts", DARTS, SIZE), "gone"))
    rest = asyncio.create_task(together(allocator, [f"p{i}" for i in range(8)]))
    await asyncio.sleep(0)
    gone.cancel()
    assert sum(await rest) == 12 * 8


async def test_a_failing_store_fails_every_waiting_group() -> None:
    class Broken(Documents):
        def get(self, kind: str, key: str) -> dict[str, Scalar] | None:
            if kind == "prompt":
                raise OSError("the disk is gone")
            return None

    allocator = new_allocator(Broken())
    results = await asyncio.gather(
        *(allocator.allocate(Plan("darts", DARTS, SIZE), key) for key in "ab"), return_exceptions=True
    )
    assert [str(r) for r in results] == ["the disk is gone"] * 2


@pytest.mark.parametrize("scale", [1.0, 0.5])
async def test_the_load_does_not_decide_which_prompts_are_saturated(scale: float) -> None:
    stds = {f"p{i}": float(i * i) for i in range(16)}
    allocator = new_allocator(prompts(**stds), window=0.01, scale=scale)
    plan = Plan("darts", DARTS, SIZE)
    allocations = await asyncio.gather(*(allocator.allocate(plan, key) for key in stds))
    assert [a.saturated for a in allocations] == [a.saturated for a in allocator.allocate_cohort(plan, list(stds))]
    assert [key for key, a in zip(stds, allocations, strict=True) if a.saturated] == [f"p{i}" for i in range(10, 16)]
    assert allocations[-1].candidates == SIZE + SIZE * scale


@pytest.mark.parametrize(("redundancy", "size", "each"), [(3.0, 8, 24), (1.5, 3, 5), (1.5, 8, 12)])
@pytest.mark.parametrize("prompts_at_once", [1, 16])
async def test_a_fixed_number_of_candidates_is_the_same_for_batches_and_single_groups(
    redundancy: float, size: int, each: int, prompts_at_once: int
) -> None:
    allocator = new_allocator(prompts())
    plan = Plan("uniform", Shaping(redundancy=redundancy, max_redundancy=2.0), size)
    assert await allocator.allocate(plan, "p0") == Allocation(each)
    batch = allocator.allocate_cohort(plan, [f"p{i}" for i in range(prompts_at_once)])
    assert [allocation.candidates for allocation in batch] == [each] * prompts_at_once


async def test_without_room_every_group_gets_less_redundancy_but_at_least_its_size() -> None:
    uniform = Shaping(redundancy=1.5)
    stds = {f"p{i}": float(i * i) for i in range(16)}
    full = await together(new_allocator(prompts(**stds), window=0.01), list(stds))
    for scale, each in ((1.0, 12), (0.5, 10), (0.0, 8)):
        allocator = new_allocator(prompts(**stds), window=0.01, scale=scale)
        assert await allocator.allocate(Plan("uniform", uniform, SIZE), "p0") == Allocation(each)
        assert await together(allocator, list(stds)) == [reduce_candidates(count, SIZE, scale) for count in full]


def test_a_requested_budget_is_not_scaled() -> None:
    allocator = new_allocator(prompts(), scale=0.0)
    allocations = allocator.allocate_cohort(Plan("darts", DARTS, SIZE), [f"p{i}" for i in range(8)], budget=96)
    assert sum(grant.candidates for grant in allocations) == 96


def test_the_cohorts_terms_have_the_scaled_mean() -> None:
    allocator = new_allocator(prompts(), scale=0.5)
    batch = allocator.allocate_cohort(Plan("darts", DARTS, SIZE), [f"p{i}" for i in range(8)])[0].cohort
    assert batch is not None
    assert batch.terms.mean_candidates == 10


# --- parts of a cohort ------------------------------------------------------------

EXPLORING = Shaping(redundancy=1.5, deadline=Deadline(exploration=1.0))


def terms_of(shaping: Shaping, groups: int, part: CohortPart | None) -> CohortTerms:
    allocator = new_allocator(prompts())
    keys = [f"p{number}" for number in range(groups)]
    allocations = allocator.allocate_cohort(Plan("cut", shaping, SIZE), keys, part=part)
    assert [allocation.number for allocation in allocations] == list(range(groups))
    assert allocations[0].cohort is not None
    return allocations[0].cohort.terms


@pytest.mark.parametrize(("groups", "few"), [(MIN_COHORT - 1, True), (MIN_COHORT, False)])
def test_whether_groups_are_few_is_said_of_the_whole_cohort(groups: int, few: bool) -> None:
    terms = terms_of(EXPLORING, 3, CohortPart(groups))
    assert (terms.groups, terms.few, terms.part) == (3, few, CohortPart(groups))


@pytest.mark.parametrize("part", [None, CohortPart(99)])
def test_a_cohort_has_what_recent_groups_needed_and_a_few_groups_have_it_as_their_deadline(
    part: CohortPart | None,
) -> None:
    documents = prompts()
    documents.put("deadline", f"cut/{SIZE}", {"value": "[30, 30, 30, 30, 30, 30, 30, 30, 0, 0, 0, 0]"})
    allocator, plan = new_allocator(documents), Plan("cut", EXPLORING, SIZE)
    [first, *_] = allocator.allocate_cohort(plan, [f"p{i}" for i in range(MIN_COHORT)], part=part)
    assert first.cohort is not None
    assert first.cohort.rule == replace(EXPLORING.deadline or Deadline(), recent=30)
    assert first.cohort.terms.tokens is None
    [alone] = allocator.allocate_cohort(plan, ["p0"])
    assert alone.cohort is not None
    assert alone.cohort.rule == EXPLORING.deadline
    assert alone.cohort.terms.tokens == 43, "a third of them was cut"


@pytest.mark.parametrize(("part", "explored"), [(None, True), (CohortPart(9, True), True), (CohortPart(9), False)])
def test_of_a_cohorts_parts_only_the_one_that_leads_decides_to_explore(part: CohortPart | None, explored: bool) -> None:
    assert terms_of(EXPLORING, 4, part).explored is explored


@pytest.mark.parametrize("shaping", [DARTS, replace(DARTS, deadline=Deadline())])
@pytest.mark.parametrize("budget", [None, 60])
def test_parts_with_their_grants_are_what_the_whole_cohort_would_be(shaping: Shaping, budget: int | None) -> None:
    plan, keys = Plan("darts", shaping, SIZE), [f"p{number}" for number in range(4)]
    whole = new_allocator(prompts(p0=1.0, p1=2.0, p2=40.0, p3=9.0)).allocate_cohort(plan, keys, budget=budget)
    leading = new_allocator(prompts(p0=1.0, p1=2.0, p2=40.0, p3=9.0))
    grant = leading.grant(plan, keys, budget=budget)
    assert list(grant.candidates) == [each.candidates for each in whole]
    for start in (0, 2):
        counts = grant.candidates[start : start + 2]
        part = CohortPart(4, grant=Grant(counts, grant.mean))
        share = None if budget is None else sum(counts)
        found = new_allocator(prompts()).allocate_cohort(plan, keys[start : start + 2], budget=share, part=part)
        assert [each.candidates for each in found] == counts
        assert [each.saturated for each in found] == [each.saturated for each in whole[start : start + 2]]
        assert found[0].cohort is not None
        assert whole[0].cohort is not None
        assert found[0].cohort.terms.mean_candidates == whole[0].cohort.terms.mean_candidates


def test_the_load_of_each_server_reduces_its_grants_but_for_those_of_a_budget() -> None:
    part = CohortPart(4, grant=Grant([SIZE, SIZE + 4], SIZE + 2.0))
    for budget, expected in ((None, [SIZE, SIZE + 2]), (2 * SIZE + 4, [SIZE, SIZE + 4])):
        allocator = new_allocator(prompts(), scale=0.5)
        found = allocator.allocate_cohort(Plan("darts", DARTS, SIZE), ["a", "b"], budget=budget, part=part)
        assert [each.candidates for each in found] == expected


def test_without_a_deadline_a_part_is_a_cohort_of_its_own() -> None:
    terms = terms_of(DARTS, 4, CohortPart(99, True))
    assert (terms.part, terms.few) == (None, True)
