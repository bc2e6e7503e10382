"""What runs is inside the gate, and what comes waits before it."""

import asyncio
import random

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.policy.shaping import Shaping
from darts_server.rollout.batches.submission import GroupResult, Submission
from darts_server.rollout.joining import JoinRequest
from tests.rollout.batches.test_submission import SIZE, asked, script, submit
from tests.rollout.helpers import House, collect, lengths

pytestmark = pytest.mark.anyio


async def test_a_group_is_inside_until_it_has_ended_whichever_way() -> None:
    house = House(lengths(3, 4, 5, 6))
    run = house.run(2)
    assert house.rollouts.gate.inside == 1
    await house.group(run)
    assert house.rollouts.gate.inside == 0
    for end in ("leave", "cancel", "abort"):
        run = house.run(2, group_id=end)
        await settle()
        assert house.rollouts.gate.inside == 1
        getattr(run, end)()
        assert house.rollouts.gate.inside == 0


async def test_a_shadow_that_outlives_its_caller_is_inside_until_it_ends() -> None:
    house = House(lengths(3, 4, 30), {"shadow": Shaping(redundancy=1.5, num_longest=0, shadow=True)})
    waiting = asyncio.create_task(collect(house.run(2, "shadow")))
    for _ in range(6):
        await house.engine.step()
    assert len(await waiting) == 2
    assert house.rollouts.gate.inside == 1
    await house.engine.run()
    assert house.rollouts.gate.inside == 0


async def given(submission: Submission[str, list[int]]) -> list[GroupResult]:
    return [result async for result in submission.results()]


async def test_a_batch_waits_before_a_closed_gate_and_goes_in_as_a_whole() -> None:
    house = House(script)
    first = asyncio.create_task(given(await submit(house, asked("20", "30"))))
    await settle()
    house.rollouts.gate.close()
    second = asyncio.create_task(given(await submit(house, asked("10"))))
    emptied = asyncio.create_task(house.rollouts.gate.wait_until_empty())
    await settle()
    assert {candidate.request for candidate in house.engine.started} == {"20", "30"}
    assert not emptied.done()
    await house.engine.run()
    await first
    await settle()
    assert emptied.done()
    assert not second.done()
    house.rollouts.gate.open()
    await settle()
    await house.engine.run()
    assert [len(result.samples) for result in await second] == [SIZE]


async def test_a_batch_that_is_given_up_before_a_closed_gate_leaves_nothing() -> None:
    house = House(script)
    house.rollouts.gate.close()
    waiting = asyncio.create_task(given(await submit(house, asked("20", "30"), "cut")))
    await settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert house.engine.started == []
    assert house.rollouts.gate.inside == 0


async def test_a_group_that_gathers_awaits_those_who_are_missing() -> None:
    house = House(lengths(3, 4))
    plan = house.plan(2, "shortest")

    def joining(number: int, same: str = "a") -> JoinRequest[str]:
        return JoinRequest("prompt", f"r{number}", plan, "key", same)

    assert not house.rollouts.joiner.expects(joining(0).join_key)
    first = asyncio.create_task(house.rollouts.joiner.join(joining(0), lambda _: None))
    await settle()
    assert house.rollouts.joiner.expects(joining(1).join_key)
    assert not house.rollouts.joiner.expects(joining(1, "b").join_key)
    second = asyncio.create_task(house.rollouts.joiner.join(joining(1), lambda _: None))
    await settle()
    assert not house.rollouts.joiner.expects(joining(2).join_key)
    await house.engine.run()
    await asyncio.gather(first, second)
    assert house.rollouts.gate.inside == 0


@pytest.mark.parametrize("seed", range(5))
async def test_no_group_that_waits_for_the_gate_mixes_versions_or_is_lost(seed: int) -> None:
    """As the rule ``finish`` does it: close, wait until nothing is inside, change the version, open."""
    rng = random.Random(seed)
    house = House(lambda _, index: Script(rng.randint(1, 9), delay=rng.randint(0, 3)))
    results: list[GroupResult] = []

    async def ask(number: int) -> None:
        for turn in range(5):
            results.extend(await given(await submit(house, asked(f"{number}{turn}", f"{turn}{number}"))))

    asking = asyncio.gather(*(ask(number) for number in range(6)))

    async def update() -> None:
        for _ in range(8):
            await settle()
            house.rollouts.gate.close()
            await house.rollouts.gate.wait_until_empty()
            house.engine.weight_version += 1
            house.rollouts.gate.open()

    updating = asyncio.create_task(update())
    while not asking.done():
        await house.engine.step()
    await asking
    await updating
    assert len(results) == 60
    assert {version for r in results if r.record for version in versions(r)} > {0, 1}
    for result in results:
        assert len(result.samples) == SIZE
        assert result.record is not None
        assert not result.record.mixed_versions
        assert len(versions(result)) == 1


def versions(result: GroupResult) -> set[int | None]:
    assert result.record is not None
    return {v for c in result.record.selected for v in (c.weight_version_start, c.weight_version_end)}
