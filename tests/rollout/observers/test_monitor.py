"""What viewers are told, on the scripted engine."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.rollout.observers.monitor import (
    MAX_CANDIDATES_PER_GROUP,
    Monitor,
    MonitorUpdate,
    RunningGroups,
    Viewer,
)
from darts_server.rollout.run import GroupRun
from darts_server.types import FinishReason, SelectedAs
from tests.rollout.helpers import House, lengths
from tests.rollout.learned.test_prompts import candidate, record

pytestmark = pytest.mark.anyio
Told = dict[str, dict[str, Any]]


def watched(house: House, **most: int) -> Monitor:
    live = Monitor(house.rollouts, clock=lambda: float(house.engine.now), **most)
    house.rollouts.observe(live)
    return live


def merge(told: Told, view: MonitorUpdate) -> Told:
    """What a viewer makes of all that it was told."""
    for group_id in view.dropped:
        del told[group_id]
    for group in view.groups:
        if "began" in group.fields:
            told[group.group_id] = {"candidates": {}}
        told[group.group_id] |= group.fields
        for row in group.candidates:
            told[group.group_id]["candidates"].setdefault(row["index"], {}).update(row)
    return told


def everything(live: Monitor) -> Told:
    return merge({}, Viewer(live).next_update())


async def test_who_was_told_what_is_new_knows_as_much_as_who_comes_now() -> None:
    rng = Random(3)
    house = House(lambda request, index: Script(Random(f"{request} {index}").randrange(1, 30)))
    live = watched(house)
    often, seldom = Viewer(live), Viewer(live)
    told: list[Told] = [{}, {}]
    for step in range(80):
        if step < 40:
            house.run(4, rng.choice(["shortest", "longest", "uniform"]), group_id=f"g{step}")
        await settle()
        await house.engine.step()
        merge(told[0], often.next_update())
        if rng.random() < 0.1:
            merge(told[1], seldom.next_update())
    merge(told[1], seldom.next_update())
    assert told[0] == told[1] == everything(live)
    assert {group["outcome"] for group in told[0].values()} == {"completed"}
    assert len(told[0]) == 40


async def test_only_what_changed_is_told() -> None:
    house = House(lengths(2, 9, 20))
    viewer = Viewer(watched(house))
    house.run(2, group_id="g")
    await settle()
    await house.engine.step()
    [group] = viewer.next_update().groups
    assert [row["state"] for row in group.candidates] == ["running"] * 3
    assert (group.fields["began"], group.fields["size"], group.fields["started"]) == (0, 2, 3)
    assert viewer.next_update().groups == []
    await house.engine.step()
    [group] = viewer.next_update().groups
    assert group.fields == {}
    assert group.candidates == [
        {"index": 0, "state": "finished", "tokens": 2, "stop": 2},
        {"index": 1, "tokens": 2},
        {"index": 2, "tokens": 2},
    ]
    await house.engine.run()
    [group] = viewer.next_update().groups
    assert group.fields == {"ended": 9, "outcome": "completed"}
    assert group.candidates == [
        {"index": 0, "state": "selected", "selected_as": "short"},
        {"index": 1, "state": "selected", "tokens": 9, "stop": 9, "selected_as": "short"},
        {"index": 2, "state": "discarded", "tokens": 9, "stop": 9, "reason": "longer_than_needed"},
    ]
    assert viewer.next_update().groups == []


async def test_groups_and_candidates_that_run_are_counted() -> None:
    house = House(lengths(3))
    live = watched(house)
    for name in "ab":
        house.run(4, group_id=name)
    await settle()
    view = Viewer(live).next_update()
    assert (view.running, view.candidates) == (2, 12)
    await house.engine.run()
    view = Viewer(live).next_update()
    assert (view.running, view.candidates) == (0, 0)


async def test_no_more_is_told_and_kept_than_there_is_room_for_and_what_makes_room_is_named() -> None:
    house = House(lengths(50))
    live = watched(house, max_groups=8, max_candidates=20)
    viewer = Viewer(live)
    told: Told = {}
    for number in range(30):
        house.run(4, group_id=f"g{number}")
        await settle()
        view = viewer.next_update()
        assert sum(len(group.candidates) for group in view.groups) <= 20
        assert set(merge(told, view)) == {f"g{n}" for n in range(max(0, number - 2), number + 1)}
    assert (view.running, view.candidates) == (30, 180)
    await house.engine.run()
    view = viewer.next_update()
    assert set(merge(told, view)) <= set(everything(live)) | {"g27", "g28", "g29"}
    assert sum(len(group["candidates"]) for group in everything(live).values()) <= 20
    assert viewer._running == {}


def test_of_a_very_large_group_the_first_candidates_are_told_even_if_they_fill_the_room() -> None:
    house = House(lengths(1))
    live = watched(house, max_candidates=100)
    live.group_ended(record(*(candidate(i, 5, FinishReason.STOP, SelectedAs.SHORT) for i in range(3000))))
    [group] = Viewer(live).next_update().groups
    assert (len(group.candidates), group.fields["started"]) == (MAX_CANDIDATES_PER_GROUP, 3000)


async def test_a_group_that_took_the_id_of_another_is_told_whole() -> None:
    house = House(lengths(3, 4, 5))
    live = watched(house)
    viewer = Viewer(live)
    told: Told = {}
    for _ in range(2):
        house.run(2, group_id="same")
        await settle()
        await house.engine.step()
        merge(told, viewer.next_update())
        await house.engine.run()
    assert merge(told, viewer.next_update())["same"]["began"] == 4


async def test_nothing_is_looked_at_while_nobody_looks() -> None:
    house = House(lengths(3))

    class Unasked:
        @property
        def running(self) -> int:
            raise AssertionError

        @property
        def newest(self) -> Iterator[GroupRun[Any, Any]]:
            raise AssertionError

    asked: RunningGroups = Unasked()
    live = Monitor(asked, max_groups=5)
    house.rollouts.observe(live)
    for number in range(20):
        house.run(2, group_id=f"g{number}")
    await settle()
    await house.engine.run()
    assert live.ended == 20
    assert [kept.group_id for kept in live.ended_after(0)] == [f"g{n}" for n in range(15, 20)]


def test_viewers_are_counted_while_they_watch() -> None:
    live = watched(House(lengths(1)))
    with Viewer(live), Viewer(live):
        assert live.viewers == 2
    assert live.viewers == 0
