"""Groups put together from single requests when the engine, the store or we fail: everyone hears, and nobody waits."""

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import EngineDead, EngineRefused, GroupAborted, GroupFailed
from darts_server.types import GroupRecord, Outcome
from tests.rollout.helpers import lengths
from tests.rollout.joining.joining import POLICIES, SAMPLED, SHORTEST, Hall, SteppedLoop, by_caller, finish

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {"loop_factory": SteppedLoop}


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("error", [EngineDead, EngineRefused])
async def test_an_engine_that_takes_nothing_is_told_to_every_caller_at_once(count: int, error: type[Exception]) -> None:
    hall = Hall(lengths(9), SAMPLED)
    hall.engine.start_error = error("no")
    callers = [hall.come(f"c{i}") for i in range(count)]
    await hall.assert_empty()  # nobody waits for the quiet
    assert [type(c.task.exception()) for c in callers] == [error] * count
    assert [r.outcome for r in hall.recorder.records] == [Outcome.FAILED]
    assert hall.engine.started == []


@pytest.mark.parametrize("sealed", [False, True])
async def test_an_engine_that_dies_is_told_to_every_caller_at_once(sealed: bool) -> None:
    hall = Hall(lengths(9), SAMPLED)
    callers = await hall.all_come(4 if sealed else 3)
    await hall.steps(2)
    hall.engine.kill()
    await hall.assert_empty()
    assert [type(c.task.exception()) for c in callers] == [EngineDead] * len(callers)
    late = hall.come("late")
    await hall.assert_empty()
    assert isinstance(late.task.exception(), EngineDead)
    assert late.group_id == "group-late"


async def test_those_who_were_served_before_the_engine_died_keep_what_they_have() -> None:
    hall = by_caller(3, 10, 11, 12, 50)
    callers = await hall.all_come()
    await hall.steps(4)
    hall.engine.kill()
    await hall.assert_empty()
    assert sum(c.served for c in callers) == 1
    assert [type(c.task.exception()) for c in callers if not c.served] == [EngineDead] * 3
    [record] = hall.recorder.records
    assert record.outcome is Outcome.FAILED
    assert [c.tokens for c in record.selected] == [3]


async def test_requests_that_are_equal_are_refused_together() -> None:
    hall = Hall(lengths(9), SAMPLED)
    callers = await hall.all_come(2)
    hall.engine.start_error = EngineRefused("no")
    callers.append(hall.come("c2"))
    await hall.assert_empty()
    assert [type(c.task.exception()) for c in callers] == [EngineRefused] * 3


async def test_a_caller_that_comes_after_a_group_failed_begins_anew() -> None:
    hall = Hall(lengths(9), SHORTEST)
    hall.engine.start_error = EngineRefused("no")
    hall.come("c0")
    await settle()
    hall.engine.start_error = None
    callers = await hall.all_come()
    await finish(hall, callers)
    assert all(c.served for c in callers)


async def test_too_many_failures_are_told_to_every_caller() -> None:
    hall = Hall(lambda _, index: Script(2, aborted=True), SAMPLED)
    callers = await hall.all_come()
    for error in await finish(hall, callers):
        assert isinstance(error, GroupFailed)


async def test_a_store_that_fails_is_told_to_every_caller() -> None:
    hall = Hall(lengths(9), POLICIES["adaptive"])

    def broken(kind: str, key: str) -> None:
        raise OSError("the disk is gone")

    hall.store.get = broken  # type: ignore[method-assign]
    callers = [hall.come(f"c{i}") for i in range(4)]
    await hall.assert_empty()
    assert [str(c.task.exception()) for c in callers] == ["the disk is gone"] * 4
    assert [r.outcome for r in hall.recorder.records] == [Outcome.CANCELLED]


async def test_a_fault_of_ours_is_told_to_every_caller(caplog: pytest.LogCaptureFixture) -> None:
    hall = Hall(lengths(9), SHORTEST)

    def broken(record: GroupRecord) -> None:
        raise RuntimeError("observer broke")

    hall.recorder.group_ended = broken  # type: ignore[method-assign]
    callers = await hall.all_come()
    assert {str(r) for r in await finish(hall, callers) if isinstance(r, Exception)} == {"observer broke"}
    assert "group group-c0 failed" in caplog.text


async def test_aborting_one_request_ends_its_wait_alone_and_leaves_its_seat() -> None:
    hall = by_caller(3, 10, 11, 12, 50)
    callers = await hall.all_come()
    hall.rollouts.abort("c2")
    await settle()
    assert isinstance(callers[2].task.exception(), GroupAborted)
    late = hall.come("late")
    await finish(hall, [c for c in [*callers, late] if c is not callers[2]])
    assert late.group_id == "group-c0"
    assert sorted(c.got.tokens for c in [*callers, late] if c is not callers[2]) == [3, 10, 11, 12]


@pytest.mark.parametrize("sealed", [False, True])
async def test_aborting_a_group_ends_it_for_all_at_once(sealed: bool) -> None:
    hall = Hall(lengths(9), SAMPLED)
    callers = await hall.all_come(4 if sealed else 3)
    hall.rollouts.abort("group-c0")
    late = hall.come("late")
    await settle()
    assert [type(c.task.exception()) for c in callers] == [GroupAborted] * len(callers)
    assert late.group_id == "group-late"
    hall.rollouts.abort("late")
    await hall.assert_empty()


async def test_a_group_that_fails_while_it_waits_for_its_grant_leaves_its_batch() -> None:
    hall = Hall(lengths(9), POLICIES["adaptive"], window=1.0)
    callers = await hall.all_come()
    hall.engine.kill()
    await settle()
    assert len(hall.recorder.records) == 1
    await hall.quiet(1.0)
    await hall.assert_empty()
    assert [type(c.task.exception()) for c in callers] == [EngineDead] * 4
    assert len(hall.recorder.batches) == 1
