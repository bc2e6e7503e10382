"""Updates of the monitor's viewers, on the scripted engine."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from darts_server.caller import Caller
from darts_server.engine.scripted import Script, settle
from darts_server.rollout.observers.monitor import MAX_CANDIDATES_PER_GROUP, Fields, Monitor, Viewer
from darts_server.types import FinishReason, SelectedAs
from tests.rollout.helpers import Harness, lengths
from tests.rollout.learned.test_prompts import candidate, record

pytestmark = pytest.mark.anyio
State = dict[str, dict[str, Any]]


EVERYTHING = Caller(is_admin=True).may_see


def new_monitor(harness: Harness, **limits: int) -> Monitor:
    monitor = Monitor(harness.rollouts, clock=lambda: float(harness.engine.now), **limits)
    harness.rollouts.observers.group_ended.add(monitor.group_ended)
    return monitor


def merge(state: State, update: Fields) -> State:
    """Merge an update into a viewer's state."""
    for group_id in update["left"]:
        del state[group_id]
    for group in update["groups"]:
        if "began" in group:
            state[group["group_id"]] = {"candidates": {}}
        kept = state[group["group_id"]]
        for row in group["candidates"]:
            kept["candidates"].setdefault(row["index"], {}).update(row)
        kept |= group | {"candidates": kept["candidates"]}
    return state


def full_state(monitor: Monitor) -> State:
    return merge({}, Viewer(monitor, EVERYTHING).next_update())


async def test_merged_updates_equal_the_state_that_a_new_viewer_gets() -> None:
    rng = Random(3)
    harness = Harness(lambda request, index: Script(Random(f"{request} {index}").randrange(1, 30)))
    monitor = new_monitor(harness)
    often, seldom = Viewer(monitor, EVERYTHING), Viewer(monitor, EVERYTHING)
    state: list[State] = [{}, {}]
    for step in range(80):
        if step < 40:
            harness.run(4, rng.choice(["shortest", "longest", "uniform"]), group_id=f"g{step}")
        await settle()
        await harness.engine.step()
        merge(state[0], often.next_update())
        if rng.random() < 0.1:
            merge(state[1], seldom.next_update())
    merge(state[1], seldom.next_update())
    assert state[0] == state[1] == full_state(monitor)
    assert {group["outcome"] for group in state[0].values()} == {"completed"}
    assert len(state[0]) == 40


async def test_the_newest_of_several_running_groups_with_one_id_is_shown() -> None:
    """Several callers may have chosen it; a viewer that merges by ids would mix them up."""
    harness = Harness(lengths(9, 20, 20))
    monitor = new_monitor(harness)
    viewer = Viewer(monitor, EVERYTHING)
    harness.run(2, group_id="g")
    await harness.engine.step()
    harness.run(3, group_id="g")
    await settle()
    state: State = {}
    for _ in range(3):
        await harness.engine.step()
        update = viewer.next_update()
        assert [group["group_id"] for group in update["groups"]] == ["g"]
        merge(state, update)
        assert state["g"]["size"] == 3


async def test_an_update_has_only_changed_fields() -> None:
    harness = Harness(lengths(2, 9, 20))
    viewer = Viewer(new_monitor(harness), EVERYTHING)
    harness.run(2, group_id="g")
    await settle()
    await harness.engine.step()
    [group] = viewer.next_update()["groups"]
    assert [row["state"] for row in group["candidates"]] == ["running"] * 3
    assert (group["began"], group["size"], group["started"]) == (0, 2, 3)
    assert viewer.next_update()["groups"] == []
    await harness.engine.step()
    [group] = viewer.next_update()["groups"]
    assert group.keys() == {"group_id", "candidates"}
    assert group["candidates"] == [
        {"index": 0, "state": "finished", "tokens": 2, "stop": 2},
        {"index": 1, "tokens": 2},
        {"index": 2, "tokens": 2},
    ]
    await harness.engine.run()
    [group] = viewer.next_update()["groups"]
    assert group | {"candidates": []} == {"group_id": "g", "ended": 9, "outcome": "completed", "candidates": []}
    assert group["candidates"] == [
        {"index": 0, "state": "selected", "selected_as": "short"},
        {"index": 1, "state": "selected", "tokens": 9, "stop": 9, "selected_as": "short"},
        {"index": 2, "state": "discarded", "tokens": 9, "stop": 9, "reason": "longer_than_needed"},
    ]
    assert viewer.next_update()["groups"] == []


async def test_shown_groups_and_candidates_are_bounded_and_dropped_groups_are_named() -> None:
    harness = Harness(lengths(50))
    monitor = new_monitor(harness, max_groups=8, max_candidates=20)
    viewer = Viewer(monitor, EVERYTHING)
    state: State = {}
    for number in range(30):
        harness.run(4, group_id=f"g{number}")
        await settle()
        update = viewer.next_update()
        assert sum(len(group["candidates"]) for group in update["groups"]) <= 20
        assert set(merge(state, update)) == {f"g{n}" for n in range(max(0, number - 2), number + 1)}
    assert (update["running"], update["candidates"]) == (30, 180)
    await harness.engine.run()
    update = viewer.next_update()
    assert set(merge(state, update)) <= set(full_state(monitor)) | {"g27", "g28", "g29"}
    assert sum(len(group["candidates"]) for group in full_state(monitor).values()) <= 20
    assert viewer._running == {}


def test_only_the_first_candidates_of_a_very_large_group_are_shown() -> None:
    harness = Harness(lengths(1))
    monitor = new_monitor(harness, max_candidates=100)
    monitor.group_ended(record(*(candidate(i, 5, FinishReason.STOP, SelectedAs.SHORT) for i in range(3000))))
    [group] = Viewer(monitor, EVERYTHING).next_update()["groups"]
    assert (len(group["candidates"]), group["started"]) == (MAX_CANDIDATES_PER_GROUP, 3000)


def test_ended_groups_of_one_caller_push_out_none_of_another() -> None:
    monitor = new_monitor(Harness(lengths(1)), max_groups=4)
    for number, owner in enumerate(("victim", "flooder", "victim", *["flooder"] * 9)):
        ended = record(candidate(0, 5, FinishReason.STOP, SelectedAs.SHORT))
        monitor.group_ended(replace(ended, group_id=f"g{number}", owner=owner))
    for owner, expected in (("victim", ["g0", "g2"]), ("flooder", ["g10", "g11"])):
        groups = Viewer(monitor, Caller(owner).may_see).next_update()["groups"]
        assert [group["group_id"] for group in groups] == expected
    groups = Viewer(monitor, EVERYTHING).next_update()["groups"]
    assert [group["group_id"] for group in groups] == ["g0", "g2", "g10", "g11"]


async def test_a_group_that_reuses_an_id_is_sent_in_full() -> None:
    harness = Harness(lengths(3, 4, 5))
    monitor = new_monitor(harness)
    viewer = Viewer(monitor, EVERYTHING)
    state: State = {}
    for _ in range(2):
        harness.run(2, group_id="same")
        await settle()
        await harness.engine.step()
        merge(state, viewer.next_update())
        await harness.engine.run()
    assert merge(state, viewer.next_update())["same"]["began"] == 4
