"""Batches of groups that run: what is announced, what is dropped, and what is written down."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import CandidateFailed, EngineRefused
from darts_server.policy.deadline import MIN_GROUPS
from darts_server.policy.shaping import Shaping, Tail
from darts_server.rollout.allocation.allocator import Allocator
from darts_server.rollout.allocation.budgets import MIN_COHORT
from darts_server.rollout.allocation.cohort import Allocation, Cohort, CohortTerms
from darts_server.rollout.learned.documents import Scalar
from darts_server.rollout.plan import Plan
from darts_server.rollout.run import GroupRun
from darts_server.types import CohortRecord, FinishReason, GroupRecord, Outcome
from tests.rollout.allocation.test_cohort import SURE, Listener, turn
from tests.rollout.helpers import Documents, House, an_allocator, collect, lengths

pytestmark = pytest.mark.anyio
DARTS_CUT = Shaping(redundancy=1.5, adaptive=True, deadline=SURE)
TAIL_SEED_FOR_3 = 0
"""A seed of tail_seed with which candidate 3 of five is the first to be drawn."""


# --- batches of groups that run ------------------------------------------------

NAMES = [f"p{i}" for i in range(10)]


async def begun(house: House, names: Sequence[str] = NAMES) -> list[asyncio.Task[object]]:
    return [asyncio.create_task(collect(run)) for run in await house.together(4, "cut", names)]


async def test_groups_that_fail_or_are_cancelled_do_not_keep_the_others_from_their_deadline() -> None:
    def script(prompt: str, index: int) -> Script:
        if prompt == "p8":
            return Script(2, error=CandidateFailed("boom"))
        return Script(5 if index < 4 else 1000)

    house = House(script, {"cut": DARTS_CUT})
    tasks = await begun(house)
    await settle()
    for _ in range(4):
        await house.engine.step()
    tasks[9].cancel()
    for _ in range(4):
        await house.engine.step()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(r) for r in results] == [list] * 8 + [CandidateFailed, asyncio.CancelledError]
    assert house.engine.running == []
    [batch] = house.recorder.batches
    assert (batch.policy, batch.groups, batch.deadline, batch.explored) == ("cut", 10, 5, False)
    assert batch.mean_candidates == 6
    assert batch.measured_seconds == 5


async def leaving_when_answered(
    allocator: Allocator, others: int
) -> tuple[list[Allocation | BaseException], asyncio.Task[Allocation]]:
    """Groups that are allocated together; the last one's caller leaves when its answer is there and not taken."""

    async def first() -> Allocation:
        try:
            return await allocator.allocate(Plan("cut", DARTS_CUT, 4), "first")
        finally:
            last.cancel()

    tasks = [asyncio.create_task(first())]
    await turn()  # it is the first to be answered
    tasks += [asyncio.create_task(allocator.allocate(Plan("cut", DARTS_CUT, 4), f"p{i}")) for i in range(others)]
    last = asyncio.create_task(allocator.allocate(Plan("cut", DARTS_CUT, 4), "last"))
    grants = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.wait([last])
    return grants, last


async def test_a_caller_that_leaves_while_its_grant_is_on_its_way_is_dropped_from_the_batch() -> None:
    records: list[CohortRecord] = []
    grants, last = await leaving_when_answered(an_allocator(Documents(), on_cohort_end=records.append), others=8)
    assert last.cancelled()
    assert isinstance(grants[0], Allocation)
    batch = grants[0].cohort
    assert batch is not None
    members = [Listener() for _ in grants]
    for need, member in enumerate(members, 1):
        batch.join(member)
        batch.report_need(member, need)
    assert batch.tokens == 9, "0.9 of the nine that are left are all nine"
    for member in members:
        batch.end_group(member)
    assert [(r.groups, r.deadline) for r in records] == [(10, 9)]


async def test_a_caller_that_leaves_in_the_turn_its_allocation_fails_is_cancelled_all_the_same() -> None:
    class BrokenDocuments(Documents):
        def get(self, kind: str, key: str) -> dict[str, Scalar] | None:
            if kind == "prompt":
                raise OSError("the disk is gone")
            return None

    grants, last = await leaving_when_answered(an_allocator(BrokenDocuments()), others=0)
    assert str(grants[0]) == "the disk is gone"
    assert last.cancelled()


async def test_what_groups_needed_before_stands_in_for_a_batch_of_few() -> None:
    house = House(lengths(5, 5, 5, 5, 1000), {"cut": DARTS_CUT})
    for task in await begun(house):
        await house.engine.run()
        await task
    house.engine.now = 0
    [task] = await begun(house, ["later"])
    assert MIN_COHORT > 1
    assert len(NAMES) >= MIN_GROUPS
    await house.engine.run()
    await task
    assert house.record("later").deadline == 5
    assert house.recorder.batches[-1].deadline == 5


async def test_few_groups_with_too_few_before_them_have_no_deadline() -> None:
    house = House(lengths(5, 5, 5, 5, 20), {"cut": DARTS_CUT})
    [task] = await begun(house, ["alone"])
    await house.engine.run()
    await task
    record = house.record("alone")
    assert (record.outcome, record.deadline) == (Outcome.COMPLETED, None)
    assert not any(c.cut for c in record.candidates)
    assert house.recorder.batches[-1].deadline is None


# --- groups that gather first ----------------------------------------------------


def gathered(house: House, name: str, candidates: int) -> GroupRun[str, list[int]]:
    run = house.collect(name, "cut")
    for _ in range(candidates):
        run.add_candidate(name)
    return run


def a_batch(house: House, groups: int, **terms: int) -> Cohort:
    made = CohortTerms("cut", groups, 6.0, None, SURE, **terms)  # type: ignore[arg-type]
    return Cohort(made, house.recorder.cohort_ended, lambda: house.engine.now)


async def test_a_group_that_knew_what_it_needs_before_it_was_opened_tells_its_batch_when_it_is() -> None:
    house = House(lambda _, index: Script(1000 if index else 5), {"cut": DARTS_CUT})
    run = gathered(house, "p", 3)
    await settle()
    for _ in range(5):
        await house.engine.step()
    batch = a_batch(house, 1)
    run.open(Shaping(num_longest=0).selection_rule(1), Allocation(3, batch))
    assert batch.tokens == 5
    run.cancel()


async def test_a_group_that_failed_before_it_was_opened_is_dropped_from_its_batch() -> None:
    house = House(lengths(5), {"cut": DARTS_CUT})
    house.engine.start_error = EngineRefused("no")
    run = gathered(house, "p", 4)
    await settle()
    run.open(DARTS_CUT.selection_rule(4), Allocation(6, a_batch(house, 1)))
    with pytest.raises(EngineRefused):
        await collect(run)
    assert len(house.recorder.batches) == 1
    assert house.recorder.started == 4, "nothing more is started"


async def test_a_fault_of_ours_in_a_groups_end_does_not_keep_its_batch_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    house = House(lengths(5), {"cut": DARTS_CUT})

    def fail(_: GroupRecord) -> None:
        raise RuntimeError("observer broke")

    house.recorder.group_ended = fail  # type: ignore[method-assign,assignment]
    [task] = await begun(house, ["p"])
    await house.engine.run()
    with pytest.raises(RuntimeError, match="observer broke"):
        await task
    assert len(house.recorder.batches) == 1
    assert house.rollouts.running == 0
    assert "group p failed" in caplog.text


async def test_the_record_names_no_deadline_that_the_group_was_not_held_to() -> None:
    # What makes the group complete also brings the deadline, which is less than the tail that is in it.
    script = [Script(2), Script(2), Script(2, delay=11), Script(12, finish_reason=FinishReason.LENGTH), Script(3)]
    house = House(lambda _, index: script[index], {"cut": DARTS_CUT})
    run = house.collect("p", "cut", (TAIL_SEED_FOR_3,))
    batch = a_batch(house, 1)
    run.open(DARTS_CUT.selection_rule(4), Allocation(5, batch))
    task = asyncio.create_task(collect(run))
    await house.engine.run()
    assert {t.index: len(t.output) for t in await task} == {0: 2, 1: 2, 2: 2, 3: 12}
    assert batch.tokens == 3
    assert house.record("p").deadline is None


@pytest.mark.parametrize("tail", Tail)
async def test_every_group_can_tell_what_it_needs_however_many_candidates_it_has(tail: Tail) -> None:
    house = House(
        lambda prompt, index: Script(1 + (7 * index + int(prompt)) % 19), {"cut": replace(DARTS_CUT, tail=tail)}
    )
    names = [str(number) for number in range(16)]
    house.store.know(**{name: float(name) ** 3 for name in names})
    tasks = await begun(house, names)
    await settle()
    await house.engine.run()
    await asyncio.gather(*tasks)
    assert {len(house.record(name).candidates) for name in names} >= {4, 8}
    assert all(house.record(name).tokens_needed is not None for name in names)
