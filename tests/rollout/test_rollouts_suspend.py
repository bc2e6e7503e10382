"""Groups that are suspended and restarted for an update of the weights."""

import asyncio
import random
from typing import Any

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.rollout.learned.prompts import observations
from darts_server.types import DiscardReason
from tests.rollout.helpers import Harness, collect, lengths
from tests.rollout.joining.joining import by_caller, finish

pytestmark = pytest.mark.anyio


async def update(harness: Any) -> None:
    """All candidates are stopped, the weights change, and groups go on."""
    await harness.rollouts.suspend()
    harness.engine.weight_version += 1
    harness.rollouts.resume()
    await settle()


async def test_a_suspended_group_restarts_and_has_one_version() -> None:
    harness = Harness(lengths(3, 9, 9, 9, 9, 9, 4, 5, 6, 9))
    run = harness.run(4)
    waiting = asyncio.create_task(collect(run))
    await settle()
    for _ in range(4):
        await harness.engine.step()
    await update(harness)
    await harness.engine.run()
    record = harness.record("g")
    assert [t.index for t in await waiting] == [c.index for c in record.selected]
    assert min(c.index for c in record.selected) == 6
    assert {(c.weight_version_start, c.weight_version_end) for c in record.selected} == {(1, 1)}
    assert not record.mixed_versions
    assert [c.reason for c in record.candidates[:6]] == [DiscardReason.RESTARTED] * 6
    assert record.restarted_from == 6
    assert len(observations(record)) == 6
    assert record.tail_wait is None or record.tail_wait >= 0


async def test_weights_stand_for_the_candidates_since_the_restart_although_some_were_stopped_before() -> None:
    harness = Harness(lengths(1, 1, 1, 9, 9, 9, 4, 5, 6, 9))
    waiting = asyncio.create_task(collect(harness.run(4, "uniform")))
    await settle()
    for _ in range(3):
        await harness.engine.step()
    await update(harness)
    await harness.engine.run()
    await waiting
    record = harness.record("g")
    assert DiscardReason.TAIL_PRUNED in [c.reason for c in record.candidates[:6]]
    assert record.counted == sum(c.weight or 0.0 for c in record.candidates) == 6


async def test_nothing_runs_while_suspended_even_if_groups_begin() -> None:
    harness = Harness(lengths(5))
    runs = [harness.run(2, group_id="a")]
    await settle()
    await harness.rollouts.suspend()
    runs.append(harness.run(2, group_id="b"))
    await settle()
    assert harness.engine.running == []
    assert not any(run.has_ended for run in runs)
    harness.engine.weight_version += 1
    harness.rollouts.resume()
    waiting = [asyncio.create_task(collect(run)) for run in runs]
    await settle()
    await harness.engine.run()
    assert [len(await each) for each in waiting] == [2, 2]
    for name in "ab":
        assert {c.weight_version_start for c in harness.record(name).selected} == {1}


async def test_suspending_waits_for_groups_that_have_delivered_trajectories() -> None:
    harness = Harness(lengths(2, 6, 9))
    early, late = harness.run(2, early=True, group_id="early"), harness.run(2, group_id="late")
    waiting = [asyncio.create_task(collect(run)) for run in (early, late)]
    await settle()
    for _ in range(3):
        await harness.engine.step()
    restart = asyncio.create_task(harness.rollouts.suspend())
    await settle()
    assert not restart.done()
    assert {candidate.request for candidate in harness.engine.running} == {"early"}
    await harness.engine.run()
    await restart
    assert {c.weight_version_end for c in harness.record("early").selected} == {0}
    harness.engine.weight_version = 1
    harness.rollouts.resume()
    await settle()
    await harness.engine.run()
    assert [len(await each) for each in waiting] == [2, 2]
    assert {c.weight_version_start for c in harness.record("late").selected} == {1}


async def test_a_caller_that_leaves_a_suspended_group_leaves_nothing_running() -> None:
    harness = Harness(lengths(5))
    waiting = asyncio.create_task(collect(harness.run(2)))
    await settle()
    await harness.rollouts.suspend()
    waiting.cancel()
    await settle()
    harness.rollouts.resume()
    await settle()
    assert harness.engine.running == []
    assert harness.rollouts.running == 0


async def test_single_requests_are_restarted_with_their_own_seeds() -> None:
    harness = by_caller(7, 8, 9, 10, 20)
    callers = await harness.send_all()
    await harness.steps(2)
    await update(harness)
    group_id = callers[0].group_id
    assert [harness.origin(group_id, index) for index in range(6, 10)] == [(f"p:c{n}", 0) for n in range(4)]
    results = await finish(harness, callers)
    assert all(caller.is_answered for caller in callers), results
    record = harness.record(group_id)
    assert {c.weight_version_start for c in record.selected} == {1}
    assert not record.mixed_versions


async def test_single_requests_may_join_a_suspended_group() -> None:
    harness = by_caller(7, 8, 9, 10, 20)
    callers = [harness.send("c0"), harness.send("c1")]
    await settle()
    await harness.rollouts.suspend()
    callers += [harness.send("c2"), harness.send("c3")]
    await settle()
    assert harness.engine.running == []
    harness.engine.weight_version = 1
    harness.rollouts.resume()
    await settle()
    await finish(harness, callers)
    assert len({caller.group_id for caller in callers}) == 1
    assert all(caller.is_answered for caller in callers)
    assert {c.weight_version_start for c in harness.record(callers[0].group_id).selected} == {1}


@pytest.mark.parametrize("seed", range(40))
async def test_suspending_at_any_time_leaves_every_group_complete_and_of_one_version(seed: int) -> None:
    chance = random.Random(seed)
    drawn = [chance.randint(1, 15) for _ in range(64)]
    harness = Harness(lambda name, index: Script(drawn[(index + ord(name[0])) % 64]))
    waiting = {}
    for number in range(5):
        name = "abcde"[number]
        run = harness.run(
            chance.randint(2, 5),
            chance.choice(["shortest", "uniform", "longest"]),
            group_id=name,
            early=chance.random() < 0.5,
        )
        waiting[name] = asyncio.create_task(collect(run))
        await settle()
        for _ in range(chance.randint(0, 6)):
            await harness.engine.step()
        if chance.random() < 0.7:
            restart = asyncio.create_task(harness.rollouts.suspend())
            await settle()
            while not restart.done():
                await harness.engine.step()
                await settle()
            harness.engine.weight_version += 1
            harness.rollouts.resume()
            await settle()
    await harness.engine.run()
    for name, task in waiting.items():
        trajectories = await task
        record = harness.record(name)
        assert len(trajectories) == record.size == len(record.selected)
        assert not record.mixed_versions
    assert harness.rollouts.running == 0
