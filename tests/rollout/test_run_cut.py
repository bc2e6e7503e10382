"""Cut trajectories on an engine, under a deadline that is set directly."""

import asyncio
from collections.abc import Sequence

import pytest

from darts_server.engine.port import TokenSlice
from darts_server.engine.scripted import Script, ScriptedCandidate, ScriptedEngine, settle
from darts_server.exceptions import CandidateFailed, EngineDead, InvalidRequest
from darts_server.group.sampled_tail import CutTail
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout import candidates
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.candidates import CarriedCandidate
from darts_server.rollout.plan import UNSHAPED, Plan
from darts_server.rollout.run import GroupRun, Trajectory
from darts_server.rollout.spec import GroupContext, GroupSpec
from darts_server.rollout.start_queue import StartQueue
from darts_server.serving.admission import Admission, Ticket
from darts_server.types import SelectedAs
from tests.rollout.helpers import Recorder, collect

pytestmark = pytest.mark.anyio
# With this seed candidate 3 is the first to be drawn, then 2.
SEED = 0
CUT_RUNNING = {0: Script(2), 1: Script(3), 2: Script(50), 3: Script(60), 4: Script(5)}
CUT_ENDED = {0: Script(2), 1: Script(3), 2: Script(4, delay=20), 3: Script(10)}
"""The tail ends by itself beyond a limit of 5 before the third shortest, which began late, is known."""


def started(
    engine: ScriptedEngine, recorder: Recorder, carried: Sequence[CarriedCandidate[list[int]]] = ()
) -> GroupRun[str, list[int]]:
    context = GroupContext(engine, recorder.events, None, StartQueue(), lambda: engine.now)
    spec = GroupSpec(Plan("cut", UNSHAPED, 1), "prompt", "g", tail_seed=(SEED,))
    return GroupRun(context, spec, Ticket(Admission(lambda: 0, None), None, None), lambda _: None, carried)


async def begun(
    engine: ScriptedEngine,
    recorder: Recorder,
    count: int,
    limit: int,
    carried: Sequence[CarriedCandidate[list[int]]] = (),
) -> tuple[GroupRun[str, list[int]], asyncio.Task[list[Trajectory[list[int]]]]]:
    """Start a group that has a deadline, and a task that waits for it."""
    run = started(engine, recorder, carried)
    run.open(CutTail(2, 1), Allocation(count))
    waiting = asyncio.create_task(collect(run))
    await settle()
    run.set_deadline(limit)
    return run, waiting


async def poll_each_step(engine: ScriptedEngine, run: GroupRun[str, list[int]], steps: int) -> None:
    for _ in range(steps):
        await engine.step()
        run.poll()
        await settle()


async def play(
    script: dict[int, Script], limit: int, engine_class: type[ScriptedEngine] = ScriptedEngine
) -> tuple[dict[int, list[int]], Recorder]:
    engine, recorder = engine_class(lambda _, index: script[index]), Recorder()
    run, waiting = await begun(engine, recorder, len(script), limit)
    await poll_each_step(engine, run, 100)
    return {t.index: t.output for t in await waiting}, recorder


def the_tail(record: GroupRecord) -> CandidateRecord:
    [tail] = [c for c in record.selected if c.selected_as is SelectedAs.LONG]
    return tail


async def test_a_cut_candidate_that_the_engine_loses_is_generated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "REPLACEMENT_POLL_SECONDS", 0)
    engine = ScriptedEngine(lambda _, index: CUT_RUNNING[index])
    engine.stop_lag = 5
    run, waiting = await begun(engine, Recorder(), len(CUT_RUNNING), limit=7)
    for _ in range(30):
        await engine.step()
        # Only running groups are polled.
        if not run.has_ended:
            run.poll()
        if engine.started[3].stopped and engine.started[3].is_running:
            engine.started[3].abort_as_lost(2)
        await settle()
    assert waiting.done(), "the replacement was stopped at the cut, although the group had ended"
    assert {t.index: t.output for t in await waiting}[3] == list(range(7))
    assert [each.index for each in engine.started].count(3) == 2


async def test_a_cut_candidate_that_the_engine_loses_goes_on_from_the_tokens_that_were_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its stream has them already, and its record says that some have older weights."""
    monkeypatch.setattr(candidates, "REPLACEMENT_POLL_SECONDS", 0)
    engine = ScriptedEngine(lambda _, index: CUT_RUNNING[index])
    engine.stop_lag = 5
    tail: CarriedCandidate[list[int]] = CarriedCandidate(TokenSlice(range(1), None), ((0, 1),))
    carried = [CarriedCandidate(), CarriedCandidate(), CarriedCandidate(), tail]
    run, waiting = await begun(engine, Recorder(), len(CUT_RUNNING), 7, carried)
    for _ in range(100):
        await engine.step()
        run.poll()
        if engine.started[3].stopped and engine.started[3].is_running:
            engine.started[3].abort_as_lost(2)
            await settle()
            assert (engine.started[-1].index, engine.started[-1].generated) == (3, 2)
        await settle()
    assert {t.index: t.output for t in await waiting}[3] == list(range(7))
    assert [each.index for each in engine.started].count(3) == 2
    assert run.make_candidate_record(3).version_spans == ((0, 7),)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_cut_candidate_that_cannot_be_continued_fails_only_if_it_was_streamed(
    is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "REPLACEMENT_POLL_SECONDS", 0)
    engine = ScriptedEngine(lambda _, index: CUT_RUNNING[index])
    engine.stop_lag = 5

    def refuse(_: str) -> None:
        raise InvalidRequest("sampling.presence_penalty", "depends on all tokens")

    monkeypatch.setattr(engine, "check_resumable", refuse)
    run, waiting = await begun(engine, Recorder(), len(CUT_RUNNING), limit=7)
    for _ in range(60):
        await engine.step()
        if not run.has_ended:
            run.poll()
            if is_streamed and 3 in run.runner.running:
                run.runner.read_tokens(3, 0)
        if engine.started[3].stopped and engine.started[3].is_running:
            engine.started[3].abort_as_lost(2)
        await settle()
    if is_streamed:
        with pytest.raises(CandidateFailed, match="presence_penalty"):
            await waiting
    else:
        assert {t.index: t.output for t in await waiting}[3] == list(range(7))


async def test_a_candidate_that_finished_beyond_the_limit_before_a_poll_is_truncated() -> None:
    got, recorder = await play(CUT_ENDED, limit=5)
    [record] = recorder.records
    tail = the_tail(record)
    assert len(got[tail.index]) == 5
    assert tail.cut


# --- faults after the cut --------------------------------------------------------


class CannotCut(ScriptedEngine):
    def truncate(self, request: str, output: list[int], tokens: int) -> list[int]:
        raise ZeroDivisionError("a bug in an adapter")


@pytest.mark.parametrize("script", [CUT_RUNNING, CUT_ENDED])
async def test_an_error_while_cutting_reaches_the_caller(
    script: dict[int, Script], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError, match="a bug in an adapter"):
        await asyncio.wait_for(play(script, 5 if script is CUT_ENDED else 7, CannotCut), 10)
    assert "group g failed" in caplog.text


class DeafCandidate(ScriptedCandidate):
    def stop(self) -> int:
        return self.generated


class DeafEngine(ScriptedEngine):
    """Does nothing about a stop."""

    candidate_type = DeafCandidate


async def test_an_engine_that_dies_between_a_cut_and_its_output_fails_the_caller() -> None:
    engine = DeafEngine(lambda _, index: CUT_RUNNING[index])
    run, waiting = await begun(engine, Recorder(), len(CUT_RUNNING), limit=7)
    await poll_each_step(engine, run, 20)
    engine.kill()
    with pytest.raises(EngineDead):
        await asyncio.wait_for(waiting, 10)


async def test_a_caller_may_leave_between_a_cut_and_its_output(caplog: pytest.LogCaptureFixture) -> None:
    engine, recorder = DeafEngine(lambda _, index: CUT_RUNNING[index]), Recorder()
    run, waiting = await begun(engine, recorder, len(CUT_RUNNING), limit=7)
    await poll_each_step(engine, run, 31)
    tail = the_tail(recorder.records[0])
    assert run.runner.read_tokens(tail.index, 0) is None, "its output is still on its way"
    waiting.cancel()
    await settle()
    assert run.runner.read_tokens(tail.index, 0) is None
    await poll_each_step(engine, run, 69)
    assert run.runner.read_tokens(tail.index, 0) is not None
    assert waiting.cancelled()
    assert engine.running == []
    assert caplog.text == ""
