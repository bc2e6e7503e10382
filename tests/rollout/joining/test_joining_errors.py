"""Groups of single requests when the engine, the store or our own code fails: every caller gets an error at once."""

import pytest

from darts_server.engine.scripted import settle
from darts_server.exceptions import EngineDead, EngineRefused
from darts_server.rollout.candidates import CandidateRunner
from darts_server.types import Outcome
from tests.rollout.helpers import lengths
from tests.rollout.joining.joining import (
    POLICIES,
    SAMPLED,
    SHORTEST,
    JoiningHarness,
    SignedOutput,
    by_caller,
    finish,
)

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("error", [EngineDead, EngineRefused])
async def test_a_refusing_engine_fails_every_caller_at_once(count: int, error: type[Exception]) -> None:
    harness = JoiningHarness(lengths(9), SAMPLED)
    harness.engine.start_error = error("no")
    callers = [harness.send(f"c{i}") for i in range(count)]
    await harness.assert_empty()  # without waiting for the timeout
    assert [type(c.task.exception()) for c in callers] == [error] * count
    assert [r.outcome for r in harness.recorder.records] == [Outcome.FAILED]
    assert harness.engine.started == []


async def test_a_failing_store_fails_every_caller() -> None:
    harness = JoiningHarness(lengths(9), POLICIES["adaptive"])

    def broken(kind: str, key: str) -> None:
        raise OSError("the disk is gone")

    harness.store.get = broken  # type: ignore[method-assign]  # to fail
    callers = [harness.send(f"c{i}") for i in range(4)]
    await harness.assert_empty()
    assert [str(c.task.exception()) for c in callers] == ["the disk is gone"] * 4
    assert [r.outcome for r in harness.recorder.records] == [Outcome.CANCELLED]


async def test_a_bug_fails_every_caller(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = JoiningHarness(lengths(9), SHORTEST)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("recorder broke")

    monkeypatch.setattr(CandidateRunner, "_handle_result", broken)
    callers = await harness.send_all()
    assert {str(r) for r in await finish(harness, callers) if isinstance(r, Exception)} == {"recorder broke"}
    assert "group group-c0 failed" in caplog.text


async def test_aborting_one_request_ends_its_wait_alone_and_leaves_its_seat() -> None:
    harness = by_caller(3, 10, 11, 12, 50)
    callers = await harness.send_all()
    harness.rollouts.abort("c2")
    await settle()
    assert callers[2].result == SignedOutput("p:c2", 0, 0), "its own candidate's tokens so far"
    late = harness.send("late")
    await finish(harness, [c for c in [*callers, late] if c is not callers[2]])
    assert late.group_id == "group-c0"
    assert sorted(c.result.tokens for c in [*callers, late] if c is not callers[2]) == [3, 10, 12, 50]


@pytest.mark.parametrize("sealed", [False, True])
async def test_aborting_a_group_ends_it_for_all_at_once(sealed: bool) -> None:
    harness = JoiningHarness(lengths(9), SAMPLED)
    callers = await harness.send_all(4 if sealed else 3)
    await harness.steps(3)
    harness.rollouts.abort("group-c0")
    late = harness.send("late")
    await settle()
    assert [c.result for c in callers] == [SignedOutput(f"p:c{i}", 0, 3) for i in range(len(callers))]
    assert late.group_id == "group-late"
    harness.rollouts.abort("late")
    await harness.assert_empty()


async def test_a_group_that_fails_while_it_waits_for_its_allocation_leaves_its_cohort() -> None:
    harness = JoiningHarness(lengths(9), POLICIES["adaptive"], window=1.0)
    callers = await harness.send_all()
    harness.engine.kill()
    await settle()
    assert len(harness.recorder.records) == 1
    await harness.advance_clock(1.0)
    await harness.assert_empty()
    assert [type(c.task.exception()) for c in callers] == [EngineDead] * 4
    assert len(harness.recorder.cohorts) == 1
