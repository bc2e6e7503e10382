import asyncio

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import CandidateFailed, EngineDead, EngineRefused, GroupAborted, GroupFailed
from darts_server.types import DiscardReason, FinishReason, GroupRecord, Outcome, SelectedAs
from tests.rollout.helpers import House, collect, lengths

pytestmark = pytest.mark.anyio


async def test_the_shortest_come_back_and_the_rest_are_stopped_where_they_lose() -> None:
    house = House(lengths(3, 9, 4, 30, 5, 50))
    trajectories = await house.group(house.run(4))
    assert sorted(t.index for t in trajectories) == [0, 1, 2, 4]
    assert [len(t.output) for t in sorted(trajectories, key=lambda t: t.index)] == [3, 9, 4, 5]
    [record] = house.recorder.records
    assert record.outcome is Outcome.COMPLETED
    assert {c.index: c.reason for c in record.candidates if c.reason} == dict.fromkeys(
        (3, 5), DiscardReason.LONGER_THAN_NEEDED
    )
    assert all(c.tokens <= 9 for c in record.candidates), "nobody runs past the bar of 9 tokens"


async def test_only_the_last_trajectory_is_marked_last() -> None:
    house = House(lengths(3, 1, 2, 9))
    trajectories = await house.group(house.run(3, early=True))
    assert [t.last for t in trajectories] == [False, False, True]


async def test_early_trajectories_arrive_while_others_run() -> None:
    house = House(lengths(1, 2, 40, 50, 60, 70))
    got: list[int] = []

    async def consume() -> None:
        async for trajectory in house.run(4, early=True).trajectories():
            got.append(trajectory.index)

    waiting = asyncio.create_task(consume())
    await settle()
    for _ in range(6):
        await house.engine.step()
    assert got == [0, 1]
    assert len(house.engine.running) == 4
    await house.engine.run()
    await waiting
    assert sorted(got) == [0, 1, 2, 3]


async def test_a_failed_candidate_is_replaced() -> None:
    def script(_: str, index: int) -> Script:
        return Script(2, error=CandidateFailed("boom")) if index in (0, 1, 2) else Script(5)

    house = House(script)
    trajectories = await house.group(house.run(4))
    assert len(trajectories) == 4
    [record] = house.recorder.records
    assert record.outcome is Outcome.COMPLETED
    assert [c.reason for c in record.candidates[:3]] == [DiscardReason.FAILED] * 3
    assert house.recorder.started == len(record.candidates) == 7


async def test_a_candidate_that_the_engine_aborts_is_never_returned() -> None:
    house = House(lambda _, index: Script(2, aborted=index < 2) if index < 2 else Script(6))
    trajectories = await house.group(house.run(2))
    assert sorted(t.index for t in trajectories) == [2, 3]


async def test_a_group_that_loses_everything_again_and_again_fails_with_the_reason() -> None:
    house = House(lambda _, index: Script(2, aborted=True))
    with pytest.raises(GroupFailed, match="aborted candidate"):
        await house.group(house.run(2))
    [record] = house.recorder.records
    assert record.outcome is Outcome.FAILED
    assert all(c.reason in (DiscardReason.FAILED, DiscardReason.CANCELLED) for c in record.candidates)


async def test_a_refused_request_starts_nothing_again() -> None:
    house = House(lengths(5))
    house.engine.start_error = EngineRefused("temperature must be positive")
    with pytest.raises(EngineRefused, match="temperature"):
        await house.group(house.run(4))
    assert house.recorder.started == 6
    assert house.engine.started == []


async def test_a_dying_engine_ends_every_group_with_an_error() -> None:
    house = House(lengths(50))
    waiting = [asyncio.create_task(collect(house.run(4, group_id=f"g{i}"))) for i in range(3)]
    await settle()
    await house.engine.step()
    house.engine.kill()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(r) for r in results] == [EngineDead] * 3
    assert house.rollouts.running == 0


async def test_a_fault_in_one_group_leaves_the_other_alone() -> None:
    house = House(lambda request, index: Script(3, error=CandidateFailed("boom")) if request == "bad" else Script(8))
    bad = asyncio.create_task(collect(house.run(4, group_id="bad")))
    good = asyncio.create_task(collect(house.run(4, group_id="good")))
    await settle()
    await house.engine.run()
    with pytest.raises(CandidateFailed, match="boom"):
        await bad
    assert len(await good) == 4


@pytest.mark.parametrize(("early", "given"), [(False, []), (True, [0])])
async def test_a_caller_that_is_cancelled_leaves_nothing_running_and_keeps_what_it_was_given(
    early: bool, given: list[int]
) -> None:
    house = House(lengths(1, 50))
    waiting = asyncio.create_task(collect(house.run(4, early=early)))
    await settle()
    await house.engine.step()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert house.engine.running == []
    assert house.rollouts.running == 0
    [record] = house.recorder.records
    assert record.outcome is Outcome.CANCELLED
    assert [c.index for c in record.selected] == given
    assert {c.reason for c in record.candidates if c.selected_as is None} == {DiscardReason.CANCELLED}


async def test_a_caller_that_stops_iterating_leaves_nothing_running() -> None:
    house = House(lengths(1, 50))
    trajectories = house.run(4, early=True).trajectories()
    first = asyncio.ensure_future(anext(trajectories))
    await settle()
    for _ in range(3):
        await house.engine.step()
    assert (await first).index == 0
    await trajectories.aclose()
    assert house.engine.running == []


async def test_cancelling_while_candidates_are_being_started_stops_them_when_they_are() -> None:
    house = House(lengths(50))
    waiting = asyncio.create_task(collect(house.run(4)))
    await asyncio.sleep(0)  # the tasks exist, none has reached the engine
    waiting.cancel()
    await settle()
    assert house.engine.running == []


async def test_aborting_a_group_from_outside_tells_its_caller() -> None:
    house = House(lengths(50))
    waiting = asyncio.create_task(collect(house.run(4, group_id="this")))
    other = asyncio.create_task(collect(house.run(4, group_id="other")))
    await settle()
    house.rollouts.abort("this")
    with pytest.raises(GroupAborted):
        await waiting
    assert {c.request for c in house.engine.running} == {"other"}
    house.rollouts.abort("unknown")
    other.cancel()


async def test_tokens_and_fates_add_up_in_the_record() -> None:
    house = House(lengths(3, 9, 4, 30, 5, 50))
    await house.group(house.run(4, "uniform"))
    [record] = house.recorder.records
    assert record.generated_tokens == sum(c.generated for c in house.engine.started)
    assert record.returned_tokens == sum(c.tokens for c in record.selected)
    assert len(record.selected) == 4
    assert all((c.selected_as is None) != (c.reason is None) for c in record.candidates)
    assert record.tail_wait is not None
    assert record.tail_wait >= 0


async def test_truncated_candidates_are_dropped_while_valid_ones_suffice() -> None:
    house = House(
        lambda _, index: Script(5 + index, finish_reason=FinishReason.LENGTH if index < 2 else FinishReason.STOP)
    )
    trajectories = await house.group(house.run(4, "longest"))
    assert sorted(t.index for t in trajectories) == [2, 3, 4, 5]
    [record] = house.recorder.records
    assert record.candidates[0].reason is DiscardReason.TRUNCATED
    assert record.candidates[5].selected_as is SelectedAs.LONG


async def test_a_group_that_mixes_weight_versions_says_so() -> None:
    house = House(lengths(2, 2, 2, 2, 8, 8))
    waiting = asyncio.create_task(collect(house.run(6, "longest")))
    await settle()
    for _ in range(4):
        await house.engine.step()
    house.engine.weight_version = 1
    await house.engine.run()
    await waiting
    [record] = house.recorder.records
    assert record.mixed_versions
    assert {(c.weight_version_start, c.weight_version_end) for c in record.selected} == {(0, 0), (0, 1)}


async def test_the_same_lots_give_the_same_group() -> None:
    groups = []
    for _ in range(2):
        house = House(lengths(*range(10, 34)))
        trajectories = await house.group(house.run(8, "uniform", tail_seed=3))
        groups.append(sorted(t.index for t in trajectories))
    assert groups[0] == groups[1]


async def test_a_fault_of_ours_ends_its_group_with_the_fault_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    house = House(lengths(3, 9, 4, 30, 5, 50))

    def fail_for_one(record: GroupRecord) -> None:
        if record.group_id == "bad":
            raise RuntimeError("observer broke")

    house.recorder.group_ended = fail_for_one  # type: ignore[method-assign]
    bad, good = (asyncio.create_task(collect(house.run(4, group_id=name))) for name in ("bad", "good"))
    await settle()
    await house.engine.run()
    with pytest.raises(RuntimeError, match="observer broke"):
        await bad
    assert len(await good) == 4
    assert house.engine.running == []
    assert "group bad failed" in caplog.text


async def test_what_an_engine_should_not_raise_still_reaches_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    house = House(lengths(50))
    house.engine.start_error = ZeroDivisionError("a bug in an adapter")
    with pytest.raises(ZeroDivisionError, match="a bug in an adapter"):
        await house.group(house.run(4))
    assert house.rollouts.running == 0
    assert "group g failed" in caplog.text
