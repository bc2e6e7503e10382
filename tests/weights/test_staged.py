"""Updates in two steps: what is staged, what is served and which files there are after each outcome."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from safetensors.numpy import save

from darts_server.engine.scripted import settle
from darts_server.exceptions import Conflict, InvalidRequest, NotFound, UpdateFailed, UpdateRunning, WeightsLost
from darts_server.weights.coordinator import State
from darts_server.weights.rules import Rule
from darts_server.weights.staged import MAX_ENDED, StagedUpdate
from darts_server.weights.updates import UpdateOptions
from tests.weights.harness import Harness, enter, until
from tests.weights.lora_sets import push as push_lora
from tests.weights.model import tensors, write

pytestmark = pytest.mark.anyio
LONG = 600.0


async def stage(harness: Harness, value: float, *names: str, seconds: float = LONG, **options: Any) -> str:
    """Stage a set of one value. Returns its id."""
    await harness.push(
        value,
        *names,
        options=UpdateOptions(partial=bool(names), stage_seconds=seconds, **options),
    )
    return current(harness).id


def current(harness: Harness) -> StagedUpdate:
    staged = harness.updates.staged.current
    assert staged is not None
    return staged


def count_files(harness: Harness) -> int:
    return len(harness.staging.glob("*.safetensors"))


async def test_staging_touches_neither_engine_nor_groups_and_the_switch_transfers_nothing(harness: Harness) -> None:
    harness.gate.let_in()
    staged_id = await stage(harness, 5)
    harness.gate.leave()
    harness.check_serves(0, all=0)
    assert harness.model.calls == []
    assert harness.groups.changes == 0
    assert harness.updates.last is None
    assert (current(harness).version, current(harness).update.source) == (1, "push")
    assert list(current(harness).update.seconds) == ["transfer", "check"]
    record = await harness.updates.staged.switch(staged_id)
    harness.check_serves(1, all=5)
    assert harness.model.calls == ["announced 1", "pause", "load", "set_version", "resume", "ended completed"]
    assert (record.version, record.source, record.rule) == (1, "push", "finish")
    assert list(record.seconds) == ["transfer", "check", "wait", "pause", "load", "resume"]
    assert harness.observer.records == [record]
    assert harness.updates.staged.current is None
    assert count_files(harness) == 1


async def test_version_and_rule_are_those_of_the_staging_unless_the_switch_names_others(harness: Harness) -> None:
    staged_id = await stage(harness, 5, version=70, rule=Rule.KEEP)
    assert (await harness.updates.staged.switch(staged_id)).rule == "keep"
    harness.check_serves(70, all=5)
    staged_id = await stage(harness, 6, version=80, rule=Rule.KEEP)
    assert (await harness.updates.staged.switch(staged_id, Rule.RESTART, 3)).rule == "restart"
    harness.check_serves(3, all=6)
    with pytest.raises(InvalidRequest, match="version: is 3"):
        await stage(harness, 7, version=3)
    staged_id = await stage(harness, 7)
    with pytest.raises(InvalidRequest, match="version: is 3"):
        await harness.updates.staged.switch(staged_id, version=3)
    await harness.updates.staged.switch(staged_id)
    harness.check_serves(4, all=7)


async def test_the_switch_waits_for_groups_by_its_rule(harness: Harness) -> None:
    staged_id = await stage(harness, 5)
    harness.gate.let_in()
    switch = asyncio.create_task(harness.updates.staged.switch(staged_id))
    await until(harness, State.ANNOUNCED)
    begins = asyncio.create_task(enter(harness.gate))
    await settle()
    assert harness.model.calls == ["announced 1"]
    assert not begins.done()
    with pytest.raises(UpdateRunning, match="are being switched"):
        harness.updates.staged.drop(staged_id)
    with pytest.raises(UpdateRunning):
        await harness.updates.staged.switch(staged_id)
    harness.gate.leave()
    await switch
    await begins
    harness.check_serves(1, all=5)


async def test_dropped_weights_leave_no_file_and_cannot_be_switched(harness: Harness) -> None:
    staged_id = await stage(harness, 5)
    assert count_files(harness) == 1
    harness.updates.staged.drop(staged_id)
    assert count_files(harness) == 0
    for call in (harness.updates.staged.switch(staged_id), harness.updates.staged.switch("never")):
        with pytest.raises(NotFound, match="stage the weights again"):
            await call
    with pytest.raises(NotFound, match="were dropped"):
        harness.updates.staged.drop(staged_id)
    harness.check_serves(0, all=0)
    await harness.updates.staged.switch(await stage(harness, 6))
    harness.check_serves(1, all=6)


async def test_staged_weights_expire(harness: Harness) -> None:
    await harness.push(4)
    staged_id = await stage(harness, 5, seconds=0.02)
    while harness.updates.staged.current is not None:
        await asyncio.sleep(0.001)
    assert count_files(harness) == 1
    with pytest.raises(NotFound, match=r"expired after 0\.02 s.*larger expires_after"):
        await harness.updates.staged.switch(staged_id)
    harness.check_serves(1, all=4)


async def test_weights_do_not_expire_while_they_are_switched(harness: Harness) -> None:
    staged_id = await stage(harness, 5, seconds=0.5)
    harness.gate.let_in()
    switch = asyncio.create_task(harness.updates.staged.switch(staged_id))
    await until(harness, State.ANNOUNCED)
    await asyncio.sleep(0.6)
    harness.gate.leave()
    await switch
    harness.check_serves(1, all=5)


async def test_an_end_does_not_remove_what_another_update_is_sending(harness: Harness) -> None:
    """Its file is in the same folder, and is known to be needed only when it is whole."""
    staged_id = await stage(harness, 5)
    data, more = save(tensors(6)), asyncio.Event()

    async def body(_: int) -> AsyncIterator[bytes]:
        yield data[:10]
        await more.wait()
        yield data[10:]

    update = asyncio.create_task(harness.updates.push(body, UpdateOptions()))
    while count_files(harness) < 2:
        await asyncio.sleep(0.001)
    harness.updates.staged.drop(staged_id)
    assert count_files(harness) == 1
    more.set()
    await update
    harness.check_serves(1, all=6)


async def test_one_set_is_staged_at_a_time(harness: Harness) -> None:
    staged_id = await stage(harness, 5)
    with pytest.raises(Conflict, match=f"as {staged_id} for version 1; switch them, or DELETE"):
        await stage(harness, 6)
    assert count_files(harness) == 1
    await harness.updates.staged.switch(staged_id)
    harness.check_serves(1, all=5)


async def test_a_bad_set_is_refused_when_it_is_staged(harness: Harness) -> None:
    with pytest.raises(InvalidRequest, match="not a whole safetensors file"):
        await harness.push_bytes(b"junk", UpdateOptions(stage_seconds=LONG))
    assert harness.updates.staged.current is None
    assert count_files(harness) == 0
    assert harness.model.calls == ["ended refused"]
    harness.check_serves(0, all=0)


# --- other updates meanwhile -------------------------------------------------


async def test_another_update_takes_the_place_of_staged_weights(harness: Harness) -> None:
    staged_id = await stage(harness, 5)
    await harness.push(6)
    harness.check_serves(1, all=6)
    assert count_files(harness) == 1
    with pytest.raises(Conflict, match="another update, by push, made version 1; stage the weights again"):
        await harness.updates.staged.switch(staged_id)
    staged_id = await stage(harness, 7)
    await harness.trainer.update(["x"])
    assert count_files(harness) == 1
    with pytest.raises(Conflict, match="by vllm, made version 2"):
        await harness.updates.staged.switch(staged_id)


async def test_an_update_that_fails_meanwhile_leaves_staged_weights_alone(harness: Harness) -> None:
    staged_id = await stage(harness, 5)
    with pytest.raises(InvalidRequest):
        await harness.push_bytes(b"junk", UpdateOptions())
    harness.model.fail["load"] = [UpdateFailed("broken")]
    with pytest.raises(UpdateFailed):
        await harness.push(6)
    assert count_files(harness) == 1
    await harness.updates.staged.switch(staged_id)
    harness.check_serves(1, all=5)


async def test_weights_are_staged_while_the_engine_sleeps_and_switched_when_it_is_awake(harness: Harness) -> None:
    await harness.trainer.sleep()
    staged_id = await stage(harness, 5)
    with pytest.raises(Conflict, match="wake_up first"):
        await harness.updates.staged.switch(staged_id)
    await harness.trainer.wake_up()
    await harness.updates.staged.switch(staged_id)
    harness.check_serves(1, all=5)


async def test_a_file_that_changes_before_the_switch_is_a_conflict(harness: Harness) -> None:
    path = write(harness.root / "one.safetensors", 5)
    await harness.updates.load("one.safetensors", UpdateOptions(stage_seconds=LONG))
    staged_id = current(harness).id
    write(path, 6)
    for _ in range(2):
        with pytest.raises(Conflict, match="has changed since it was staged; stage the weights again"):
            await harness.updates.staged.switch(staged_id)
    assert harness.updates.staged.current is None
    assert path.exists()
    harness.check_serves(0, all=0)
    assert harness.model.calls == ["ended refused"]


# --- failures ----------------------------------------------------------------


@pytest.mark.parametrize("step", ["pause", "load", "set_version"])
async def test_after_a_failed_switch_the_old_weights_are_served_and_it_can_be_repeated(
    harness: Harness, step: str
) -> None:
    await harness.push(4)
    staged_id = await stage(harness, 5)
    harness.model.fail[step] = [UpdateFailed("broken")]
    with pytest.raises(UpdateFailed):
        await harness.updates.staged.switch(staged_id)
    harness.check_serves(1, all=4)
    failed = harness.observer.records[-1]
    assert (failed.outcome, "transfer" in failed.seconds) == ("failed", True)
    assert current(harness).timer is not None
    record = await harness.updates.staged.switch(staged_id)
    assert "transfer" not in record.seconds, "it is counted once"
    harness.check_serves(2, all=5)
    assert count_files(harness) == 1


async def test_a_switch_completes_if_its_caller_disconnects(harness: Harness) -> None:
    staged_id = await stage(harness, 5)
    harness.gate.let_in()
    switch = asyncio.create_task(harness.updates.staged.switch(staged_id))
    await until(harness, State.ANNOUNCED)
    switch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await switch
    harness.gate.leave()
    await until(harness, State.SERVING)
    harness.check_serves(1, all=5)
    with pytest.raises(Conflict, match="were switched already"):
        await harness.updates.staged.switch(staged_id)


async def test_lost_weights_end_what_is_staged(harness: Harness) -> None:
    staged_id = await stage(harness, 5)
    harness.model.fail["load"] = [UpdateFailed("broken"), UpdateFailed("broken too")]
    with pytest.raises(WeightsLost):
        await harness.updates.staged.switch(staged_id)
    assert harness.updates.staged.current is None
    with pytest.raises(WeightsLost):
        await stage(harness, 6)
    with pytest.raises(WeightsLost):
        await harness.updates.staged.switch(staged_id)
    with pytest.raises(WeightsLost):
        harness.updates.staged.drop(staged_id)


# --- back to the weights before ------------------------------------------------


async def test_the_weights_before_are_kept_and_switched_back_to_under_their_version(harness: Harness) -> None:
    await harness.push(4, options=UpdateOptions(version=30))
    await harness.updates.staged.switch(await stage(harness, 5), keep_previous=True)
    harness.check_serves(31, all=5)
    assert (current(harness).version, current(harness).update.source) == (30, "previous")
    assert count_files(harness) == 2
    record = await harness.updates.staged.switch(current(harness).id, keep_previous=True)
    assert (record.version, record.source) == (30, "previous")
    harness.check_serves(30, all=4)
    await harness.updates.staged.switch(current(harness).id)
    harness.check_serves(31, all=5)
    assert harness.updates.staged.current is None
    assert count_files(harness) == 1


async def test_the_checkpoint_is_switched_back_to(harness: Harness) -> None:
    await harness.updates.staged.switch(await stage(harness, 5, "layers.0.weight"), keep_previous=True)
    harness.check_serves(1, all=0, layer0=5)
    await harness.updates.staged.switch(current(harness).id)
    harness.check_serves(0, all=0)
    assert count_files(harness) == 0


@pytest.mark.parametrize("staged", [True, False])
async def test_kept_weights_make_room_for_the_next_before_these_are_sent(harness: Harness, staged: bool) -> None:
    await harness.push(4)
    await harness.updates.staged.switch(await stage(harness, 5), keep_previous=True)
    previous, counted = current(harness).id, []

    async def body(_: int) -> AsyncIterator[bytes]:
        counted.append(count_files(harness))
        yield save(tensors(6))

    await harness.updates.push(body, UpdateOptions(stage_seconds=LONG if staged else None))
    assert counted == [2], "the served model and the new file"
    with pytest.raises(Conflict, match="were dropped when other ones were sent"):
        await harness.updates.staged.switch(previous)
    if staged:
        await harness.updates.staged.switch(current(harness).id)
    harness.check_serves(3, all=6)


async def test_an_update_that_sends_nothing_leaves_kept_weights_alone(harness: Harness) -> None:
    await harness.push(4)
    await harness.updates.staged.switch(await stage(harness, 5), keep_previous=True)
    with pytest.raises(InvalidRequest):
        await harness.updates.load("typo.safetensors", UpdateOptions())
    await harness.updates.staged.switch(current(harness).id)
    harness.check_serves(1, all=4)


async def test_weights_in_no_file_cannot_be_kept_and_nothing_changes(harness: Harness) -> None:
    await harness.trainer.update(["x"])
    staged_id = await stage(harness, 5)
    with pytest.raises(Conflict, match="keep_previous: is not possible"):
        await harness.updates.staged.switch(staged_id, keep_previous=True)
    assert harness.updates.version == 1
    assert current(harness).timer is not None
    await harness.updates.staged.switch(staged_id)
    harness.check_serves(2, all=5)


async def test_a_switch_that_fails_keeps_nothing_but_what_was_staged(harness: Harness) -> None:
    await harness.push(4)
    staged_id = await stage(harness, 5)
    harness.model.fail["load"] = [UpdateFailed("broken")]
    with pytest.raises(UpdateFailed):
        await harness.updates.staged.switch(staged_id, keep_previous=True)
    assert current(harness).id == staged_id
    harness.check_serves(1, all=4)


async def test_the_ends_of_few_staged_updates_are_remembered(harness: Harness) -> None:
    ids = []
    for _ in range(MAX_ENDED + 1):
        ids.append(await stage(harness, 5))
        harness.updates.staged.drop(ids[-1])
    for staged_id, words in ((ids[0], "no weights are staged as"), (ids[1], "were dropped")):
        with pytest.raises(NotFound, match=words):
            harness.updates.staged.drop(staged_id)


# --- LoRA adapters -----------------------------------------------------------


def folders(harness: Harness) -> int:
    return len(harness.staging.glob("*.lora"))


async def test_a_lora_adapter_is_staged_and_switched(harness: Harness) -> None:
    assert harness.model.loras is not None
    await push_lora(harness, 5)
    await push_lora(harness, 6, stage_seconds=LONG)
    assert harness.model.loras.served == {"a": 5}
    assert (current(harness).version, current(harness).update.lora) == (2, "a")
    assert folders(harness) == 2
    with pytest.raises(InvalidRequest):
        await push_lora(harness, b"junk", "b")
    with pytest.raises(InvalidRequest, match="keep_previous: is for the model itself"):
        await harness.updates.staged.switch(current(harness).id, keep_previous=True)
    harness.model.fail["load_lora"] = [UpdateFailed("broken")]
    with pytest.raises(UpdateFailed):
        await harness.updates.staged.switch(current(harness).id)
    assert harness.model.loras.served == {"a": 5}
    record = await harness.updates.staged.switch(current(harness).id, version=40)
    assert (record.lora, record.version) == ("a", 40)
    assert harness.model.loras.served == {"a": 6}
    assert harness.updates.loras.served["a"].version == 40
    assert folders(harness) == 1


async def test_a_staged_lora_adapter_is_dropped_and_overtaken(harness: Harness) -> None:
    await push_lora(harness, 5, stage_seconds=LONG)
    harness.updates.staged.drop(current(harness).id)
    assert folders(harness) == 0
    await push_lora(harness, 5, stage_seconds=LONG)
    staged_id = current(harness).id
    await push_lora(harness, 6, "b")
    assert folders(harness) == 1
    with pytest.raises(Conflict, match="stage the weights again"):
        await harness.updates.staged.switch(staged_id)


async def test_a_lora_name_that_is_taken_meanwhile_leaves_the_adapter_staged(harness: Harness) -> None:
    await push_lora(harness, 5, stage_seconds=LONG)
    staged_id = current(harness).id
    assert harness.model.loras is not None
    harness.model.loras.is_taken = True
    with pytest.raises(Conflict, match="unload it first"):
        await harness.updates.staged.switch(staged_id)
    harness.model.loras.is_taken = False
    await harness.updates.staged.switch(staged_id)
    assert harness.updates.staged.current is None
