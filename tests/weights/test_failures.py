"""After any failure the old weights are served, or nothing is."""

import asyncio
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest

from darts_server.exceptions import UpdateFailed, WeightsLost
from darts_server.types import UpdateOutcome
from darts_server.weights.coordinator import State
from darts_server.weights.port import Rule
from tests.weights.harness import SHORT_TIMEOUT, Harness, enter, until
from tests.weights.model import write

pytestmark = pytest.mark.anyio


async def test_a_step_that_never_ends_fails_the_update(tmp_path: Path) -> None:
    harness = Harness(tmp_path, SHORT_TIMEOUT)
    await harness.push(5)
    harness.model.stuck.add("pause")
    with pytest.raises(UpdateFailed, match="pause took longer than 1 s"):
        await harness.push(6)
    harness.check_serves(1, all=5)
    assert harness.records[-1].outcome is UpdateOutcome.FAILED


async def test_a_file_that_changes_while_it_is_loaded_fails_the_update(harness: Harness) -> None:
    path = write(harness.root / "one.safetensors", 5)
    harness.gate.let_in()
    update = asyncio.create_task(harness.updates.load("one.safetensors"))
    await until(harness, State.ANNOUNCED)
    write(path, 6)
    harness.gate.leave()
    with pytest.raises(UpdateFailed, match="changed while it was loaded"):
        await update
    harness.check_serves(0, all=0)


async def test_weights_that_cannot_be_restored_are_lost_and_every_request_fails(harness: Harness) -> None:
    harness.model.fail["load"] = [UpdateFailed("broken"), UpdateFailed("broken too")]
    harness.model.fail["abort_requests"] = [RuntimeError("no")]
    harness.gate.let_in()
    waiting: list[asyncio.Task[None]] = []
    harness.model.during["pause"] = lambda: waiting.append(asyncio.create_task(enter(harness.gate)))
    with pytest.raises(WeightsLost, match=r"broken.*broken too.*restart the server"):
        await harness.push(5, rule=Rule.KEEP)
    with pytest.raises(WeightsLost):
        await waiting[0]
    assert harness.updates.coordinator.state is State.LOST
    assert harness.model.calls[-3:] == ["abort_requests", "resume", "ended lost"]
    with pytest.raises(WeightsLost):
        await harness.push(6)
    trainer = harness.trainer
    for call in (trainer.start, trainer.sleep, trainer.wake_up, trainer.abort, partial(trainer.pause, "keep")):
        with pytest.raises(WeightsLost, match="broken too"):
            await call()


async def test_weights_from_vllms_routes_cannot_be_restored(harness: Harness) -> None:
    await harness.trainer.update(["x"])
    harness.model.fail["load"] = [UpdateFailed("broken")]
    with pytest.raises(WeightsLost, match="the old weights are gone or have changed"):
        await harness.push(6)


async def test_an_engine_that_does_not_resume_in_time_is_lost(tmp_path: Path) -> None:
    harness = Harness(tmp_path, SHORT_TIMEOUT)
    harness.model.stuck.add("resume")
    with pytest.raises(WeightsLost, match="does not resume"):
        await harness.push(6)
    assert harness.updates.coordinator.state is State.LOST


async def test_after_any_failures_the_engine_is_resumed_once_and_the_caller_gets_an_error(tmp_path: Path) -> None:
    steps = ("pause", "load", "set_version", "resume")
    for number, failing in enumerate(c for size in range(5) for c in combinations(steps, size)):
        (tmp_path / str(number)).mkdir()
        harness = Harness(tmp_path / str(number))
        harness.model.fail = {step: [UpdateFailed(step)] for step in failing}
        try:
            await harness.push(5)
        except (UpdateFailed, WeightsLost):
            assert failing
        else:
            assert not failing
        assert harness.model.calls.count("resume") == 1
        assert harness.updates.coordinator.state is (State.LOST if "resume" in failing else State.SERVING)
        if harness.updates.coordinator.state is State.SERVING:
            harness.check_serves(1 - bool(failing), all=0 if failing else 5)
            harness.model.fail.clear()
            await harness.push(7)
            harness.check_serves(2 - bool(failing), all=7)
