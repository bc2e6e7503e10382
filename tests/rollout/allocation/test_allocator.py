import asyncio
from dataclasses import replace

import pytest

from darts_server.estimates.pass_rates import Beta
from darts_server.policy.allocation import reduce_candidates
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.policy.signal import allocate_by_signal
from darts_server.rollout.allocation.allocator import Allocator
from darts_server.rollout.allocation.cohort import Allocation, Cohort
from darts_server.rollout.learned.documents import Scalar
from darts_server.rollout.learned.statistics import MIN_COHORT, PassRates
from darts_server.rollout.plan import Plan
from tests.rollout.helpers import Documents, new_allocator

pytestmark = pytest.mark.anyio
DARTS = Shaping(redundancy=1.5, adaptive=True)
SIZE = 8


STDS = {f"p{i}": float(i * i) for i in range(16)}


def prompts(**stds: float) -> Documents:
    return Documents().add_stds(**stds)


async def together(allocator: Allocator, keys: list[str], shaping: Shaping = DARTS, size: int = SIZE) -> list[int]:
    allocations = await asyncio.gather(*(allocator.allocate(Plan("darts", shaping, size), key) for key in keys))
    return [grant.candidates for grant in allocations]


async def test_in_a_cohort_prompts_with_more_spread_get_more_and_the_budget_is_spent_exactly() -> None:
    counts = await together(new_allocator(prompts(**STDS), window=0.01), list(STDS))
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


@pytest.mark.parametrize(("redundancy", "most"), [(3.0, 2.0), (1.3, 1.3)])
@pytest.mark.parametrize("prompts_at_once", [1, 16])
async def test_a_redundancy_above_the_bound_gives_every_group_the_bound(
    redundancy: float, most: float, prompts_at_once: int
) -> None:
    shaping = Shaping(redundancy=redundancy, adaptive=True, max_redundancy=most)
    counts = await together(new_allocator(prompts(), window=0.01), [f"p{i}" for i in range(prompts_at_once)], shaping)
    assert set(counts) == {shaping.candidate_limits(SIZE)[1]}


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
    allocator, plan = new_allocator(prompts(**STDS), window=0.01, scale=scale), Plan("darts", DARTS, SIZE)
    allocations = await asyncio.gather(*(allocator.allocate(plan, key) for key in STDS))
    assert [a.saturated for a in allocations] == [a.saturated for a in allocator.allocate_cohort(plan, list(STDS))]
    assert [key for key, a in zip(STDS, allocations, strict=True) if a.saturated] == [f"p{i}" for i in range(10, 16)]
    assert allocations[-1].candidates == SIZE + SIZE * scale


@pytest.mark.parametrize(("redundancy", "size", "each"), [(3.0, 8, 24), (1.5, 3, 5)])
async def test_a_fixed_number_of_candidates_is_the_same_for_batches_and_single_groups(
    redundancy: float, size: int, each: int
) -> None:
    allocator = new_allocator(prompts())
    plan = Plan("uniform", Shaping(redundancy=redundancy, max_redundancy=2.0), size)
    assert await allocator.allocate(plan, "p0") == Allocation(each)
    for keys in (["p0"], list(STDS)):
        assert {allocation.candidates for allocation in allocator.allocate_cohort(plan, keys)} == {each}


async def test_without_room_every_group_gets_less_redundancy_but_at_least_its_size() -> None:
    uniform = Plan("uniform", Shaping(redundancy=1.5), SIZE)
    full = await together(new_allocator(prompts(**STDS), window=0.01), list(STDS))
    for scale, each in ((0.5, 10), (0.0, 8)):
        allocator = new_allocator(prompts(**STDS), window=0.01, scale=scale)
        assert await allocator.allocate(uniform, "p0") == Allocation(each)
        assert await together(allocator, list(STDS)) == [reduce_candidates(count, SIZE, scale) for count in full]


@pytest.mark.parametrize(("budget", "each"), [(None, SIZE + 2), (8 * SIZE + 32, SIZE + 4)])
def test_the_load_reduces_candidates_unless_there_is_a_budget(budget: int | None, each: int) -> None:
    allocator, keys = new_allocator(prompts(), scale=0.5), [f"p{i}" for i in range(8)]
    allocations = allocator.allocate_cohort(Plan("darts", DARTS, SIZE), keys, budget=budget)
    assert [allocation.candidates for allocation in allocations] == [each] * 8
    assert allocations[0].cohort is not None
    assert allocations[0].cohort.record.mean_candidates == each


# --- deadlines --------------------------------------------------------------------

EXPLORING = Shaping(redundancy=1.5, deadline=Deadline(exploration=1.0))


def cohort_of(allocator: Allocator, shaping: Shaping, groups: int) -> Cohort:
    keys = [f"p{number}" for number in range(groups)]
    [first, *_] = allocator.allocate_cohort(Plan("cut", shaping, SIZE), keys)
    assert first.cohort is not None
    return first.cohort


@pytest.mark.parametrize("groups", [MIN_COHORT - 1, MIN_COHORT])
def test_a_few_groups_explore_as_others_do(groups: int) -> None:
    record = cohort_of(new_allocator(prompts()), EXPLORING, groups).record
    assert (record.groups, record.explored) == (groups, True)


def test_recent_groups_decide_the_deadline_of_a_cohort_with_few_groups() -> None:
    documents = prompts()
    documents.put("deadline", f"cut/{SIZE}", {"value": "[30, 30, 30, 30, 30, 30, 30, 30, 0, 0, 0, 0]"})
    allocator = new_allocator(documents)
    cohort = cohort_of(allocator, EXPLORING, MIN_COHORT)
    assert cohort.rule == replace(EXPLORING.deadline or Deadline(), recent=30)
    assert cohort.deadline.tokens is None
    alone = cohort_of(allocator, EXPLORING, 1)
    assert alone.rule == EXPLORING.deadline
    assert alone.deadline.tokens == 43, "a third of them was cut"


# --- signal -----------------------------------------------------------------------

SIGNAL = Shaping(redundancy=1.5, adapts_to_signal=True)
RATES = {"hopeless": 0, "edge": 1, "even": 4, "saturated": 8}


def graded(*counts: tuple[str, int, int]) -> Documents:
    """Return documents with a usual prior, and prompts with these numbers of right and wrong answers."""
    documents = Documents()
    documents.put("recent_pass_rates", "all", {"value": "[100.0, 50.0, 37.5, 7]"})
    for key, right, wrong in counts:
        documents.put("pass_counts", key, {"value": f"[{right}, {wrong}, 7]"})
    return documents


EDGES = graded(*((f"{name}{i}", right * 16, 128 - right * 16) for name, right in RATES.items() for i in range(2)))
KEYS = [f"{name}{i}" for i in range(2) for name in RATES]


def posteriors_of(documents: Documents) -> list[Beta]:
    return PassRates(documents).posteriors(KEYS)


@pytest.mark.parametrize("budget", [None, 96])
async def test_prompts_whose_rewards_may_differ_get_more_candidates(budget: int | None) -> None:
    plan = Plan("informative", SIGNAL, SIZE)
    allocations = new_allocator(EDGES).allocate_cohort(plan, KEYS, budget=budget)
    counts = [allocation.candidates for allocation in allocations]
    assert counts == allocate_by_signal(posteriors_of(EDGES), 96, 8, 16)
    assert [counts[1], counts[5], max(counts[2], counts[6])] == [16, 16, 9], "edge and even"
    assert {a.saturated for a in allocations} == {False}
    assert allocations[0].cohort is not None
    assert allocations[0].cohort.record.mean_candidates == 12


async def test_groups_that_come_together_share_the_candidates_by_signal() -> None:
    counts = allocate_by_signal(posteriors_of(EDGES), 96, 8, 16)
    assert await together(new_allocator(EDGES, window=0.01), KEYS, SIGNAL) == counts
    reduced = [reduce_candidates(count, SIZE, 0.5) for count in counts]
    assert await together(new_allocator(EDGES, window=0.01, scale=0.5), KEYS, SIGNAL) == reduced


async def test_few_groups_share_exactly_their_own_candidates_by_signal() -> None:
    keys = KEYS[:4]
    assert await together(new_allocator(EDGES, window=0.01), keys[:1], SIGNAL) == [12]
    counts = await together(new_allocator(EDGES, window=0.01), keys, SIGNAL)
    assert counts == allocate_by_signal(posteriors_of(EDGES)[:4], 48, 8, 16)
    assert sum(counts) == 48


async def test_without_rewards_all_prompts_get_the_mean() -> None:
    allocations = new_allocator(Documents()).allocate_cohort(Plan("informative", SIGNAL, SIZE), KEYS)
    assert {allocation.candidates for allocation in allocations} == {12}


def test_only_prompts_that_are_almost_surely_without_signal_may_be_skipped() -> None:
    allocator = new_allocator(EDGES)
    skipping = replace(SIGNAL, skip_floor=0.25)
    assert allocator.run_probabilities(Plan("informative", skipping, SIZE), KEYS) == [0.25, 1, 1, 0.25] * 2
    for shaping in (SIGNAL, replace(skipping, adapts_to_signal=False)):
        assert allocator.run_probabilities(Plan("informative", shaping, SIZE), KEYS) == [1.0] * 8
