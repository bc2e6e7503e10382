"""Groups and the gate: running groups are inside, new ones wait while it is closed."""

import asyncio
import random

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.rollout.batches.events import GroupResult
from darts_server.rollout.joining import JoinRequest
from tests.rollout.batches.test_batch import SIZE, batch_request, script, submit
from tests.rollout.helpers import Harness, lengths

pytestmark = pytest.mark.anyio


async def test_a_group_is_inside_the_gate_until_it_has_ended_with_any_outcome() -> None:
    harness = Harness(lengths(3, 4, 5, 6))
    run = harness.run(2)
    assert harness.rollouts.gate.inside == 1
    await harness.group(run)
    assert harness.rollouts.gate.inside == 0
    for end in ("cancel", "abort"):
        run = harness.run(2, group_id=end)
        await settle()
        assert harness.rollouts.gate.inside == 1
        getattr(run, end)()
        assert harness.rollouts.gate.inside == 0


async def test_all_groups_of_a_batch_wait_for_a_closed_gate_together() -> None:
    harness = Harness(script)
    first = await submit(harness, batch_request("20", "30"))
    await settle()
    harness.rollouts.gate.close()
    second = await submit(harness, batch_request("10"))
    emptied = asyncio.create_task(harness.rollouts.gate.wait_until_empty())
    await settle()
    assert {candidate.request for candidate in harness.engine.started} == {"20", "30"}
    assert not emptied.done()
    await harness.engine.run()
    await first.wait()
    await settle()
    assert emptied.done()
    assert second.end is None
    harness.rollouts.gate.open()
    await settle()
    await harness.engine.run()
    assert [len(result.samples) for result in (await second.wait()).results] == [SIZE]


async def test_a_batch_that_is_cancelled_while_waiting_for_the_gate_starts_nothing() -> None:
    harness = Harness(script)
    harness.rollouts.gate.close()
    batch = await submit(harness, batch_request("20", "30"), "cut")
    await settle()
    assert batch.cancel("too late")
    await settle()
    assert harness.engine.started == []
    assert harness.rollouts.gate.inside == 0


async def test_a_joined_group_expects_its_missing_requests() -> None:
    harness = Harness(lengths(3, 4))
    plan = harness.plan(2, "shortest")

    def joining(number: int, same: str = "a") -> JoinRequest[str]:
        return JoinRequest("prompt", f"r{number}", plan, "key", same, harness.rollouts.admission.admit(1))

    assert not harness.rollouts.joiner.expects(joining(0).join_key)
    first = asyncio.create_task(harness.rollouts.joiner.join(joining(0), lambda _: None))
    await settle()
    assert harness.rollouts.joiner.expects(joining(1).join_key)
    assert not harness.rollouts.joiner.expects(joining(1, "b").join_key)
    second = asyncio.create_task(harness.rollouts.joiner.join(joining(1), lambda _: None))
    await settle()
    assert not harness.rollouts.joiner.expects(joining(2).join_key)
    await harness.engine.run()
    await asyncio.gather(first, second)
    assert harness.rollouts.gate.inside == 0


@pytest.mark.parametrize("seed", range(5))
async def test_groups_that_wait_for_the_gate_all_complete_without_mixed_versions(seed: int) -> None:
    """As the rule ``finish`` does it: close, wait until nothing is inside, change the version, open."""
    rng = random.Random(seed)
    harness = Harness(lambda _, index: Script(rng.randint(1, 9), delay=rng.randint(0, 3)))
    results: list[GroupResult] = []

    async def ask(number: int) -> None:
        for turn in range(5):
            batch = await submit(harness, batch_request(f"{number}{turn}", f"{turn}{number}"))
            results.extend((await batch.wait()).results)

    asking = asyncio.gather(*(ask(number) for number in range(6)))

    async def update() -> None:
        for _ in range(8):
            await settle()
            harness.rollouts.gate.close()
            await harness.rollouts.gate.wait_until_empty()
            harness.engine.weight_version += 1
            harness.rollouts.gate.open()

    updating = asyncio.create_task(update())
    while not asking.done():
        await harness.engine.step()
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
