"""Whatever fails, the old weights are served, or nothing is."""

import asyncio
from itertools import combinations
from pathlib import Path

import pytest

from darts_server.exceptions import UpdateFailed, WeightsLost
from darts_server.types import UpdateOutcome
from darts_server.weights.rules import Rule
from darts_server.weights.states import State
from darts_server.weights.updates import UpdateOptions
from tests.weights.house import SHORT_TIMEOUT, House, enter, until
from tests.weights.model import write

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("step", ["pause", "load", "set_version"])
@pytest.mark.parametrize("stuck", [False, True])
async def test_a_failure_at_any_step_serves_the_old_weights(tmp_path: Path, step: str, stuck: bool) -> None:
    house = House(tmp_path, SHORT_TIMEOUT)
    await house.push(5)
    if stuck and step == "load":
        house.model.fail[step] = [TimeoutError()]  # a load that is stuck for good cannot be followed by another
    elif stuck and step == "pause":
        house.model.stuck.add(step)
    else:
        house.model.fail[step] = [UpdateFailed("broken")]
    with pytest.raises(UpdateFailed):
        await house.push(6)
    house.model.stuck.clear()
    house.check_serves(1, all=5)
    assert house.observer.records[-1].outcome is UpdateOutcome.FAILED
    await house.push(7)
    house.check_serves(2, all=7)


async def test_a_failed_first_update_restores_the_checkpoint(house: House) -> None:
    house.model.fail["load"] = [UpdateFailed("broken")]
    with pytest.raises(UpdateFailed):
        await house.push(6, "layers.0.weight")
    house.check_serves(0, all=0)


async def test_a_file_that_changes_while_it_is_loaded_fails_the_update(house: House) -> None:
    path = write(house.root / "one.safetensors", 5)
    house.gate.let_in()
    update = asyncio.create_task(house.updates.load("one.safetensors", UpdateOptions()))
    await until(house, State.ANNOUNCED)
    write(path, 6)
    house.gate.leave()
    with pytest.raises(UpdateFailed, match="changed while it was loaded"):
        await update
    house.check_serves(0, all=0)


async def test_weights_that_cannot_be_restored_are_lost_and_every_request_fails(house: House) -> None:
    house.model.fail["load"] = [UpdateFailed("broken"), UpdateFailed("broken too")]
    house.gate.let_in()
    waiting: list[asyncio.Task[None]] = []
    house.model.during["pause"] = lambda: waiting.append(asyncio.create_task(enter(house.gate)))
    with pytest.raises(WeightsLost, match=r"broken.*broken too.*restart the server"):
        await house.push(5, options=UpdateOptions(Rule.KEEP))
    with pytest.raises(WeightsLost):
        await waiting[0]
    assert house.updates.state is State.LOST
    assert house.model.calls[-3:] == ["abort_requests", "resume", "ended lost"]
    with pytest.raises(WeightsLost):
        await house.push(6)
    with pytest.raises(WeightsLost):
        await house.trainer.start()


async def test_weights_from_vllms_routes_cannot_be_restored(house: House) -> None:
    await house.trainer.update(["x"])
    house.model.fail["load"] = [UpdateFailed("broken")]
    with pytest.raises(WeightsLost, match="the old weights are gone or have changed"):
        await house.push(6)


async def test_weights_are_lost_even_if_aborting_requests_fails(house: House) -> None:
    house.model.fail = {
        "load": [UpdateFailed("broken"), UpdateFailed("broken")],
        "abort_requests": [RuntimeError("no")],
    }
    with pytest.raises(WeightsLost, match="restart the server"):
        await house.push(6)
    assert house.updates.state is State.LOST


@pytest.mark.parametrize("stuck", [True, False])
async def test_an_engine_that_does_not_resume_is_lost(tmp_path: Path, stuck: bool) -> None:
    house = House(tmp_path, SHORT_TIMEOUT)
    house.model.fail["resume"] = [RuntimeError("gone")]
    if stuck:
        house.model.stuck.add("resume")
    with pytest.raises(WeightsLost, match="does not resume"):
        await house.push(6)
    assert house.updates.state is State.LOST


async def test_after_any_failures_the_engine_is_resumed_once_and_the_caller_gets_an_error(tmp_path: Path) -> None:
    steps = ("pause", "load", "set_version", "resume")
    for number, failing in enumerate(c for size in range(5) for c in combinations(steps, size)):
        (tmp_path / str(number)).mkdir()
        house = House(tmp_path / str(number))
        house.model.fail = {step: [UpdateFailed(step)] for step in failing}
        try:
            await house.push(5)
        except (UpdateFailed, WeightsLost):
            assert failing
        else:
            assert not failing
        assert house.model.calls.count("resume") == 1
        assert house.updates.state is (State.LOST if "resume" in failing else State.SERVING)
        if house.updates.state is State.SERVING:
            house.check_serves(1 - bool(failing), all=0 if failing else 5)
