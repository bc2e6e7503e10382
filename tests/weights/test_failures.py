"""Whatever fails, the old weights are served, or nothing is."""

import asyncio
from itertools import combinations
from pathlib import Path

import pytest

from darts_server.exceptions import UpdateFailed, WeightsLost
from darts_server.types import UpdateOutcome
from darts_server.weights.coordinator import Rule
from darts_server.weights.states import State
from darts_server.weights.updates import UpdateOptions
from tests.weights.house import HASTY, House, enter, until
from tests.weights.model import write

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("step", ["pause", "load", "became"])
@pytest.mark.parametrize("stuck", [False, True])
async def test_wherever_it_fails_the_old_weights_are_served(tmp_path: Path, step: str, stuck: bool) -> None:
    house = House(tmp_path, HASTY)
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
    house.serves(1, all=5)
    assert house.heard.records[-1].outcome is UpdateOutcome.FAILED
    await house.push(7)
    house.serves(2, all=7)


async def test_a_first_update_that_fails_gives_back_what_the_engine_began_with(house: House) -> None:
    house.model.fail["load"] = [UpdateFailed("broken")]
    with pytest.raises(UpdateFailed):
        await house.push(6, "layers.0.weight")
    house.serves(0, all=0)


async def test_a_file_that_changes_while_it_is_loaded_is_not_trusted(house: House) -> None:
    path = write(house.root / "one.safetensors", 5)
    house.gate.let_in()
    update = asyncio.create_task(house.updates.load("one.safetensors", UpdateOptions()))
    await until(house, State.ANNOUNCED)
    write(path, 6)
    house.gate.leave()
    with pytest.raises(UpdateFailed, match="changed while it was loaded"):
        await update
    house.serves(0, all=0)


async def test_what_cannot_be_put_back_is_lost_and_nothing_is_served_any_more(house: House) -> None:
    house.model.fail["load"] = [UpdateFailed("broken"), UpdateFailed("broken too")]
    house.gate.let_in()
    waiting: list[asyncio.Task[None]] = []
    house.model.during["pause"] = lambda: waiting.append(asyncio.create_task(enter(house.gate)))
    with pytest.raises(WeightsLost, match=r"broken.*broken too.*restart the server"):
        await house.push(5, wish=UpdateOptions(Rule.KEEP))
    with pytest.raises(WeightsLost):
        await waiting[0]
    assert house.updates.state is State.LOST
    assert house.model.calls[-3:] == ["stop", "resume", "ended lost"]
    with pytest.raises(WeightsLost):
        await house.push(6)
    with pytest.raises(WeightsLost):
        await house.trainer.start()


async def test_after_vllms_routes_a_failure_cannot_be_put_back(house: House) -> None:
    await house.trainer.update(["x"])
    house.model.fail["load"] = [UpdateFailed("broken")]
    with pytest.raises(WeightsLost, match="the old weights are gone or have changed"):
        await house.push(6)


async def test_what_is_lost_is_lost_also_if_it_does_not_stop(house: House) -> None:
    house.model.fail = {"load": [UpdateFailed("broken"), UpdateFailed("broken")], "stop": [RuntimeError("no")]}
    with pytest.raises(WeightsLost, match="restart the server"):
        await house.push(6)
    assert house.updates.state is State.LOST


@pytest.mark.parametrize("stuck", [True, False])
async def test_an_engine_that_does_not_go_on_is_given_up(tmp_path: Path, stuck: bool) -> None:
    house = House(tmp_path, HASTY)
    house.model.fail["resume"] = [RuntimeError("gone")]
    if stuck:
        house.model.stuck.add("resume")
    with pytest.raises(WeightsLost, match="does not go on"):
        await house.push(6)
    assert house.updates.state is State.LOST


async def test_whatever_fails_the_engine_is_told_to_go_on_and_the_caller_hears(tmp_path: Path) -> None:
    steps = ("pause", "load", "became", "resume")
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
            house.serves(1 - bool(failing), all=0 if failing else 5)
