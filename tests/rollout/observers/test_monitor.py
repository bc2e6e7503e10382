"""Updates of the monitor's viewers, on the scripted engine."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from darts_server.caller import Caller, caller
from darts_server.engine.scripted import Script, settle
from darts_server.rollout.observers.monitor import MAX_CANDIDATES_PER_GROUP, Fields, Monitor, Viewer
from darts_server.rollout.sessions.registry import SessionGroupRequest, SessionRegistry
from darts_server.rollout.sessions.session_group import AgentSession, SessionGroup, SessionTurn
from darts_server.types import FinishReason, SelectedAs
from tests.rollout.helpers import Harness, lengths
from tests.rollout.learned.test_prompts import candidate, record

pytestmark = pytest.mark.anyio
State = dict[str, dict[str, Any]]


EVERYTHING = Caller(is_admin=True).may_see


def new_sessions(harness: Harness) -> SessionRegistry:
    return SessionRegistry(harness.rollouts, clock=lambda: float(harness.engine.now))


def new_monitor(harness: Harness, sessions: SessionRegistry | None = None, **limits: int) -> Monitor:
    sessions = sessions or new_sessions(harness)
    monitor = Monitor(harness.rollouts, sessions, lambda: float(harness.engine.now), **limits)
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
    assert viewer._running_fields == {}


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


async def start_sessions(sessions: SessionRegistry, size: int = 2, owner: str | None = None) -> SessionGroup:
    token = caller.set(Caller(owner))
    try:
        return await sessions.create(SessionGroupRequest(size, 1, "uniform", "task"))
    finally:
        caller.reset(token)


def begin_turn(session: AgentSession, generated: int) -> SessionTurn:
    return session.group.begin_turn(session, lambda: generated, lambda: None)


def finish_turn(turn: SessionTurn) -> None:
    turn.finish([1], [2] * turn.count_tokens(), [-1.0] * turn.count_tokens())


async def test_running_sessions_are_shown_with_their_turns_and_their_tool_time() -> None:
    harness = Harness(lengths(1))
    sessions = new_sessions(harness)
    viewer = Viewer(new_monitor(harness, sessions), EVERYTHING)
    group = await start_sessions(sessions)
    update = viewer.next_update()
    assert (update["running"], update["candidates"]) == (1, 3)
    [shown] = update["groups"]
    assert (shown["group_id"], shown["prompt_key"]) == (group.spec.group_id, "task")
    assert shown["policy"] == "uniform:sessions"
    assert (shown["began"], shown["size"], shown["started"]) == (0, 2, 3)
    assert shown["candidates"] == [
        {"index": index, "state": "waiting", "tokens": 0, "turns": 0, "tool_seconds": 0} for index in range(3)
    ]

    def next_changes() -> list[Fields]:
        [changed] = viewer.next_update()["groups"]
        assert changed.keys() == {"group_id", "candidates"}
        candidates: list[Fields] = changed["candidates"]
        return candidates

    harness.engine.now = 1
    turn = begin_turn(group.sessions[1], generated=4)
    assert next_changes() == [{"index": 1, "state": "running", "tokens": 4, "start": 1}]
    harness.engine.now = 3
    finish_turn(turn)
    assert next_changes() == [{"index": 1, "turns": 1, "tools": [(3, None)]}]
    assert viewer.next_update()["groups"] == [], "a tool that goes on is no change"
    harness.engine.now = 7
    finish_turn(begin_turn(group.sessions[1], generated=5))
    harness.engine.now = 8
    group.end_session(group.sessions[1])
    assert next_changes() == [
        {
            "index": 1,
            "state": "finished",
            "tokens": 9,
            "stop": 8,
            "turns": 2,
            "tool_seconds": 4,
            "tools": [(3, 7), (7, 8)],
        }
    ]

    group.cancel()
    update = viewer.next_update()
    assert (update["running"], update["candidates"]) == (0, 0)
    [shown] = update["groups"]
    assert (shown["ended"], shown["outcome"]) == (8, "cancelled")
    assert [row["state"] for row in shown["candidates"]] == ["discarded"] * 3
    assert viewer._running_fields == {}


async def test_groups_of_sessions_stand_among_other_groups_by_their_begin() -> None:
    harness = Harness(lengths(50))
    sessions = new_sessions(harness)
    monitor = new_monitor(harness, sessions, max_candidates=10)
    began: list[str] = []
    for number in range(4):
        harness.engine.now = number
        if number % 2:
            group = await start_sessions(sessions)
            began.insert(0, group.spec.group_id)
        else:
            harness.run(2, group_id=f"g{number}")
            began.insert(0, f"g{number}")
    await settle()
    update = Viewer(monitor, EVERYTHING).next_update()
    assert [group["group_id"] for group in update["groups"]] == began[:3], "three candidates each, and at most ten"
    assert (update["running"], update["candidates"]) == (4, 12)
    for group in sessions.running:
        group.cancel()
    await harness.engine.run()


async def test_sessions_are_shown_to_their_owner_and_to_admins() -> None:
    harness = Harness(lengths(1))
    sessions = new_sessions(harness)
    monitor = new_monitor(harness, sessions)
    mine = await start_sessions(sessions, owner="me")
    other = await start_sessions(sessions, owner="other")
    for may_see, expected in (
        (Caller("me").may_see, [mine]),
        (Caller("third").may_see, []),
        (EVERYTHING, [other, mine]),
    ):
        update = Viewer(monitor, may_see).next_update()
        assert [group["group_id"] for group in update["groups"]] == [group.spec.group_id for group in expected]
        assert update["running"] == 2, "the number tells nothing of the groups"
    for group in (mine, other):
        group.cancel()


async def test_merged_updates_of_sessions_equal_the_state_that_a_new_viewer_gets() -> None:
    rng = Random(5)
    harness = Harness(lengths(1))
    sessions = new_sessions(harness)
    monitor = new_monitor(harness, sessions)
    often, seldom = Viewer(monitor, EVERYTHING), Viewer(monitor, EVERYTHING)
    states: list[State] = [{}, {}]
    turns: list[SessionTurn] = []
    for step in range(300):
        harness.engine.now = step
        if step < 200 and step % 10 == 0:
            await start_sessions(sessions)
        idle = [each for group in sessions.running for each in group.sessions if not each.state.is_over]
        for session in rng.sample(idle, len(idle) // 2):
            if session.state.is_over:
                # The end of another session has stopped it.
                continue
            if not session.running:
                turns.append(begin_turn(session, rng.randrange(1, 9)))
            elif rng.random() < 0.3:
                session.group.end_session(session, reward=rng.random(), usable=rng.random() < 0.95)
        for turn in turns[: len(turns) // 2]:
            finish_turn(turn)
        del turns[: len(turns) // 2]
        merge(states[0], often.next_update())
        if rng.random() < 0.1:
            merge(states[1], seldom.next_update())
    for turn in turns:
        finish_turn(turn)
    for group in sessions.running:
        group.cancel()
    merge(states[0], often.next_update())
    merge(states[1], seldom.next_update())
    assert states[0] == states[1] == full_state(monitor)
    assert len(states[0]) == 20
    assert sum("tools" in row for group in states[0].values() for row in group["candidates"].values()) > 20


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
