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
from darts_server.weights.coordinator import Rule, UpdateSettings
from darts_server.weights.states import State
from darts_server.weights.updates import UpdateOptions, Updates
from tests.weights.house import House, enter, until
from tests.weights.model import SHAPES, tensors, write

pytestmark = pytest.mark.anyio
SWAP = ["pause", "load", "became", "resume"]


async def test_an_update_goes_its_way_and_everyone_hears_of_it(house: House) -> None:
    await house.push(5)
    house.serves(1, all=5)
    assert house.model.calls == ["announced 1", *SWAP, "ended completed"]
    (record,) = house.heard.records
    assert (record.version, record.source, record.rule, record.partial) == (1, "push", "finish", False)
    assert list(record.seconds) == ["transfer", "check", "wait", "pause", "load", "resume"]
    assert house.updates.last is record
    assert house.updates.last_error is None


async def test_a_version_can_be_named_and_must_be_another(house: House) -> None:
    await house.push(5, wish=UpdateOptions(version=70))
    await house.push(6)
    await house.push(7, wish=UpdateOptions(version=3))
    house.serves(3, all=7)
    with pytest.raises(InvalidRequest, match="version: is 3"):
        await house.push(8, wish=UpdateOptions(version=3))
    house.serves(3, all=7)


async def test_files_and_folders_under_the_root_are_loaded(house: House) -> None:
    write(house.root / "one.safetensors", 5)
    await house.updates.load("one.safetensors", UpdateOptions())
    house.serves(1, all=5)
    first, *others = SHAPES
    write(house.root / "two" / "a.safetensors", 6, first)
    write(house.root / "two" / "b.safetensors", 6, *others)
    await house.updates.load("two", UpdateOptions())
    house.serves(2, all=6)


async def test_partial_sets_lie_on_what_was_there_wherever_it_came_from(house: House) -> None:
    await house.push(5, "layers.0.weight")
    house.serves(1, all=0, layer0=5)
    await house.push(6, "layers.1.weight")
    house.serves(2, all=0, layer0=5, layer1=6)
    write(house.root / "full.safetensors", 7)
    await house.updates.load("full.safetensors", UpdateOptions())
    await house.push(8, "layers.1.weight")
    house.serves(4, all=7, layer1=8)
    (house.root / "full.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"full\.safetensors, which has the others, has changed since"):
        await house.push(9, "layers.1.weight")
    house.serves(4, all=7, layer1=8)
    await house.push(9)
    house.serves(5, all=9)


async def test_only_what_the_model_holds_stays_staged(house: House, tmp_path: Path) -> None:
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
async def test_a_bad_set_touches_nothing(house: House, data: bytes) -> None:
    await house.push(5)
    before = list(house.model.calls)
    with pytest.raises(InvalidRequest) as error:
        await house.push_bytes(data, UpdateOptions())
    house.serves(1, all=5)
    assert house.model.calls == [*before, "ended refused"]
    assert house.updates.last_error == str(error.value)


async def test_without_a_root_no_path_is_read(house: House, tmp_path: Path) -> None:
    updates = Updates(house.model, house.gate, house.staging)
    with pytest.raises(Forbidden):
        await updates.load(str(tmp_path / "checkpoint"), UpdateOptions())
    house.serves(0, all=0)


async def test_what_a_model_does_not_support_is_said_before_anything_comes(house: House) -> None:
    house.model.fail["original"] = [UpdateUnsupported("quantized")]

    def body(_: int) -> AsyncIterator[bytes]:
        raise AssertionError("nothing is read")

    with pytest.raises(UpdateUnsupported, match="quantized"):
        await house.updates.push(body, UpdateOptions())
    house.serves(0, all=0)


# --- groups ------------------------------------------------------------------


async def test_finish_waits_for_what_runs_and_lets_nothing_begin(house: House) -> None:
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
    house.serves(1, all=5)


async def test_finish_gives_up_when_groups_do_not_end(tmp_path: Path) -> None:
    house = House(tmp_path, UpdateSettings(wait=0.2))
    house.gate.let_in()
    with pytest.raises(UpdateFailed, match=r"wait took longer than 0\.2 s; groups still run; see --weights-wait"):
        await house.push(5)
    house.gate.leave()
    house.serves(0, all=0)
    assert house.model.calls == ["announced 1", "ended failed"]


async def test_keep_waits_for_nothing_but_lets_nothing_begin_while_it_loads(house: House) -> None:
    house.gate.let_in()
    entered: list[State] = []

    async def watch() -> None:
        async with house.gate.held():
            entered.append(house.updates.state)

    begins: list[asyncio.Task[None]] = []
    house.model.during["load"] = lambda: begins.append(asyncio.create_task(watch()))
    await house.push(5, wish=UpdateOptions(Rule.KEEP))
    await begins[0]
    assert entered == [State.SERVING]
    house.gate.leave()
    house.serves(1, all=5)
    assert "wait" not in house.heard.records[0].seconds


# --- one at a time -----------------------------------------------------------


async def test_a_second_update_is_refused_while_one_is_under_way(house: House) -> None:
    house.gate.let_in()
    first = asyncio.create_task(house.push(5))
    await settle()
    with pytest.raises(UpdateRunning, match="an update by push is under way"):
        await house.push(6)
    with pytest.raises(UpdateRunning):
        await house.trainer.start()
    house.gate.leave()
    await first
    house.serves(1, all=5)


async def test_a_caller_that_leaves_while_it_sends_ends_its_update(house: House) -> None:
    async def body(_: int) -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    update = asyncio.create_task(house.updates.push(body, UpdateOptions()))
    await until(house, State.STAGING)
    await asyncio.sleep(0.05)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    house.serves(0, all=0)
    await house.push(5)
    house.serves(1, all=5)


async def test_a_caller_that_leaves_later_leaves_an_update_that_comes_to_its_end(house: House) -> None:
    house.gate.let_in()
    update = asyncio.create_task(house.push(5))
    await until(house, State.ANNOUNCED)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    house.gate.leave()
    await until(house, State.SERVING)
    house.serves(1, all=5)


async def test_restart_stops_groups_at_once_and_waits_for_what_is_none(house: House) -> None:
    single, held = asyncio.Event(), asyncio.Event()

    async def alone() -> None:
        async with house.gate.held(alone=True):
            held.set()
            await single.wait()

    waiting = asyncio.create_task(alone())
    await held.wait()
    house.gate.let_in()  # a group, which is halted
    update = asyncio.create_task(house.push(5, wish=UpdateOptions(Rule.RESTART)))
    await until(house, State.ANNOUNCED)
    await settle()
    assert house.groups.halted
    assert house.model.calls == ["announced 1"]
    single.set()
    await waiting
    await update
    assert not house.groups.halted
    house.gate.leave()
    house.serves(1, all=5)
    assert house.heard.records[0].rule == "restart"


async def test_groups_go_on_also_after_a_restart_that_failed(house: House) -> None:
    house.model.fail["load"] = [UpdateFailed("broken")]
    with pytest.raises(UpdateFailed):
        await house.push(5, wish=UpdateOptions(Rule.RESTART))
    assert not house.groups.halted
    house.serves(0, all=0)
