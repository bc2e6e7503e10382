"""Groups whose candidates are stopped and started anew, as new weights ask for."""

import asyncio
import random
from typing import Any

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import GroupAborted
from darts_server.rollout.learned.prompts import observations
from darts_server.types import DiscardReason
from tests.rollout.helpers import House, collect, lengths
from tests.rollout.joining.joining import by_caller, finish

pytestmark = pytest.mark.anyio


async def update(house: Any) -> None:
    """All candidates are stopped, the weights change, and groups go on."""
    await house.rollouts.suspend()
    house.engine.weight_version += 1
    house.rollouts.resume()
    await settle()


async def test_a_group_is_started_anew_and_is_of_one_version() -> None:
    house = House(lengths(3, 9, 9, 9, 9, 9, 4, 5, 6, 9))
    run = house.run(4)
    waiting = asyncio.create_task(collect(run))
    await settle()
    for _ in range(4):
        await house.engine.step()
    await update(house)
    await house.engine.run()
    record = house.record("g")
    assert [t.index for t in await waiting] == [c.index for c in record.selected]
    assert min(c.index for c in record.selected) == 6
    assert {(c.weight_version_start, c.weight_version_end) for c in record.selected} == {(1, 1)}
    assert not record.mixed_versions
    assert [c.reason for c in record.candidates[:6]] == [DiscardReason.RESTARTED] * 6
    assert record.restarted_from == 6
    assert len(observations(record)) == 6
    assert record.tail_wait is None or record.tail_wait >= 0


async def test_nothing_runs_while_the_weights_change_whatever_begins() -> None:
    house = House(lengths(5))
    runs = [house.run(2, group_id="a")]
    await settle()
    await house.rollouts.suspend()
    runs.append(house.run(2, group_id="b"))
    await settle()
    assert house.engine.running == []
    assert not any(run.has_ended for run in runs)
    house.engine.weight_version += 1
    house.rollouts.resume()
    waiting = [asyncio.create_task(collect(run)) for run in runs]
    await settle()
    await house.engine.run()
    assert [len(await each) for each in waiting] == [2, 2]
    for name in "ab":
        assert {c.weight_version_start for c in house.record(name).selected} == {1}


async def test_what_has_gone_out_in_part_is_waited_for() -> None:
    house = House(lengths(2, 6, 9))
    early, late = house.run(2, early=True, group_id="early"), house.run(2, group_id="late")
    waiting = [asyncio.create_task(collect(run)) for run in (early, late)]
    await settle()
    for _ in range(3):
        await house.engine.step()
    restart = asyncio.create_task(house.rollouts.suspend())
    await settle()
    assert not restart.done()
    assert {candidate.request for candidate in house.engine.running} == {"early"}
    await house.engine.run()
    await restart
    assert {c.weight_version_end for c in house.record("early").selected} == {0}
    house.engine.weight_version = 1
    house.rollouts.resume()
    await settle()
    await house.engine.run()
    assert [len(await each) for each in waiting] == [2, 2]
    assert {c.weight_version_start for c in house.record("late").selected} == {1}


async def test_a_caller_that_leaves_while_its_group_is_halted_leaves_nothing() -> None:
    house = House(lengths(5))
    waiting = asyncio.create_task(collect(house.run(2)))
    await settle()
    await house.rollouts.suspend()
    waiting.cancel()
    await settle()
    house.rollouts.resume()
    await settle()
    assert house.engine.running == []
    assert house.rollouts.running == 0


async def test_all_groups_can_be_ended_at_once() -> None:
    house = House(lengths(5))
    waiting = [asyncio.create_task(collect(house.run(2, group_id=name))) for name in "ab"]
    await settle()
    house.rollouts.abort_all("the engine was paused")
    for each in waiting:
        with pytest.raises(GroupAborted, match="the engine was paused"):
            await each
    await settle()
    assert house.engine.running == []


async def test_single_requests_are_started_anew_each_with_its_own_seed() -> None:
    hall = by_caller(7, 8, 9, 10, 20)
    callers = await hall.all_come()
    await hall.steps(2)
    await update(hall)
    group_id = callers[0].group_id
    assert [hall.origin(group_id, index) for index in range(6, 10)] == [(f"p:c{n}", 0) for n in range(4)]
    results = await finish(hall, callers)
    assert all(caller.served for caller in callers), results
    record = hall.record(group_id)
    assert {c.weight_version_start for c in record.selected} == {1}
    assert not record.mixed_versions


async def test_single_requests_that_come_while_their_group_is_halted_are_in_it() -> None:
    hall = by_caller(7, 8, 9, 10, 20)
    callers = [hall.come("c0"), hall.come("c1")]
    await settle()
    await hall.rollouts.suspend()
    callers += [hall.come("c2"), hall.come("c3")]
    await settle()
    assert hall.engine.running == []
    hall.engine.weight_version = 1
    hall.rollouts.resume()
    await settle()
    await finish(hall, callers)
    assert len({caller.group_id for caller in callers}) == 1
    assert all(caller.served for caller in callers)
    assert {c.weight_version_start for c in hall.record(callers[0].group_id).selected} == {1}


@pytest.mark.parametrize("seed", range(40))
async def test_whenever_it_happens_every_group_is_whole_and_of_one_version(seed: int) -> None:
    chance = random.Random(seed)
    drawn = [chance.randint(1, 15) for _ in range(64)]
    house = House(lambda name, index: Script(drawn[(index + ord(name[0])) % 64]))
    waiting = {}
    for number in range(5):
        name = "abcde"[number]
        run = house.run(
            chance.randint(2, 5),
            chance.choice(["shortest", "uniform", "longest"]),
            group_id=name,
            early=chance.random() < 0.5,
        )
        waiting[name] = asyncio.create_task(collect(run))
        await settle()
        for _ in range(chance.randint(0, 6)):
            await house.engine.step()
        if chance.random() < 0.7:
            restart = asyncio.create_task(house.rollouts.suspend())
            await settle()
            while not restart.done():
                await house.engine.step()
                await settle()
            house.engine.weight_version += 1
            house.rollouts.resume()
            await settle()
    await house.engine.run()
    for name, task in waiting.items():
        trajectories = await task
        record = house.record(name)
        assert len(trajectories) == record.size == len(record.selected)
        assert not record.mixed_versions
    assert house.rollouts.running == 0
