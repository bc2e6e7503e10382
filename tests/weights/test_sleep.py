"""Sleep, wake-up and aborts through vLLM's own routes."""

import asyncio

import pytest

from darts_server.exceptions import Conflict, UpdateRunning
from darts_server.weights.coordinator import State
from darts_server.weights.port import Rule
from tests.weights.harness import Harness, until

pytestmark = pytest.mark.anyio


async def test_new_requests_wait_until_all_of_the_engine_is_awake(harness: Harness) -> None:
    await harness.trainer.sleep("keep")
    assert harness.gate.is_closed
    await harness.trainer.wake_up("weights")
    # vLLM does nothing for unknown parts.
    await harness.trainer.wake_up("unknown", "kv_cache")
    assert harness.gate.is_closed
    await harness.trainer.wake_up("kv_cache")
    assert not harness.gate.is_closed
    await harness.trainer.sleep(frees_memory=False)
    assert harness.gate.is_closed
    await harness.trainer.wake_up("scheduling")
    harness.check_serves(0, all=0)


async def test_a_sleep_aborts_groups_as_a_pause_does(harness: Harness) -> None:
    await harness.trainer.sleep("abort")
    (why,) = harness.groups.aborted
    assert "mode=abort" in why


async def test_an_update_needs_the_weights_in_memory_and_leaves_the_rest_asleep(harness: Harness) -> None:
    await harness.trainer.sleep()
    for update in (harness.push(5), harness.trainer.start()):
        with pytest.raises(Conflict, match="POST /wake_up first"):
            await update
    await harness.trainer.wake_up("weights")
    await harness.push(5)
    await harness.trainer.update()
    assert "resume" not in harness.model.calls
    with pytest.raises(Conflict, match=r"is asleep \(kv_cache\)"):
        await harness.trainer.resume()
    await harness.trainer.wake_up("kv_cache")
    assert not harness.gate.is_closed
    assert harness.updates.coordinator.version == 2


async def test_the_cache_alone_can_be_freed_while_the_engine_is_paused(harness: Harness) -> None:
    await harness.trainer.pause("keep")
    await harness.trainer.free_cache()
    with pytest.raises(Conflict, match="POST /wake_up first"):
        await harness.trainer.resume()
    await harness.push(5)
    await harness.trainer.wake_up()
    assert not harness.gate.is_closed
    assert harness.updates.coordinator.version == 1


async def test_a_sleep_that_begins_while_weights_arrive_fails_their_update(harness: Harness) -> None:
    asleep: list[asyncio.Task[None]] = []

    def put_to_sleep() -> None:
        if not asleep:
            asleep.append(asyncio.create_task(harness.trainer.sleep()))

    harness.model.during["checkpoint_tensors"] = put_to_sleep
    with pytest.raises(Conflict, match="weights are not in memory"):
        await harness.push(5)
    await harness.trainer.wake_up()
    harness.check_serves(0, all=0)


async def test_no_update_writes_weights_that_are_being_freed(harness: Harness) -> None:
    async def sleep() -> None:
        with pytest.raises(Conflict, match="POST /wake_up first"):
            await harness.push(5, rule=Rule.KEEP)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        await harness.updates.coordinator.sleep_by_trainer("keep", sleep, frees_memory=True)
    assert not harness.gate.is_closed
    await harness.push(5)
    harness.check_serves(1, all=5)


async def test_a_sleep_or_pause_that_begins_while_the_engine_wakes_up_holds(harness: Harness) -> None:
    for begin in (harness.trainer.sleep, lambda: harness.trainer.pause("keep")):
        await harness.trainer.sleep()
        await harness.updates.coordinator.wake_up_by_trainer(begin)
        assert harness.updates.coordinator.paused_by_trainer
        assert harness.gate.is_closed
        await harness.trainer.wake_up()
        assert not harness.gate.is_closed


async def test_a_sleep_that_waits_for_groups_gives_way_to_an_update(harness: Harness) -> None:
    harness.gate.let_in()
    sleep = asyncio.create_task(harness.trainer.sleep("wait"))
    await asyncio.sleep(0.01)
    update = asyncio.create_task(harness.push(5))
    await until(harness, State.ANNOUNCED)
    harness.gate.leave()
    with pytest.raises(UpdateRunning):
        await sleep
    await update
    harness.check_serves(1, all=5)


async def test_during_an_update_sleep_wake_up_and_a_pause_that_waits_are_refused(harness: Harness) -> None:
    trainer = harness.trainer
    refused = (trainer.sleep, trainer.wake_up, trainer.free_cache, lambda: trainer.pause("wait"))
    harness.gate.let_in()
    update = asyncio.create_task(harness.push(5))
    await until(harness, State.ANNOUNCED)
    for call in refused:
        with pytest.raises(UpdateRunning, match="an update by push is in progress"):
            await call()
    harness.gate.leave()
    await update
    await harness.trainer.start()
    for call in (*refused, harness.trainer.abort):
        with pytest.raises(UpdateRunning, match="POST /finish_weight_update ends it"):
            await call()
    await harness.trainer.write()
    await harness.trainer.finish()
    assert not {"sleep", "wake up", "free cache", "abort", "trainer's pause wait"} & set(harness.model.calls)
    harness.check_serves(2, all=5)


async def test_everything_is_aborted_with_its_groups_also_while_an_update_waits_for_them(harness: Harness) -> None:
    await harness.trainer.abort(everything=False)
    assert harness.groups.aborted == []
    harness.gate.let_in()
    update = asyncio.create_task(harness.push(5))
    await until(harness, State.ANNOUNCED)
    await harness.trainer.abort()
    (why,) = harness.groups.aborted
    assert "all requests were aborted" in why
    harness.gate.leave()
    await update
    await harness.trainer.pause("keep")
    await harness.trainer.start()
    # Allowed, because the trainer paused the engine, and not the update.
    await harness.trainer.abort()
    assert harness.model.calls.count("abort") == 3
