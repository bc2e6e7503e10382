import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from darts_server.engine.scripted import settle
from darts_server.exceptions import InvalidRequest, UpdateFailed, UpdateUnsupported
from darts_server.weights.coordinator import State
from darts_server.weights.port import Rule, UpdateSettings
from tests.weights.harness import Harness, enter, until
from tests.weights.model import tensors, write

pytestmark = pytest.mark.anyio
SWAP = ["pause", "load", "set_version", "resume"]


async def test_an_update_runs_its_phases_and_notifies_observers(harness: Harness) -> None:
    await harness.push(5)
    harness.check_serves(1, all=5)
    assert harness.model.calls == ["announced 1", *SWAP, "ended completed"]
    (record,) = harness.records
    assert (record.version, record.source, record.rule, record.partial) == (1, "push", "finish", False)
    assert list(record.seconds) == ["transfer", "check", "wait", "pause", "load", "resume"]
    assert harness.updates.coordinator.last is record
    assert harness.updates.coordinator.last_error is None


async def test_a_version_can_be_given_and_must_be_new(harness: Harness) -> None:
    await harness.push(5, version=70)
    await harness.push(6)
    await harness.push(7, version=3)
    harness.check_serves(3, all=7)
    with pytest.raises(InvalidRequest, match="version: is 3"):
        await harness.push(8, version=3)
    harness.check_serves(3, all=7)


async def test_a_version_may_be_served_again_if_the_caller_says_so(harness: Harness) -> None:
    write(harness.root / "initial.safetensors", 5)
    with pytest.raises(InvalidRequest, match="version: is 0"):
        await harness.updates.load("initial.safetensors", version=0)
    await harness.updates.load("initial.safetensors", version=0, repeat_version=True)
    harness.check_serves(0, all=5)


async def test_partial_sets_are_completed_from_the_served_files(harness: Harness) -> None:
    await harness.push(5, "layers.0.weight")
    harness.check_serves(1, all=0, layer0=5)
    await harness.push(6, "layers.1.weight")
    harness.check_serves(2, all=0, layer0=5, layer1=6)
    write(harness.root / "full.safetensors", 7)
    await harness.updates.load("full.safetensors")
    await harness.push(8, "layers.1.weight")
    harness.check_serves(4, all=7, layer1=8)
    (harness.root / "full.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"full\.safetensors, which has the others, has changed since"):
        await harness.push(9, "layers.1.weight")
    harness.check_serves(4, all=7, layer1=8)
    await harness.push(9)
    harness.check_serves(5, all=9)


async def test_only_files_that_the_model_was_loaded_from_stay_staged(harness: Harness, tmp_path: Path) -> None:
    def staged() -> int:
        return len(list(tmp_path.glob("darts-weights-*/*.safetensors")))

    for value in range(1, 4):
        await harness.push(value)
        assert staged() == 1
    await harness.push(4, "layers.0.weight")
    assert staged() == 2
    await harness.push(5, "layers.0.weight")
    assert staged() == 2
    with pytest.raises(InvalidRequest):
        await harness.push_bytes(b"junk")
    assert staged() == 2
    await harness.push(6)
    assert staged() == 1


@pytest.mark.parametrize("data", [b"", b"junk", save({"x": np.zeros(1, np.float32)}), save(tensors(1))[:-1]])
async def test_a_bad_set_changes_nothing(harness: Harness, data: bytes) -> None:
    await harness.push(5)
    before = list(harness.model.calls)
    with pytest.raises(InvalidRequest) as error:
        await harness.push_bytes(data)
    harness.check_serves(1, all=5)
    assert harness.model.calls == [*before, "ended refused"]
    assert harness.updates.coordinator.last_error == str(error.value)


async def test_an_unsupported_model_is_refused_before_anything_is_transferred(harness: Harness) -> None:
    harness.model.fail["checkpoint_tensors"] = [UpdateUnsupported("quantized")]

    def body(_: int) -> AsyncIterator[bytes]:
        raise AssertionError("nothing is read")

    with pytest.raises(UpdateUnsupported, match="quantized"):
        await harness.updates.push(body)
    harness.check_serves(0, all=0)


# --- groups ------------------------------------------------------------------


async def test_finish_waits_for_running_groups_and_admits_no_new_ones(harness: Harness) -> None:
    harness.gate.let_in()
    harness.model.running = True
    update = asyncio.create_task(harness.push(5))
    await until(harness, State.ANNOUNCED)
    begins = asyncio.create_task(enter(harness.gate))
    await settle()
    assert harness.model.calls == ["announced 1"]
    assert not begins.done()
    harness.model.running = False
    harness.gate.leave()
    await update
    await begins
    harness.check_serves(1, all=5)


async def test_finish_times_out_when_groups_do_not_end(tmp_path: Path) -> None:
    harness = Harness(tmp_path, UpdateSettings(wait_timeout=0.2))
    harness.gate.let_in()
    with pytest.raises(UpdateFailed, match=r"wait took longer than 0\.2 s; groups still run; use the rule keep"):
        await harness.push(5)
    harness.gate.leave()
    harness.check_serves(0, all=0)
    assert harness.model.calls == ["announced 1", "ended failed"]


async def test_keep_does_not_wait_but_admits_no_new_groups_while_it_loads(harness: Harness) -> None:
    harness.gate.let_in()
    entered: list[State] = []

    async def watch() -> None:
        async with harness.gate.enter():
            entered.append(harness.updates.coordinator.state)

    begins: list[asyncio.Task[None]] = []
    harness.model.during["load"] = lambda: begins.append(asyncio.create_task(watch()))
    await harness.push(5, rule=Rule.KEEP)
    await begins[0]
    assert entered == [State.SERVING]
    harness.gate.leave()
    harness.check_serves(1, all=5)
    assert "wait" not in harness.records[0].seconds


# --- one at a time -----------------------------------------------------------


async def test_a_caller_that_disconnects_while_it_sends_cancels_its_update(harness: Harness) -> None:
    async def body(_: int) -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    update = asyncio.create_task(harness.updates.push(body))
    await until(harness, State.STAGING)
    await asyncio.sleep(0.05)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    harness.check_serves(0, all=0)
    await harness.push(5)
    harness.check_serves(1, all=5)


async def test_an_update_completes_if_the_caller_disconnects_after_sending(harness: Harness) -> None:
    harness.gate.let_in()
    update = asyncio.create_task(harness.push(5))
    await until(harness, State.ANNOUNCED)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    harness.gate.leave()
    await until(harness, State.SERVING)
    harness.check_serves(1, all=5)


async def test_restart_halts_groups_at_once_and_waits_for_unshaped_requests(harness: Harness) -> None:
    single = asyncio.Event()
    passed = asyncio.Event()

    async def alone() -> None:
        async with harness.gate.enter(unshaped=True):
            passed.set()
            await single.wait()

    waiting = asyncio.create_task(alone())
    await passed.wait()
    # A group that is halted.
    harness.gate.let_in()
    update = asyncio.create_task(harness.push(5, rule=Rule.RESTART))
    await until(harness, State.ANNOUNCED)
    await settle()
    assert harness.groups.halted
    assert not harness.groups.changes
    assert harness.model.calls == ["announced 1"]
    single.set()
    await waiting
    await update
    assert not harness.groups.halted
    assert harness.groups.changes == 1, "the tokens of the old weights are counted before the model is written"
    harness.gate.leave()
    harness.check_serves(1, all=5)
    assert harness.records[0].rule == "restart"

    harness.model.fail["load"] = [UpdateFailed("broken")]
    with pytest.raises(UpdateFailed):
        await harness.push(6, rule=Rule.RESTART)
    assert not harness.groups.halted
    harness.check_serves(1, all=5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_numbers_that_are_not_finite_are_refused_before_the_model_is_touched(
    harness: Harness, value: float
) -> None:
    await harness.push(5)
    harness.model.calls.clear()
    bad = tensors(6)
    bad["layers.1.weight"][0, 1] = value
    (harness.root / "bad.safetensors").write_bytes(save(bad))
    with pytest.raises(InvalidRequest, match=r"body: tensor layers\.1\.weight has NaN or infinity"):
        await harness.push_bytes(save(bad))
    with pytest.raises(InvalidRequest, match=r"path: tensor layers\.1\.weight has NaN or infinity"):
        await harness.updates.load("bad.safetensors")
    with pytest.raises(InvalidRequest, match=r"tensor layers\.1\.weight has NaN or infinity"):
        await harness.push(value, "layers.1.weight")
    assert set(harness.model.calls) == {"ended refused"}
    harness.check_serves(1, all=5)


async def test_numbers_that_are_not_finite_are_served_if_the_caller_says_so(harness: Harness) -> None:
    await harness.push(math.inf, check_finite=False)
    harness.check_serves(1, all=math.inf)
    write(harness.root / "bad.safetensors", -math.inf)
    await harness.updates.load("bad.safetensors", check_finite=False)
    harness.check_serves(2, all=-math.inf)
