import asyncio

import pytest

from darts_server.engine.scripted import Script, ScriptedCandidate, settle
from darts_server.exceptions import EngineBusy, EngineDead, EngineRefused, GroupAborted
from darts_server.types import DiscardReason, Outcome
from tests.rollout.helpers import Harness, collect, lengths

pytestmark = pytest.mark.anyio


async def test_the_shortest_are_returned_and_other_candidates_are_stopped_once_they_are_too_long() -> None:
    harness = Harness(lengths(3, 9, 4, 30, 5, 50))
    trajectories = await harness.group(harness.run(4))
    assert sorted(t.index for t in trajectories) == [0, 1, 2, 4]
    assert [len(t.output) for t in sorted(trajectories, key=lambda t: t.index)] == [3, 9, 4, 5]
    [record] = harness.recorder.records
    assert record.outcome is Outcome.COMPLETED
    assert {c.index: c.reason for c in record.candidates if c.reason} == dict.fromkeys(
        (3, 5), DiscardReason.LONGER_THAN_NEEDED
    )
    assert all(c.tokens <= 9 for c in record.candidates), "no candidate runs past the limit of 9 tokens"
    assert record.generated_tokens == sum(c.generated for c in harness.engine.started)
    assert record.returned_tokens == 3 + 9 + 4 + 5
    assert (record.tail_wait, len(record.selected)) == (0, 4)


async def test_a_group_whose_candidates_keep_failing_fails_with_their_error() -> None:
    harness = Harness(lambda _, index: Script(2, aborted=True))
    with pytest.raises(GroupAborted, match="aborted candidate"):
        await harness.group(harness.run(2))
    [record] = harness.recorder.records
    assert record.outcome is Outcome.FAILED
    assert all(c.reason in (DiscardReason.FAILED, DiscardReason.CANCELLED) for c in record.candidates)


@pytest.mark.parametrize("error", [EngineRefused("temperature must be positive"), EngineBusy("the queue is full", 5)])
async def test_a_refused_request_is_not_retried(error: Exception) -> None:
    harness = Harness(lengths(5))
    harness.engine.start_error = error
    with pytest.raises(type(error), match=str(error)):
        await harness.group(harness.run(4))
    assert harness.recorder.started == 6
    assert harness.engine.started == []


async def test_a_dying_engine_ends_every_group_with_an_error() -> None:
    harness = Harness(lengths(50))
    waiting = [await harness.begin(harness.run(4, group_id=f"g{i}"), steps=1) for i in range(3)]
    harness.engine.kill()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(r) for r in results] == [EngineDead] * 3
    assert not harness.rollouts.runs


@pytest.mark.parametrize(("early", "given"), [(False, []), (True, [0])])
async def test_a_cancelled_caller_leaves_nothing_running_and_keeps_its_trajectories(
    early: bool, given: list[int]
) -> None:
    harness = Harness(lengths(1, 50))
    waiting = await harness.begin(harness.run(4, early=early), steps=1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert harness.engine.running == []
    assert not harness.rollouts.runs
    [record] = harness.recorder.records
    assert record.outcome is Outcome.CANCELLED
    assert [c.index for c in record.selected] == given
    assert {c.reason for c in record.candidates if c.selected_as is None} == {DiscardReason.CANCELLED}


async def test_candidates_that_are_being_started_when_cancelled_are_stopped_after_their_start() -> None:
    harness = Harness(lengths(50))
    waiting = asyncio.create_task(collect(harness.run(4)))
    await asyncio.sleep(0)  # the tasks exist, none has reached the engine
    waiting.cancel()
    await settle()
    assert harness.engine.running == []


async def test_a_group_is_marked_if_weights_were_changed_and_changed_back_meanwhile() -> None:
    harness = Harness(lengths(8, 8, 8, 8, 8, 8))
    waiting = await harness.begin(harness.run(6, "longest"))
    for version in (1, 0):
        await harness.steps(3)
        harness.rollouts.prepare_weight_change()
        harness.engine.weight_version = version
    await harness.engine.run()
    await waiting
    [record] = harness.recorder.records
    assert {(c.weight_version_start, c.weight_version_end) for c in record.selected} == {(0, 0)}
    assert {c.version_spans for c in record.selected} == {((0, 3), (1, 3), (0, 2))}
    assert record.mixed_versions


async def test_the_spans_of_running_and_of_stopped_candidates_name_the_present_version() -> None:
    harness = Harness(lengths(8, 8, 8, 20, 20, 20))
    waiting = await harness.begin(harness.run(3))
    await harness.steps(3)
    harness.rollouts.prepare_weight_change()
    harness.engine.weight_version = 1
    await harness.steps(2)
    [run] = harness.rollouts.runs
    spans = {run.make_candidate_record(candidate.index).version_spans for candidate in run.candidates}
    assert spans == {((0, 3), (1, 2))}
    await harness.engine.run()
    await waiting
    [record] = harness.recorder.records
    stopped = [c for c in record.candidates if c.selected_as is None]
    assert stopped
    assert all(c.version_spans[0] == (0, 3) and c.version_spans[-1][0] == 1 for c in stopped)


async def test_a_bug_ends_its_own_group_and_no_other_group(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(lengths(3, 9, 4, 30, 5, 50))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("recorder broke")

    runs = [harness.run(4, group_id=name) for name in ("bad", "good")]
    runs[0].runner._handle_result = fail  # type: ignore[method-assign]  # to fail
    bad, good = [await harness.begin(run) for run in runs]
    await harness.engine.run()
    with pytest.raises(RuntimeError, match="recorder broke"):
        await bad
    assert len(await good) == 4
    assert harness.engine.running == []
    assert "group bad failed" in caplog.text


async def test_a_bug_in_the_poll_of_a_group_ends_that_group_and_no_other_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(lengths(3, 9, 4, 30, 5, 50))
    bad, good = [await harness.begin(harness.run(4, group_id=name)) for name in ("bad", "good")]
    read, errors = ScriptedCandidate.count_tokens, [RuntimeError("the adapter broke")]

    def read_or_fail(candidate: ScriptedCandidate) -> int | None:
        if errors:
            raise errors.pop()
        return read(candidate)

    monkeypatch.setattr(ScriptedCandidate, "count_tokens", read_or_fail)
    await harness.engine.run()
    ends = await asyncio.gather(bad, good, return_exceptions=True)
    assert sum(isinstance(end, RuntimeError) for end in ends) == 1
    [record] = [record for record in harness.recorder.records if record.outcome is Outcome.COMPLETED]
    assert all(c.tokens <= 9 for c in record.candidates), "its candidates are stopped as they pass the others"
