"""Updates and pauses by vLLM's own routes."""

import asyncio
from pathlib import Path

import pytest

from darts_server.exceptions import InvalidRequest, UpdateFailed, UpdateRunning, WeightsLost
from darts_server.types import UpdateOutcome
from darts_server.weights.rules import Rule, UpdateSettings
from darts_server.weights.states import State
from darts_server.weights.updates import UpdateOptions
from tests.weights.house import House, enter, until

pytestmark = pytest.mark.anyio

STEPS = ["start", "write", "finish"]
SHORT_TIMEOUT = UpdateSettings(step_timeout=1.0)


async def test_an_update_applies_the_rule_and_notifies_observers(house: House) -> None:
    house.gate.let_in()
    update = asyncio.create_task(house.trainer.update())
    await until(house, State.ANNOUNCED)
    begins = asyncio.create_task(enter(house.gate))
    await asyncio.sleep(0.01)
    assert house.model.calls == ["announced 1"]
    house.gate.leave()
    await update
    await begins
    assert house.model.calls == ["announced 1", "pause", *STEPS, "resume", "ended completed"]
    (record,) = house.observer.records
    assert (record.version, record.source, record.rule, record.error) == (1, "vllm", "finish", None)
    assert record.seconds.keys() == {"wait", "pause", "load", "transfer", "resume"}
    house.check_serves(1, all=0)


async def test_rule_keep_does_not_wait_for_running_groups(tmp_path: Path) -> None:
    house = House(tmp_path, UpdateSettings(Rule.KEEP))
    house.gate.let_in()
    await house.trainer.update()
    house.gate.leave()
    assert house.observer.records[0].rule == "keep"
    house.check_serves(1, all=0)


async def test_groups_that_do_not_end_fail_the_update_before_the_engine_is_touched(tmp_path: Path) -> None:
    house = House(tmp_path, UpdateSettings(wait_timeout=0.1))
    house.gate.let_in()
    with pytest.raises(UpdateFailed, match="groups still run"):
        await house.trainer.start()
    house.gate.leave()
    assert house.model.calls == ["announced 1", "ended failed"]
    house.check_serves(0, all=0)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_an_update_does_not_resume_an_engine_that_the_trainer_paused(house: House, mode: str) -> None:
    await house.trainer.pause(mode)
    await house.trainer.update()
    begins = asyncio.create_task(enter(house.gate))
    await asyncio.sleep(0.01)
    assert not begins.done()
    assert "pause" not in house.model.calls
    assert "resume" not in house.model.calls
    assert house.model.calls[-2:] == ["clear_caches", "ended completed"]
    assert house.observer.records[0].rule is None
    await house.trainer.resume()
    await begins
    house.check_serves(1, all=0)


async def test_a_pause_with_wait_waits_for_whole_groups(house: House) -> None:
    house.gate.let_in()
    pause = asyncio.create_task(house.trainer.pause("wait"))
    await asyncio.sleep(0.01)
    assert house.model.calls == []
    house.gate.leave()
    await pause
    await house.trainer.pause("wait")
    assert house.model.calls == ["trainer's pause wait"] * 2


async def test_a_pause_with_abort_aborts_groups(house: House) -> None:
    await house.trainer.pause("abort")
    (why,) = house.groups.aborted
    assert "mode=abort" in why


async def test_a_failed_pause_leaves_the_gate_open(house: House) -> None:
    house.model.fail["trainer's pause keep"] = [RuntimeError("no")]
    with pytest.raises(RuntimeError):
        await house.trainer.pause("keep")
    await enter(house.gate)
    assert not house.updates.coordinator.paused_by_trainer


async def test_a_resume_cancels_a_pause_that_waits(house: House) -> None:
    house.gate.let_in()
    pause = asyncio.create_task(house.trainer.pause("wait"))
    await asyncio.sleep(0.01)
    await house.trainer.resume()
    house.gate.leave()
    with pytest.raises(UpdateFailed, match="resumed while"):
        await pause
    assert house.model.calls == ["trainer's resume"]
    await enter(house.gate)


async def test_a_resume_during_an_update_takes_effect_at_its_end(house: House) -> None:
    await house.trainer.pause("keep")
    await house.trainer.start()
    await house.trainer.resume()
    assert "trainer's resume" not in house.model.calls
    await house.trainer.write()
    await house.trainer.finish()
    assert house.model.calls[-2:] == ["resume", "ended completed"]
    await enter(house.gate)


async def test_our_updates_leave_a_trainers_pause_in_place(house: House) -> None:
    await house.trainer.pause("keep")
    await house.push(5)
    assert "resume" not in house.model.calls
    house.gate.let_in()
    with pytest.raises(UpdateFailed, match="POST /resume"):
        await house.push(6)
    await house.push(6, options=UpdateOptions(Rule.KEEP))
    house.gate.leave()
    await house.trainer.resume()
    await enter(house.gate)
    assert house.model.values == dict.fromkeys(house.model.values, 6)


async def test_a_pause_is_refused_while_an_update_waits_for_groups(house: House) -> None:
    house.gate.let_in()
    update = asyncio.create_task(house.push(5))
    await until(house, State.ANNOUNCED)
    with pytest.raises(UpdateRunning):
        await house.trainer.pause("keep")
    house.gate.leave()
    await update
    await house.trainer.start()
    with pytest.raises(UpdateRunning):
        await house.trainer.pause("wait")
    await house.trainer.pause("keep")
    await house.trainer.finish()
    assert house.updates.coordinator.paused_by_trainer
    assert house.model.calls[-1] == "ended completed"
    assert house.model.calls.count("resume") == 1


async def test_a_trainers_update_excludes_ours_and_leaves_no_files_to_complete_partial_sets(house: House) -> None:
    await house.push(5)
    await house.trainer.start()
    with pytest.raises(UpdateRunning, match="POST /finish_weight_update ends it"):
        await house.push(6)
    await house.trainer.finish()
    with pytest.raises(InvalidRequest, match="came by vLLM's own routes"):
        await house.push(6, "layers.0.weight")
    await house.push(7)
    await house.push(8, "layers.0.weight")
    house.check_serves(4, all=7, layer0=8)


async def test_the_engine_refuses_a_second_start_and_the_update_continues(house: House) -> None:
    await house.trainer.start()
    house.model.fail["start"] = [RuntimeError("already active")]
    with pytest.raises(RuntimeError, match="already active"):
        await house.trainer.start()
    await house.trainer.finish()
    house.check_serves(1, all=0)


async def test_the_engine_refuses_steps_without_a_start(house: House) -> None:
    house.model.fail = {"write": [RuntimeError("not begun")], "finish": [RuntimeError("not begun")]}
    for step in (house.trainer.write, house.trainer.finish):
        with pytest.raises(RuntimeError, match="not begun"):
            await step()
    house.check_serves(0, all=0)


@pytest.mark.parametrize("step", STEPS)
async def test_a_failure_at_any_step_restores_the_old_weights(house: House, step: str) -> None:
    await house.push(5)
    house.model.fail[step] = [RuntimeError("broken")]
    with pytest.raises(RuntimeError, match="broken"):
        await house.trainer.update()
    house.check_serves(1, all=5)
    assert house.updates.last_error is not None
    assert "old weights" in house.updates.last_error
    assert ("load" in house.model.calls[house.model.calls.index("start") :]) == (step != "start")
    await house.trainer.update()
    assert house.updates.version == 2


async def test_a_trainer_that_dies_before_its_first_tensor_has_changed_nothing(tmp_path: Path) -> None:
    house = House(tmp_path, SHORT_TIMEOUT)
    await house.trainer.update()
    await house.trainer.start()
    await until(house, State.SERVING)
    assert house.model.calls[-3:] == ["abandon_update", "resume", "ended failed"]
    record = house.observer.records[-1]
    assert record.outcome is UpdateOutcome.FAILED
    assert record.error == (
        "the trainer began an update and did not call for 1 s; see --weights-timeout; "
        "no tensor had arrived, and the old weights are served"
    )
    assert house.updates.intact
    house.check_serves(1, all=0)
    await house.trainer.update()
    assert house.updates.version == 2


async def test_each_call_of_a_trainer_restarts_its_timeout(tmp_path: Path) -> None:
    house = House(tmp_path, SHORT_TIMEOUT)
    await house.trainer.start()
    for _ in range(4):
        await asyncio.sleep(0.4)
        await house.trainer.write()
    await house.trainer.finish()
    house.check_serves(1, all=0)


async def test_a_dead_trainers_partial_weights_are_rolled_back_if_the_old_ones_are_in_files(tmp_path: Path) -> None:
    house = House(tmp_path, SHORT_TIMEOUT)
    await house.push(5)
    await house.trainer.start()
    await house.trainer.write(["a"])
    await until(house, State.SERVING)
    house.check_serves(1, all=5)
    assert house.updates.intact


async def test_a_mixture_that_cannot_be_rolled_back_is_reported_until_a_full_update(tmp_path: Path) -> None:
    house = House(tmp_path, SHORT_TIMEOUT)
    await house.trainer.update()
    await house.trainer.start()
    await house.trainer.write(["a", "b"])
    await house.trainer.write(["c", "d"])
    await until(house, State.SERVING)
    assert not house.updates.intact
    assert house.updates.last_error is not None
    assert "a part of the new weights" in house.updates.last_error
    assert "2 calls of /update_weights, with a, b, c and 1 more" in house.updates.last_error
    await enter(house.gate)
    with pytest.raises(InvalidRequest, match="send a full set"):
        await house.push(6, "layers.0.weight")
    await house.push(6)
    assert house.updates.intact
    house.check_serves(2, all=6)


async def test_an_engine_that_cannot_be_restored_is_lost(house: House) -> None:
    house.model.fail = {"write": [RuntimeError("broken")], "abandon_update": [UpdateFailed("broken too")]}
    with pytest.raises(RuntimeError, match="broken"):
        await house.trainer.update()
    assert house.updates.state is State.LOST
    with pytest.raises(WeightsLost, match=r"broken.*broken too.*restart the server"):
        await enter(house.gate)
    assert house.model.calls[-3:] == ["abort_requests", "resume", "ended lost"]
