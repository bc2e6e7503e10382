"""Cohorts of running groups: reports, dropped groups, and records."""

import asyncio
from dataclasses import replace

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import CandidateFailed, EngineRefused
from darts_server.policy.shaping import Shaping, Tail
from darts_server.records import CohortRecord
from darts_server.rollout.allocation.cohort import Allocation, Cohort
from darts_server.rollout.plan import Plan
from darts_server.rollout.run import GroupRun
from darts_server.types import FinishReason
from tests.rollout.allocation.test_cohort import SURE, turn
from tests.rollout.helpers import Documents, Harness, collect, lengths, new_allocator

pytestmark = pytest.mark.anyio
DARTS_CUT = Shaping(redundancy=1.5, adaptive=True, deadline=SURE)
TAIL_SEED_FOR_3 = 0
"""A seed of tail_seed with which candidate 3 of five is the first to be drawn."""


async def test_failed_and_cancelled_groups_do_not_delay_the_deadline() -> None:
    def script(prompt: str, index: int) -> Script:
        if prompt == "p8":
            return Script(2, error=CandidateFailed("boom"))
        return Script(5 if index < 4 else 1000)

    harness = Harness(script, {"cut": DARTS_CUT})
    runs = await harness.start_cohort(4, "cut", [f"p{number}" for number in range(10)])
    tasks = [await harness.begin(run) for run in runs]
    await harness.steps(4)
    tasks[9].cancel()
    await harness.steps(4)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(r) for r in results] == [list] * 8 + [CandidateFailed, asyncio.CancelledError]
    assert harness.engine.running == []
    [batch] = harness.recorder.cohorts
    assert (batch.policy, batch.groups, batch.deadline, batch.explored) == ("cut", 10, 5, False)
    assert batch.mean_candidates == 6
    assert batch.measured_seconds == 5


async def test_a_caller_that_leaves_before_it_takes_its_allocation_is_dropped_from_the_cohort() -> None:
    records: list[CohortRecord] = []
    allocator, plan = new_allocator(Documents(), on_cohort_end=records.append), Plan("cut", DARTS_CUT, 4)

    async def first() -> Allocation:
        try:
            return await allocator.allocate(plan, "first")
        finally:
            last.cancel()  # its answer is there and not taken

    tasks = [asyncio.create_task(first())]
    await turn()  # it is the first to be answered
    tasks += [asyncio.create_task(allocator.allocate(plan, f"p{number}")) for number in range(8)]
    last = asyncio.create_task(allocator.allocate(plan, "last"))
    grants = await asyncio.gather(*tasks)
    await asyncio.wait([last])
    assert last.cancelled()
    batch = grants[0].cohort
    assert batch is not None
    for need, group in enumerate(grants, 1):
        batch.join(id(group), lambda tokens, cut_length: None)
        batch.report_need(id(group), need)
    assert batch.deadline.tokens == 9, "0.9 of the nine that are left are all nine"
    for group in grants:
        batch.end_group(id(group))
    assert [(r.groups, r.deadline) for r in records] == [(10, 9)]


# --- groups that gather first ----------------------------------------------------


def gathered(harness: Harness, name: str, candidates: int) -> GroupRun[str, list[int]]:
    run = harness.collect(name, "cut")
    for _ in range(candidates):
        run.add_candidate(name)
    return run


def a_batch(harness: Harness) -> Cohort:
    record = CohortRecord("cut", 1, 6.0)
    return Cohort(record, SURE, harness.recorder.cohorts.append, lambda: harness.engine.now, record.groups)


async def test_a_group_whose_need_is_clear_before_it_opens_reports_it_when_it_opens() -> None:
    harness = Harness(lambda _, index: Script(1000 if index else 5), {"cut": DARTS_CUT})
    run = gathered(harness, "p", 3)
    await settle()
    await harness.steps(5)
    batch = a_batch(harness)
    run.open(Shaping(num_longest=0).selection_rule(1), Allocation(3, batch))
    assert batch.deadline.tokens == 5
    run.cancel()


async def test_a_group_that_failed_before_it_opened_is_dropped_from_its_cohort() -> None:
    harness = Harness(lengths(5), {"cut": DARTS_CUT})
    harness.engine.start_error = EngineRefused("no")
    run = gathered(harness, "p", 4)
    await settle()
    run.open(DARTS_CUT.selection_rule(4), Allocation(6, a_batch(harness)))
    with pytest.raises(EngineRefused):
        await collect(run)
    assert len(harness.recorder.cohorts) == 1
    assert harness.recorder.started == 4, "nothing more is started"


async def test_the_record_has_no_deadline_that_did_not_apply_to_the_group() -> None:
    # What makes the group complete also brings the deadline, which is less than the tail that is in it.
    script = [Script(2), Script(2), Script(2, delay=11), Script(12, finish_reason=FinishReason.LENGTH), Script(3)]
    harness = Harness(lambda _, index: script[index], {"cut": DARTS_CUT})
    run = harness.collect("p", "cut", (TAIL_SEED_FOR_3,))
    batch = a_batch(harness)
    run.open(DARTS_CUT.selection_rule(4), Allocation(5, batch))
    task = asyncio.create_task(collect(run))
    await harness.engine.run()
    assert {t.index: len(t.output) for t in await task} == {0: 2, 1: 2, 2: 2, 3: 12}
    assert batch.deadline.tokens == 3
    assert harness.record("p").deadline is None


@pytest.mark.parametrize("tail", Tail)
async def test_every_group_reports_its_need_with_any_number_of_candidates(tail: Tail) -> None:
    harness = Harness(
        lambda prompt, index: Script(1 + (7 * index + int(prompt)) % 19), {"cut": replace(DARTS_CUT, tail=tail)}
    )
    names = [str(number) for number in range(16)]
    harness.store.add_stds(**{name: float(name) ** 3 for name in names})
    await harness.groups(await harness.start_cohort(4, "cut", names))
    assert {len(harness.record(name).candidates) for name in names} >= {4, 8}
    assert all(harness.record(name).tokens_needed is not None for name in names)
