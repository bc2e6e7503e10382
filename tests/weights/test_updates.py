import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from darts_server.engine.scripted import settle
from darts_server.exceptions import (
    Forbidden,
    InvalidRequest,
    UpdateFailed,
    UpdateRunning,
    UpdateUnsupported,
)
from darts_server.weights.rules import Rule, UpdateSettings
from darts_server.weights.states import State
from darts_server.weights.updates import UpdateOptions, Updates
from tests.weights.house import House, enter, until
from tests.weights.model import SHAPES, tensors, write

pytestmark = pytest.mark.anyio
SWAP = ["pause", "load", "set_version", "resume"]


async def test_an_update_runs_its_phases_and_notifies_observers(house: House) -> None:
    await house.push(5)
    house.check_serves(1, all=5)
    assert house.model.calls == ["announced 1", *SWAP, "ended completed"]
    (record,) = house.observer.records
    assert (record.version, record.source, record.rule, record.partial) == (1, "push", "finish", False)
    assert list(record.seconds) == ["transfer", "check", "wait", "pause", "load", "resume"]
    assert house.updates.last is record
    assert house.updates.last_error is None


async def test_a_version_can_be_given_and_must_be_new(house: House) -> None:
    await house.push(5, options=UpdateOptions(version=70))
    await house.push(6)
    await house.push(7, options=UpdateOptions(version=3))
    house.check_serves(3, all=7)
    with pytest.raises(InvalidRequest, match="version: is 3"):
        await house.push(8, options=UpdateOptions(version=3))
    house.check_serves(3, all=7)


async def test_files_and_folders_under_the_root_are_loaded(house: House) -> None:
    write(house.root / "one.safetensors", 5)
    await house.updates.load("one.safetensors", UpdateOptions())
    house.check_serves(1, all=5)
    first, *others = SHAPES
    write(house.root / "two" / "a.safetensors", 6, first)
    write(house.root / "two" / "b.safetensors", 6, *others)
    await house.updates.load("two", UpdateOptions())
    house.check_serves(2, all=6)


async def test_partial_sets_are_completed_from_the_served_files(house: House) -> None:
    await house.push(5, "layers.0.weight")
    house.check_serves(1, all=0, layer0=5)
    await house.push(6, "layers.1.weight")
    house.check_serves(2, all=0, layer0=5, layer1=6)
    write(house.root / "full.safetensors", 7)
    await house.updates.load("full.safetensors", UpdateOptions())
    await house.push(8, "layers.1.weight")
    house.check_serves(4, all=7, layer1=8)
    (house.root / "full.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"full\.safetensors, which has the others, has changed since"):
        await house.push(9, "layers.1.weight")
    house.check_serves(4, all=7, layer1=8)
    await house.push(9)
    house.check_serves(5, all=9)


async def test_only_files_that_the_model_was_loaded_from_stay_staged(house: House, tmp_path: Path) -> None:
    def staged() -> int:
        return len(list(tmp_path.glob("darts-weights-*/*.safetensors")))

    for value in range(1, 4):
        await house.push(value)
        assert staged() == 1
    await house.push(4, "layers.0.weight")
    assert staged() == 2
    await house.push(5, "layers.0.weight")
    assert staged() == 2
    with pytest.raises(InvalidRequest):
        await house.push_bytes(b"junk", UpdateOptions())
    assert staged() == 2
    await house.push(6)
    assert staged() == 1


@pytest.mark.parametrize("data", [b"", b"junk", save({"x": np.zeros(1, np.float32)}), save(tensors(1))[:-1]])
async def test_a_bad_set_changes_nothing(house: House, data: bytes) -> None:
    await house.push(5)
    before = list(house.model.calls)
    with pytest.raises(InvalidRequest) as error:
        await house.push_bytes(data, UpdateOptions())
    house.check_serves(1, all=5)
    assert house.model.calls == [*before, "ended refused"]
    assert house.updates.last_error == str(error.value)


async def test_without_a_root_no_path_is_read(house: House, tmp_path: Path) -> None:
    updates = Updates(house.model, house.gate, house.staging)
    with pytest.raises(Forbidden):
        await updates.load(str(tmp_path / "checkpoint"), UpdateOptions())
    house.check_serves(0, all=0)


async def test_an_unsupported_model_is_refused_before_anything_is_transferred(house: House) -> None:
    house.model.fail["checkpoint_tensors"] = [UpdateUnsupported("quantized")]

    def body(_: int) -> AsyncIterator[bytes]:
        raise AssertionError("nothing is read")

    with pytest.raises(UpdateUnsupported, match="quantized"):
        await house.updates.push(body, UpdateOptions())
    house.check_serves(0, all=0)


# --- groups ------------------------------------------------------------------


async def test_finish_waits_for_running_groups_and_admits_no_new_ones(house: House) -> None:
    house.gate.let_in()
    house.model.running = True
    update = asyncio.create_task(house.push(5))
    await until(house, State.ANNOUNCED)
    begins = asyncio.create_task(enter(house.gate))
    await settle()
    assert house.model.calls == ["announced 1"]
    assert not begins.done()
    house.model.running = False
    house.gate.leave()
    await update
    await begins
    house.check_serves(1, all=5)


async def test_finish_times_out_when_groups_do_not_end(tmp_path: Path) -> None:
    house = House(tmp_path, UpdateSettings(wait_timeout=0.2))
    house.gate.let_in()
    with pytest.raises(UpdateFailed, match=r"wait took longer than 0\.2 s; groups still run; see --weights-wait"):
        await house.push(5)
    house.gate.leave()
    house.check_serves(0, all=0)
    assert house.model.calls == ["announced 1", "ended failed"]


async def test_keep_does_not_wait_but_admits_no_new_groups_while_it_loads(house: House) -> None:
    house.gate.let_in()
    entered: list[State] = []

    async def watch() -> None:
        async with house.gate.held():
            entered.append(house.updates.state)

    begins: list[asyncio.Task[None]] = []
    house.model.during["load"] = lambda: begins.append(asyncio.create_task(watch()))
    await house.push(5, options=UpdateOptions(Rule.KEEP))
    await begins[0]
    assert entered == [State.SERVING]
    house.gate.leave()
    house.check_serves(1, all=5)
    assert "wait" not in house.observer.records[0].seconds


# --- one at a time -----------------------------------------------------------


async def test_a_second_update_is_refused_while_one_is_in_progress(house: House) -> None:
    house.gate.let_in()
    first = asyncio.create_task(house.push(5))
    await settle()
    with pytest.raises(UpdateRunning, match="an update by push is in progress"):
        await house.push(6)
    with pytest.raises(UpdateRunning):
        await house.trainer.start()
    house.gate.leave()
    await first
    house.check_serves(1, all=5)


async def test_a_caller_that_disconnects_while_it_sends_cancels_its_update(house: House) -> None:
    async def body(_: int) -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    update = asyncio.create_task(house.updates.push(body, UpdateOptions()))
    await until(house, State.STAGING)
    await asyncio.sleep(0.05)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    house.check_serves(0, all=0)
    await house.push(5)
    house.check_serves(1, all=5)


async def test_an_update_completes_if_the_caller_disconnects_after_sending(house: House) -> None:
    house.gate.let_in()
    update = asyncio.create_task(house.push(5))
    await until(house, State.ANNOUNCED)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    house.gate.leave()
    await until(house, State.SERVING)
    house.check_serves(1, all=5)


async def test_restart_halts_groups_at_once_and_waits_for_unshaped_requests(house: House) -> None:
    single, held = asyncio.Event(), asyncio.Event()

    async def alone() -> None:
        async with house.gate.held(alone=True):
            held.set()
            await single.wait()

    waiting = asyncio.create_task(alone())
    await held.wait()
    house.gate.let_in()  # a group, which is halted
    update = asyncio.create_task(house.push(5, options=UpdateOptions(Rule.RESTART)))
    await until(house, State.ANNOUNCED)
    await settle()
    assert house.groups.halted
    assert house.model.calls == ["announced 1"]
    single.set()
    await waiting
    await update
    assert not house.groups.halted
    house.gate.leave()
    house.check_serves(1, all=5)
    assert house.observer.records[0].rule == "restart"


async def test_halted_groups_resume_after_a_failed_update(house: House) -> None:
    house.model.fail["load"] = [UpdateFailed("broken")]
    with pytest.raises(UpdateFailed):
        await house.push(5, options=UpdateOptions(Rule.RESTART))
    assert not house.groups.halted
    house.check_serves(0, all=0)
