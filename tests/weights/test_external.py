"""Updates and pauses through vLLM's own routes."""

import asyncio
from pathlib import Path

import pytest

from darts_server.engine.scripted import settle
from darts_server.exceptions import Conflict, InvalidRequest, UpdateFailed, UpdateRunning, WeightsLost
from darts_server.types import UpdateOutcome
from darts_server.weights.coordinator import State
from darts_server.weights.port import Rule
from tests.weights.harness import SHORT_TIMEOUT, Harness, enter, until

pytestmark = pytest.mark.anyio

STEPS = ["start", "write", "finish"]


async def test_an_update_pauses_the_engine_and_notifies_observers(harness: Harness) -> None:
    await harness.trainer.update()
    assert harness.model.calls == ["announced 1", "pause", *STEPS, "resume", "ended completed"]
    (record,) = harness.records
    assert (record.version, record.source, record.rule, record.error) == (1, "vllm", "finish", None)
    assert record.seconds.keys() == {"wait", "pause", "load", "transfer", "resume"}
    harness.check_serves(1, all=0)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_an_update_does_not_resume_an_engine_that_the_trainer_paused(harness: Harness, mode: str) -> None:
    await harness.trainer.pause(mode)
    await harness.trainer.update()
    assert harness.gate.is_closed
    assert "pause" not in harness.model.calls
    assert "resume" not in harness.model.calls
    assert harness.model.calls[-3:] == ["clear_caches", "finish", "ended completed"]
    assert harness.records[0].rule is None
    await harness.trainer.resume()
    harness.check_serves(1, all=0)


async def test_a_pause_with_wait_waits_for_whole_groups(harness: Harness) -> None:
    harness.gate.let_in()
    pause = asyncio.create_task(harness.trainer.pause("wait"))
    await asyncio.sleep(0.01)
    assert harness.model.calls == []
    harness.gate.leave()
    await pause
    await harness.trainer.pause("wait")
    assert harness.model.calls == ["trainer's pause wait"] * 2


async def test_a_failed_pause_leaves_the_gate_open(harness: Harness) -> None:
    harness.model.fail["trainer's pause keep"] = [RuntimeError("no")]
    with pytest.raises(RuntimeError):
        await harness.trainer.pause("keep")
    assert harness.model.calls[-1] == "resume", "it may have failed half way"
    await enter(harness.gate)
    assert not harness.updates.coordinator.paused_by_trainer


async def test_a_resume_cancels_a_pause_that_waits(harness: Harness) -> None:
    harness.gate.let_in()
    pause = asyncio.create_task(harness.trainer.pause("wait"))
    await asyncio.sleep(0.01)
    await harness.trainer.resume()
    harness.gate.leave()
    with pytest.raises(UpdateFailed, match="resumed while"):
        await pause
    assert harness.model.calls == ["trainer's resume"]
    await enter(harness.gate)


async def test_a_resume_cancels_a_pause_that_the_engine_is_carrying_out(harness: Harness) -> None:
    """With ``keep`` too: the last call counts."""

    async def pause() -> None:
        await harness.model.step("pause")
        await harness.trainer.resume()

    with pytest.raises(UpdateFailed, match="while it was being paused"):
        await harness.updates.coordinator.pause_by_trainer("keep", pause)
    assert not harness.updates.coordinator.paused_by_trainer
    await enter(harness.gate)


async def test_an_update_that_ends_while_the_trainer_pauses_leaves_the_pause_in_place(harness: Harness) -> None:
    async def pause() -> None:
        await harness.push(5, rule=Rule.KEEP)

    await harness.updates.coordinator.pause_by_trainer("keep", pause)
    assert "resume" not in harness.model.calls
    assert harness.gate.is_closed
    await harness.trainer.resume()
    await enter(harness.gate)


async def test_an_update_does_not_begin_before_the_trainers_pause_is_carried_out(harness: Harness) -> None:
    """Otherwise the engine would run while the model has no weights, and die."""

    async def pause() -> None:
        with pytest.raises(Conflict, match="engine: is being paused; begin the update when"):
            await harness.trainer.start()
        await harness.model.step("pause")

    await harness.updates.coordinator.pause_by_trainer("keep", pause)
    assert harness.model.calls == ["pause"]
    await harness.trainer.update()
    update = ["announced 1", "start", "write", "clear_caches", "finish", "ended completed"]
    assert harness.model.calls == ["pause", *update]
    await harness.trainer.resume()
    harness.check_serves(1, all=0)


async def test_a_pause_that_begins_while_the_engine_resumes_holds(harness: Harness) -> None:
    await harness.trainer.pause("keep")

    async def resume() -> None:
        await harness.trainer.pause("keep")

    await harness.updates.coordinator.resume_by_trainer(resume)
    harness.model.fail["trainer's resume"] = [RuntimeError("no")]
    with pytest.raises(RuntimeError):
        await harness.trainer.resume()
    assert harness.updates.coordinator.paused_by_trainer, "also if a resume fails"
    assert harness.gate.is_closed
    await harness.trainer.resume()
    await enter(harness.gate)


async def test_a_resume_holds_where_a_second_pause_fails(harness: Harness) -> None:
    await harness.trainer.pause("keep")

    async def pause() -> None:
        await harness.trainer.resume()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        await harness.updates.coordinator.pause_by_trainer("keep", pause)
    assert not harness.updates.coordinator.paused_by_trainer
    assert harness.model.calls[-1] == "resume"
    await enter(harness.gate)


async def test_a_resume_during_an_update_takes_effect_at_its_end(harness: Harness) -> None:
    await harness.trainer.pause("keep")
    await harness.trainer.start()
    await harness.trainer.resume()
    assert "trainer's resume" not in harness.model.calls
    await harness.trainer.write()
    await harness.trainer.finish()
    assert harness.model.calls[-2:] == ["resume", "ended completed"]
    await enter(harness.gate)


async def test_our_updates_leave_a_trainers_pause_in_place(harness: Harness) -> None:
    await harness.trainer.pause("keep")
    await harness.push(5)
    assert "resume" not in harness.model.calls
    harness.gate.let_in()
    with pytest.raises(UpdateFailed, match="POST /resume"):
        await harness.push(6)
    await harness.push(6, rule=Rule.KEEP)
    harness.gate.leave()
    await harness.trainer.resume()
    await enter(harness.gate)
    assert harness.model.values == dict.fromkeys(harness.model.values, 6)


async def test_a_pause_with_keep_during_an_update_holds_after_it(harness: Harness) -> None:
    await harness.trainer.start()
    await harness.trainer.pause("keep")
    await harness.trainer.finish()
    assert harness.updates.coordinator.paused_by_trainer
    assert harness.model.calls[-1] == "ended completed"
    assert "resume" not in harness.model.calls


async def test_a_trainers_update_excludes_ours_and_leaves_no_files_to_complete_partial_sets(harness: Harness) -> None:
    await harness.push(5)
    await harness.trainer.start()
    with pytest.raises(UpdateRunning, match="POST /finish_weight_update ends it"):
        await harness.push(6)
    await harness.trainer.finish()
    with pytest.raises(InvalidRequest, match="came by vLLM's own routes"):
        await harness.push(6, "layers.0.weight")
    await harness.push(7)
    await harness.push(8, "layers.0.weight")
    harness.check_serves(4, all=7, layer0=8)


async def test_a_start_while_the_update_before_ends_does_not_reach_the_engine(harness: Harness) -> None:
    """Otherwise the engine would begin it, and be resumed by the previous update with a model without weights."""
    await harness.trainer.start()
    finish = asyncio.create_task(harness.trainer.finish())
    await asyncio.sleep(0)
    for _ in range(20):
        if finish.done():
            break
        with pytest.raises(UpdateRunning):
            await harness.trainer.start()
        await asyncio.sleep(0)
    await finish
    assert harness.model.calls.count("start") == 1
    harness.check_serves(1, all=0)


async def test_steps_outside_of_an_update_are_the_engines_to_refuse(harness: Harness) -> None:
    """A second finish waits for the first, which ends the update."""
    harness.model.fail = {"write": [RuntimeError("not begun")], "finish": [None, RuntimeError("not begun")]}
    with pytest.raises(RuntimeError, match="not begun"):
        await harness.trainer.write()
    await harness.trainer.start()
    first, second = (asyncio.create_task(harness.trainer.finish()) for _ in range(2))
    await first
    with pytest.raises(RuntimeError, match="not begun"):
        await second
    harness.check_serves(1, all=0)


@pytest.mark.parametrize("step", [*STEPS, "clear_caches"])
async def test_a_failure_at_any_step_restores_the_old_weights(harness: Harness, step: str) -> None:
    await harness.push(5)
    # Caches are cleared only after a pause by the trainer.
    if step == "clear_caches":
        await harness.trainer.pause("keep")
    harness.model.fail[step] = [RuntimeError("broken")]
    with pytest.raises(RuntimeError, match="broken"):
        await harness.trainer.update()
    harness.check_serves(1, all=5)
    assert harness.updates.coordinator.last_error is not None
    assert "old weights" in harness.updates.coordinator.last_error
    assert ("load" in harness.model.calls[harness.model.calls.index("start") :]) == (step != "start")
    await harness.trainer.update()
    assert harness.updates.coordinator.version == 2


@pytest.mark.parametrize("during", ["wait", "pause"])
async def test_a_trainer_that_disconnects_while_an_update_begins_leaves_the_gate_open(
    harness: Harness, during: str
) -> None:
    if during == "wait":
        harness.gate.let_in()
    else:
        harness.model.stuck.add("pause")
    start = asyncio.create_task(harness.trainer.start())
    await until(harness, State.ANNOUNCED)
    await settle()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    harness.model.stuck.clear()
    assert ("resume" in harness.model.calls) == ("pause" in harness.model.calls) == (during == "pause")
    await enter(harness.gate)
    assert harness.records[-1].outcome is UpdateOutcome.FAILED
    await harness.push(5, rule=Rule.KEEP)
    assert harness.updates.coordinator.version == 1


async def test_a_trainer_that_disconnects_while_old_weights_are_restored_leaves_them_restored(
    harness: Harness,
) -> None:
    await harness.push(5)
    harness.model.fail["write"] = [RuntimeError("broken")]
    update = asyncio.create_task(harness.trainer.update())
    harness.model.during["load"] = update.cancel
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await update
        await until(harness, State.SERVING)
    harness.check_serves(1, all=5)
    await enter(harness.gate)


async def test_a_trainer_that_dies_before_its_first_tensor_has_changed_nothing(tmp_path: Path) -> None:
    harness = Harness(tmp_path, SHORT_TIMEOUT)
    await harness.trainer.update()
    await harness.trainer.start()
    await until(harness, State.SERVING)
    assert harness.model.calls[-3:] == ["abandon_update", "resume", "ended failed"]
    record = harness.records[-1]
    assert record.outcome is UpdateOutcome.FAILED
    assert record.error == (
        "the trainer began an update and did not call for 1 s; see --weights-timeout; "
        "no tensor had arrived, and the old weights are served"
    )
    assert harness.updates.loaded.intact
    harness.check_serves(1, all=0)
    await harness.trainer.update()
    assert harness.updates.coordinator.version == 2


async def test_each_call_of_a_trainer_restarts_its_timeout(tmp_path: Path) -> None:
    harness = Harness(tmp_path, SHORT_TIMEOUT)
    await harness.trainer.start()
    for _ in range(4):
        await asyncio.sleep(0.3)
        await harness.trainer.write()
    await harness.trainer.finish()
    harness.check_serves(1, all=0)


async def test_a_mixture_that_cannot_be_rolled_back_is_reported_until_a_full_update(tmp_path: Path) -> None:
    harness = Harness(tmp_path, SHORT_TIMEOUT)
    await harness.trainer.update()
    await harness.trainer.start()
    await harness.trainer.write(["a", "b"])
    await harness.trainer.write(["c", "d"])
    await until(harness, State.SERVING)
    assert not harness.updates.loaded.intact
    assert harness.updates.coordinator.last_error is not None
    assert "a part of the new weights" in harness.updates.coordinator.last_error
    assert "2 calls of /update_weights, with a, b, c and 1 more" in harness.updates.coordinator.last_error
    await enter(harness.gate)
    with pytest.raises(InvalidRequest, match="send a full set"):
        await harness.push(6, "layers.0.weight")
    await harness.push(6)
    assert harness.updates.loaded.intact
    harness.check_serves(2, all=6)


async def test_an_engine_that_cannot_be_restored_is_lost(harness: Harness) -> None:
    harness.model.fail = {"write": [RuntimeError("broken")], "abandon_update": [UpdateFailed("broken too")]}
    with pytest.raises(RuntimeError, match="broken"):
        await harness.trainer.update()
    assert harness.updates.coordinator.state is State.LOST
    with pytest.raises(WeightsLost, match=r"broken.*broken too.*restart the server"):
        await enter(harness.gate)
    assert harness.model.calls[-3:] == ["abort_requests", "resume", "ended lost"]
