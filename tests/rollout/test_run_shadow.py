"""Shadow groups: the caller gets what it would without shaping, and the record says what shaping would have done."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import CandidateFailed, EngineDead, GroupAborted
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, Tail
from darts_server.records import GroupRecord, ShadowRecord
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs
from tests.rollout.helpers import Harness, collect, lengths

pytestmark = pytest.mark.anyio
SIZE = 4
SURE = Deadline(exploration=0.0)
SHAPED = {
    "shortest": Shaping(redundancy=1.5, num_longest=0),
    "sampled": Shaping(redundancy=2.0, num_longest=1),
    "sampled 2": Shaping(redundancy=2.0, num_longest=2),
    "longest": Shaping(redundancy=1.5, num_longest=1, tail=Tail.LONGEST),
    "unshaped": Shaping(redundancy=1.0, num_longest=0),
}
BATCHED = {
    "adaptive": Shaping(redundancy=1.5, adaptive=True),
    "saturated": Shaping(redundancy=2.0, adaptive=True),
    "finish order": Shaping(redundancy=2.0, adaptive=True, finish_order=True),
    "cut": Shaping(redundancy=1.5, adaptive=True, deadline=SURE),
    "deadline": Shaping(redundancy=1.5, adaptive=True, tail=Tail.LONGEST, deadline=SURE),
    "explored": Shaping(redundancy=1.5, adaptive=True, deadline=Deadline(exploration=1.0)),
}
PROMPTS = [f"p{i}" for i in range(10)]


def shadows(shapings: Mapping[str, Shaping]) -> dict[str, Shaping]:
    return {name: replace(shaping, shadow=True) for name, shaping in shapings.items()}


def scripted(seed: int) -> Callable[[str, int], Script]:
    """Short lengths, so that ties are frequent, and some at a length limit."""

    def script(prompt: str, index: int) -> Script:
        random = Random(f"{seed} {prompt} {index}")
        if random.random() < 0.15:
            return Script(16, finish_reason=FinishReason.LENGTH)
        return Script(random.choice([1, 2, 3, 4, 5, 6, 8, 11, 15]))

    return script


def as_shadow(record: GroupRecord) -> ShadowRecord:
    """What a shaped group did, in the words of a shadow."""
    return ShadowRecord(
        policy=record.policy,
        selection=tuple(c.index for c in record.selected),
        generated=record.generated_tokens,
        returned=record.returned_tokens,
        steps=round(record.ended_at - record.started_at),
    )


# --- what the caller gets ------------------------------------------------------


@pytest.mark.parametrize("policy", SHAPED)
async def test_the_group_is_the_unshaped_one(policy: str) -> None:
    script = lengths(9, 30, 4, 50, 1, 2, 3, 60)
    harness = Harness(script, shadows(SHAPED))
    got = await harness.group(harness.run(SIZE, policy))
    assert {t.index: len(t.output) for t in got} == {0: 9, 1: 30, 2: 4, 3: 50}
    assert sum(t.last for t in got) == 1
    record = harness.record("g")
    assert [(c.index, c.selected_as) for c in record.selected] == [(i, SelectedAs.SHORT) for i in range(SIZE)]
    assert {c.reason for c in record.candidates[SIZE:]} <= {DiscardReason.SHADOW}
    assert all(c.tokens == script("g", c.index).length for c in record.candidates), "all run to their end"


async def test_a_shadows_caller_is_answered_first_and_the_other_candidates_run_on() -> None:
    harness = Harness(lengths(5, 3, 4, 2, 50, 40), shadows(SHAPED))
    task = asyncio.create_task(collect(harness.run(SIZE, "shortest")))
    await settle()
    for _ in range(5):
        await harness.engine.step()
    assert task.done()
    assert sorted(t.index for t in await task) == [0, 1, 2, 3]
    assert len(harness.engine.running) == 2
    assert harness.recorder.records == []
    assert harness.rollouts.running == 1
    await harness.engine.run()
    assert harness.rollouts.running == 0
    record = harness.record("g")
    assert (record.outcome, record.ended_at) == (Outcome.COMPLETED, 50)
    assert record.shadow == ShadowRecord("shortest", (0, 1, 2, 3), 5 + 3 + 4 + 2 + 5 + 5, 14, 5)


async def test_a_streaming_caller_gets_each_trajectory_as_soon_as_it_finishes() -> None:
    harness = Harness(lengths(5, 1, 4, 2, 50, 40), shadows(SHAPED))
    got: list[int] = []

    async def consume() -> None:
        async for trajectory in harness.run(SIZE, "sampled", early=True).trajectories():
            got.append(trajectory.index)

    task = asyncio.create_task(consume())
    await settle()
    for wanted in ([1], [1, 3], [1, 3], [1, 3, 2], [1, 3, 2, 0]):
        await harness.engine.step()
        assert got == wanted
    await task
    await harness.engine.run()


@pytest.mark.parametrize("steps", [0, 3])
async def test_a_caller_that_leaves_before_it_is_answered_stops_everything(steps: int) -> None:
    harness = Harness(lengths(2, 50), shadows(SHAPED))
    task = asyncio.create_task(collect(harness.run(SIZE, "shortest")))
    await settle()
    for _ in range(steps):
        await harness.engine.step()
    task.cancel()
    await settle()
    assert harness.engine.running == []
    record = harness.record("g")
    assert (record.outcome, record.shadow) == (Outcome.CANCELLED, None)
    assert [c.index for c in record.selected] == ([0] if steps else [])


async def test_an_abort_after_the_answer_stops_the_watched_candidates() -> None:
    harness = Harness(lengths(5, 3, 4, 2, 50, 40), shadows(SHAPED))
    task = asyncio.create_task(collect(harness.run(SIZE, "shortest")))
    await settle()
    for _ in range(6):
        await harness.engine.step()
    harness.rollouts.abort("g")
    await settle()
    assert harness.engine.running == []
    assert len(await task) == SIZE
    assert [c.index for c in harness.record("g").selected] == [0, 1, 2, 3]


async def test_an_abort_before_the_answer_raises_in_the_caller() -> None:
    harness = Harness(lengths(50), shadows(SHAPED))
    task = asyncio.create_task(collect(harness.run(SIZE, "shortest")))
    await settle()
    harness.rollouts.abort("g")
    with pytest.raises(GroupAborted):
        await task


# --- failures ---------------------------------------------------------------------


async def test_a_candidate_that_fails_before_the_answer_is_replaced_by_the_next_index() -> None:
    def script(_: str, index: int) -> Script:
        return Script(2, error=CandidateFailed("boom")) if index == 1 else Script(6 + index)

    harness = Harness(script, shadows(SHAPED))
    got = await harness.group(harness.run(SIZE, "shortest"))
    assert {t.index: len(t.output) for t in got} == {0: 6, 2: 8, 3: 9, 4: 10}
    shadow = harness.record("g").shadow
    assert shadow is not None
    assert shadow.selection == (0, 2, 3, 4)


async def test_the_shadow_covers_only_finished_candidates() -> None:
    def script(_: str, index: int) -> Script:
        return Script(30, aborted=True) if index == 5 else Script([9, 8, 7, 6, 1][index])

    harness = Harness(script, shadows(SHAPED))
    await harness.group(harness.run(SIZE, "shortest"))
    record = harness.record("g")
    assert record.outcome is Outcome.COMPLETED
    assert record.candidates[5].reason is DiscardReason.FAILED
    assert record.shadow == ShadowRecord("shortest", (1, 2, 3, 4), 8 + 8 + 7 + 6 + 1, 8 + 7 + 6 + 1, 8)


async def test_an_engine_that_dies_after_the_answer_does_not_change_it() -> None:
    harness = Harness(lengths(5, 3, 4, 2, 50, 40), shadows(SHAPED))
    task = asyncio.create_task(collect(harness.run(SIZE, "shortest")))
    await settle()
    for _ in range(6):
        await harness.engine.step()
    harness.engine.kill()
    await settle()
    assert len(await task) == SIZE
    assert harness.rollouts.running == 0
    record = harness.record("g")
    assert record.outcome is Outcome.COMPLETED
    assert len(record.selected) == SIZE


async def test_an_engine_that_dies_before_the_answer_fails_the_caller() -> None:
    harness = Harness(lengths(50), shadows(SHAPED))
    task = asyncio.create_task(collect(harness.run(SIZE, "shortest")))
    await settle()
    harness.engine.kill()
    with pytest.raises(EngineDead):
        await task
    assert harness.record("g").shadow is None


# --- the record --------------------------------------------------------------------


@pytest.mark.parametrize("policy", SHAPED)
async def test_the_shadow_equals_the_policys_choice_with_the_same_candidates_and_tail_seed(policy: str) -> None:
    for seed in range(40):
        shaped, shadow = Harness(scripted(seed), SHAPED), Harness(scripted(seed), shadows(SHAPED))
        for harness in (shaped, shadow):
            await harness.group(harness.run(SIZE, policy, tail_seed=seed))
        assert shadow.record("g").shadow == as_shadow(shaped.record("g")), seed
        assert shaped.record("g").shadow is None


@pytest.mark.parametrize("policy", BATCHED)
async def test_the_shadow_of_a_cohort_equals_the_policys_choice(policy: str) -> None:
    for seed in range(8):
        shaped, shadow = Harness(scripted(seed), BATCHED), Harness(scripted(seed), shadows(BATCHED))
        for harness in (shaped, shadow):
            if seed % 2:  # prompts that differ in how many candidates they get
                harness.store.add_stds(**{name: float(number**3) for number, name in enumerate(PROMPTS)})
            runs = await harness.start_cohort(SIZE, policy, PROMPTS)
            harness.engine.now = 0
            tasks = [asyncio.create_task(collect(run)) for run in runs]
            await settle()
            await harness.engine.run()
            await asyncio.gather(*tasks)
        for name in PROMPTS:
            assert shadow.record(name).shadow == as_shadow(shaped.record(name)), (seed, name)
        assert [b.deadline for b in shadow.recorder.cohorts] == [b.deadline for b in shaped.recorder.cohorts]
