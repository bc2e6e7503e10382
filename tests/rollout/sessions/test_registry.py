"""Groups of sessions, from their creation to the last request after the end."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from darts_server.caller import Caller, caller
from darts_server.engine.scripted import Script
from darts_server.exceptions import (
    Conflict,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuotaReached,
    ServerStopping,
    SessionOver,
    TooLarge,
    Unauthorized,
)
from darts_server.group.events import DeadlineSet
from darts_server.group.informative import Select
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, build_policies
from darts_server.rollout.plan import Limits, Planner
from darts_server.rollout.sessions import registry as registry_module
from darts_server.rollout.sessions import session_group as session_group_module
from darts_server.rollout.sessions.registry import SessionGroupRequest, SessionRegistry
from darts_server.rollout.sessions.session_group import (
    MAX_RUNNING_TURNS,
    AgentSession,
    SessionGroup,
    SessionTurn,
)
from darts_server.types import DiscardReason, FinishReason, Measure, Outcome, SelectedAs, SessionEnd
from tests.rollout.helpers import Harness, Recorder

pytestmark = pytest.mark.anyio
SHAPINGS = build_policies(
    Shaping(redundancy=1.5), Deadline(), informative=Shaping(redundancy=2.0, select=Select.INFORMATIVE)
)


class World:
    """A registry on a clock that tests set, and what its observers see."""

    def __init__(self, idle_seconds: float = 100.0, kept_bytes: int = 1 << 20) -> None:
        self.now = 0.0
        self.harness = Harness(lambda _, __: Script(1), SHAPINGS)
        self.recorder = Recorder(self.harness.rollouts.observers)
        self.ends: list[SessionEnd] = []
        self.refused = 0
        self.harness.rollouts.observers.session_ended.add(lambda end, turns, seconds: self.ends.append(end))
        self.harness.rollouts.observers.session_request_refused.add(self.count_refusal)
        self.registry = SessionRegistry(self.harness.rollouts, idle_seconds, kept_bytes, lambda: self.now)
        self.generated: dict[SessionTurn, int] = {}
        self.aborted: list[SessionTurn] = []

    def count_refusal(self) -> None:
        self.refused += 1

    async def create(
        self, size: int = 2, extra: int | None = 1, policy: str = "uniform", **more: object
    ) -> SessionGroup:
        return await self.registry.create(SessionGroupRequest(size, extra, policy, "p", **more))  # type: ignore[arg-type]

    def begin(self, session: AgentSession) -> SessionTurn:
        turn: SessionTurn

        def generated() -> int:
            return self.generated.get(turn, 0)

        turn = session.group.begin_turn(session, generated, lambda: self.aborted.append(turn))
        return turn

    def answer(self, session: AgentSession, tokens: int) -> None:
        turn = self.begin(session)
        turn.finish([1], [2] * tokens, [-1.0] * tokens)

    def finish(self, session: AgentSession, tokens: int, reward: float | None = None) -> None:
        if tokens:
            self.answer(session, tokens)
        session.group.end_session(session, reward=reward)


@pytest.fixture
def world() -> World:
    return World()


@contextmanager
def as_caller(who: Caller) -> Iterator[None]:
    token = caller.set(who)
    try:
        yield
    finally:
        caller.reset(token)


async def test_a_session_that_is_longer_than_needed_is_stopped_in_its_turn(world: World) -> None:
    # One of two places is for the shortest session, the other for the session with the lower tail draw.
    group = await world.create(size=2, extra=2)
    draws = [candidate.tail_draw for candidate in group.candidates]
    order = sorted(range(4), key=lambda index: draws[index])
    turns = {index: world.begin(group.sessions[index]) for index in range(4)}
    for index in order[1:]:
        world.generated[turns[index]] = 50
    world.generated[turns[order[0]]] = 60
    shortest = order[1]
    turns[shortest].finish([1], [2] * 10, [-1.0] * 10)
    group.end_session(group.sessions[shortest], reward=1.0)
    group.poll()
    # The shortest is certain, and the tail's draws are known: two sessions can win no place.
    assert {turn.session.index for turn in world.aborted} == set(order[2:])
    assert all(turn.is_stopped for turn in world.aborted)
    for turn in world.aborted:
        turn.leave(50)
        with pytest.raises(SessionOver, match="stopped") as error:
            world.begin(turn.session)
        assert error.value.status == 410
    assert world.refused == 2
    assert group.outcome is None

    turns[order[0]].finish([1], [2] * 60, [-1.0] * 60)
    group.end_session(group.sessions[order[0]], reward=0.0)
    assert group.outcome is Outcome.COMPLETED
    (record,) = world.recorder.records
    assert [c.tokens for c in record.candidates if c.selected_as is not None] == sorted(
        [10, 60], key=lambda tokens: tokens == (10 if shortest > order[0] else 60)
    )
    assert record.candidates[shortest].weight == 1.0
    assert record.candidates[order[0]].weight == 3.0
    assert [c.reason for c in record.candidates].count(DiscardReason.TAIL_PRUNED) == 2
    assert sorted(returned.index for returned in world.recorder.returned) == sorted([shortest, order[0]])
    assert not group.sessions[order[2]].state.rows


async def test_a_group_that_is_complete_is_not_cancelled(world: World) -> None:
    group = await world.create(size=1, extra=0, policy="off")
    world.finish(group.sessions[0], 3)
    group.cancel()
    assert group.outcome is Outcome.COMPLETED
    assert group.error is None


async def test_events_tell_the_harness_of_starts_stops_and_the_end(world: World) -> None:
    group = await world.create(size=1, extra=0, policy="off")
    waiting = asyncio.create_task(group.wait_for_events(1, 10.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    world.finish(group.sessions[0], 3)
    await waiting
    assert [event.kind for event in group.events] == ["started", "ended", "completed"]
    await group.wait_for_events(3, 0.01)


async def test_an_unusable_session_is_replaced(world: World) -> None:
    group = await world.create(size=2, extra=0, policy="off")
    group.end_session(group.sessions[0], usable=False)
    assert len(group.sessions) == 3
    world.finish(group.sessions[1], 3)
    world.finish(group.sessions[2], 4)
    assert group.outcome is Outcome.COMPLETED
    assert [session.candidate.selected_as for session in group.sessions] == [None, SelectedAs.SHORT, SelectedAs.SHORT]
    assert world.ends == [SessionEnd.FAILED, SessionEnd.FINISHED, SessionEnd.FINISHED]


async def test_a_group_whose_sessions_all_fail_gives_up(world: World) -> None:
    group = await world.create(size=1, extra=0, policy="off")
    for index in range(2):
        group.end_session(group.sessions[index], usable=False)
    assert group.outcome is Outcome.FAILED
    assert group.events[-1].kind == "failed"
    assert "unusable" in (group.events[-1].reason or "")


async def test_silent_sessions_end_and_tools_may_take_long(world: World) -> None:
    group = await world.create(size=2, extra=0, policy="off")
    quiet, busy = group.sessions
    world.answer(quiet, 3)
    turn = world.begin(busy)
    world.now = 99.0
    group.end_silent(100.0)
    assert world.ends == []
    world.now = 101.0
    group.end_silent(100.0)
    assert world.ends == [SessionEnd.SILENT]
    assert quiet.state.is_over
    turn.leave(0)
    with pytest.raises(SessionOver, match="silent"):
        world.begin(quiet)


async def test_a_session_that_takes_the_place_of_another_in_an_old_group_is_not_silent(world: World) -> None:
    group = await world.create(size=2, extra=0, policy="off")
    failing, busy = group.sessions
    turn = world.begin(busy)
    world.now = 200.0
    group.end_session(failing, usable=False)
    world.now = 299.0
    group.end_silent(100.0)
    assert [session.state.is_over for session in group.sessions] == [True, False, False]
    world.now = 301.0
    group.end_silent(100.0)
    assert group.sessions[2].state.is_over
    turn.leave(0)


async def test_a_group_of_one_session_has_its_own_size_on_a_server_with_a_group_size(world: World) -> None:
    rollouts = world.harness.rollouts
    rollouts.planner = Planner(SHAPINGS, "uniform", Limits(group_size=8))
    for extra in (None, 0):
        group = await world.create(size=1, extra=extra)
        assert (group.size, len(group.sessions)) == (1, 1)


async def test_the_registry_polls_progress_and_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "IDLE_CHECK_SECONDS", 0.0)
    world = World(idle_seconds=0.5)
    group = await world.create(size=1, extra=0, policy="off")
    world.now = 1.0
    async with asyncio.timeout(5):
        while group.outcome is None:
            world.now += 1.0
            await asyncio.sleep(0.01)
    assert group.outcome is Outcome.FAILED
    await asyncio.sleep(0.05)
    # The poller has ended with the last group, and begins again with the next group.
    group = await world.create(size=1, extra=0, policy="off")
    group.cancel()


async def test_sessions_are_compared_by_seconds_if_asked(world: World) -> None:
    group = await world.create(size=2, extra=1, measure=Measure.SECONDS)
    order = sorted(group.sessions, key=lambda session: session.candidate.tail_draw)
    turns = {session: world.begin(session) for session in order}
    world.now = 4.0
    # The session with the most tokens is the fastest.
    turns[order[1]].finish([1], [2] * 100, [-1.0] * 100)
    group.end_session(order[1])
    group.poll()
    # A running session that has taken as many seconds may end now, and the session with the lower index wins a tie.
    if order[2].index < order[1].index:
        assert world.aborted == []
    world.now = 4.01
    group.poll()
    assert [turn.session for turn in world.aborted] == [order[2]]
    turns[order[0]].finish([1], [2], [-1.0])
    group.end_session(order[0])
    (record,) = world.recorder.records
    assert sorted(c.tokens for c in record.selected) == [1, 100], "records have tokens, whatever is compared"


async def test_rewards_come_with_the_end_and_may_follow_for_a_cut_session(world: World) -> None:
    rewards: list[tuple[int, float, bool]] = []
    world.harness.rollouts.observers.trajectory_verified.add(
        lambda key, index, reward, correct: rewards.append((index, reward, correct))
    )
    group = await world.create(size=2, extra=0, policy="off")
    world.finish(group.sessions[0], 3, reward=0.5)
    group.end_session(group.sessions[1], reward=-1.0, metadata=b'{"seen":1}', finish_reason=FinishReason.LENGTH)
    assert rewards == [(0, 0.5, True), (1, -1.0, False)]
    assert group.sessions[1].metadata == b'{"seen":1}'
    with pytest.raises(Conflict, match="ended already"):
        group.end_session(group.sessions[0])


async def test_a_deadline_cuts_sessions_in_any_turn(world: World) -> None:
    group = await world.create(size=2, extra=None, policy="cap")
    first, second = group.sessions
    world.answer(first, 5)
    turn = world.begin(second)
    world.generated[turn] = 12
    group._handle_events(DeadlineSet(10, 10))
    group.poll()
    assert world.aborted == [turn]
    assert second.state.end_reason is SessionEnd.STOPPED
    # The request returns a token more than the deadline allows.
    turn.finish([1], [2] * 13, [-1.0] * 13)
    assert second.state.rows[0].num_generated == 10
    group.end_session(first)
    assert group.outcome is Outcome.COMPLETED
    (record,) = world.recorder.records
    assert [c.tokens for c in record.candidates] == [5, 10]
    assert [c.cut for c in record.candidates] == [False, True]
    # The harness gives the cut session its reward.
    group.end_session(second, reward=1.0)
    assert second.reward == 1.0


async def test_deadlines_of_sessions_are_learned_apart_from_those_of_other_groups(world: World) -> None:
    group = await world.create(size=2, extra=None, policy="cap")
    for session in group.sessions:
        world.finish(session, 40)
    assert group.policy == "cap"
    (record,) = world.recorder.records
    assert record.policy == "cap:sessions"
    deadlines = world.harness.rollouts.allocator.deadlines
    assert deadlines.load_recent_lengths("cap:sessions/2").state == [40]
    assert deadlines.load_recent_lengths("cap/2").state == []


async def test_informative_selects_by_the_rewards_of_ends(world: World) -> None:
    group = await world.create(size=2, extra=2, policy="informative")
    for index, session in enumerate(group.sessions):
        world.finish(session, 3, reward=float(index == 0))
    assert group.outcome is Outcome.COMPLETED
    selected = [session for session in group.sessions if session.candidate.selected_as is not None]
    assert len(selected) == 2
    assert group.sessions[0] in selected, "its advantage is the largest"
    weight, advantage = group.weights_of(group.sessions[0])
    assert weight == pytest.approx(1.0)
    assert advantage == pytest.approx(0.75)


async def test_a_harness_that_ends_a_session_does_not_wait_for_its_requests(world: World) -> None:
    group = await world.create(size=1, extra=0, policy="off")
    turn = world.begin(group.sessions[0])
    world.generated[turn] = 7
    group.end_session(group.sessions[0])
    assert world.aborted == [turn]
    (record,) = world.recorder.records
    assert record.candidates[0].tokens == 7
    turn.leave(9)
    turn.finish([1], [2], [-1.0])
    assert group.sessions[0].state.tokens == 7, "what comes later changes nothing"


async def test_a_cancelled_group_aborts_its_sessions(world: World) -> None:
    group = await world.create(size=2, extra=1)
    turn = world.begin(group.sessions[0])
    group.cancel()
    assert group.outcome is Outcome.CANCELLED
    assert world.aborted == [turn]
    assert world.ends == [SessionEnd.ABORTED] * 3
    group.cancel()
    # A harness may still end its sessions.
    group.end_session(group.sessions[0], reward=1.0)
    turn.leave(4)
    await group.sessions[0].wait_for_last_tokens()


async def test_weight_versions_are_those_of_the_tokens(world: World) -> None:
    group = await world.create(size=1, extra=0, policy="off")
    session = group.sessions[0]
    world.answer(session, 2)
    turn = world.begin(session)
    world.generated[turn] = 3
    world.harness.rollouts.prepare_weight_change()
    world.harness.engine.weight_version += 1
    turn.finish([1, 2, 2, 5], [6] * 4, [-1.0] * 4)
    group.end_session(session)
    (record,) = world.recorder.records
    assert record.candidates[0].version_spans == ((0, 5), (1, 1))
    assert session.state.rows[0].spans == ((0, 5), (1, 1))
    assert record.mixed_versions


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (SessionGroupRequest(8, 4, "off"), "extra"),
        (SessionGroupRequest(8, 4, "cap"), "extra"),
        (SessionGroupRequest(1, 4, "uniform"), "extra"),
        (SessionGroupRequest(62, 4, "uniform"), "extra"),
        (SessionGroupRequest(1025, 4, "uniform"), "size"),
        (SessionGroupRequest(8, 4, "nonsense"), "policy"),
    ],
)
async def test_wrong_requests_start_nothing(world: World, request_: SessionGroupRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        await world.registry.create(request_)
    assert error.value.field == field
    assert world.recorder.started == 0


async def test_the_number_of_open_sessions_is_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_OPEN_SESSIONS", 5)
    group = await world.create(size=2, extra=1)
    with pytest.raises(Overloaded, match="3 sessions are open"):
        await world.create(size=2, extra=1)
    assert world.registry.num_open == 3
    group.cancel()
    assert world.registry.num_open == 0
    await world.create(size=2, extra=1)


async def test_a_key_leaves_as_many_open_sessions_to_other_keys_as_it_has(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "MAX_OPEN_SESSIONS", 12)
    alice = Caller("alice")
    bob = Caller("bob")
    with as_caller(alice):
        groups = [await world.create(size=2, extra=1), await world.create(size=2, extra=1)]
        with pytest.raises(QuotaReached, match="this key has 6 open sessions, and 3 more would leave only 3") as error:
            await world.create(size=2, extra=1)
    assert error.value.retry_after is not None
    with as_caller(bob):
        groups.append(await world.create(size=2, extra=1))
        with pytest.raises(QuotaReached, match="this key has 3 open sessions"):
            await world.create(size=2, extra=1)
    # Alice has more than her share since Bob came, and loses no session.
    assert world.registry.num_open == 9
    with as_caller(alice):
        with pytest.raises(QuotaReached):
            await world.create(size=1, extra=0, policy="off")
        groups[0].cancel()
        groups.append(await world.create(size=1, extra=0, policy="off"))
    # Callers without a key are not told apart, and admins have no share.
    groups.append(await world.create(size=2, extra=0, policy="off"))
    with as_caller(Caller("root", is_admin=True)):
        groups.append(await world.create(size=2, extra=0, policy="off"))
    with pytest.raises(Overloaded, match="11 sessions are open"):
        await world.create(size=2, extra=0, policy="off")
    for group in groups:
        group.cancel()
    assert world.registry.num_open == world.registry._num_running.total() == 0
    with as_caller(alice):
        await world.create(size=4, extra=2)


def rewrite(world: World, session: AgentSession, tokens: int) -> None:
    """Answer a turn whose prompt of ``tokens`` tokens shares nothing with earlier turns."""
    turn = world.begin(session)
    turn.finish([1000 * session.state.turns + place for place in range(tokens)], [2], [-1.0])


@pytest.mark.parametrize("over_status", [410, 200])
async def test_a_session_that_rewrites_its_history_too_often_fails_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, over_status: int
) -> None:
    monkeypatch.setattr(session_group_module, "MAX_ROW_TOKENS", 100)
    group = await world.create(size=2, extra=0, policy="off", over_status=over_status)
    other_group = await world.create(size=1, extra=0, policy="off")
    rewriting, extending = group.sessions
    for session in (extending, other_group.sessions[0]):
        world.answer(session, 3)
    for _ in range(10):
        rewrite(world, rewriting, 9)
    running = [rewriting, extending]
    assert [session.state.row_tokens for session in running] == [100, 4]
    if over_status == 200:
        with pytest.raises(SessionOver, match="is failed"):
            world.begin(rewriting)
    else:
        with pytest.raises(TooLarge, match="its rows have 100 tokens, and the limit is 100; let turns extend") as error:
            world.begin(rewriting)
        assert error.value.field == "session"
    assert world.refused == 0
    with pytest.raises(SessionOver, match="is failed"):
        world.begin(rewriting)
    assert world.refused == 1

    # Another session takes the place of the failed session, and all others run on.
    assert rewriting.state.end_reason is SessionEnd.FAILED
    assert "its rows have 100 tokens" in (group.events[2].reason or "")
    assert (rewriting.state.rows, rewriting.state.row_tokens) == ([], 0)
    assert world.ends == [SessionEnd.FAILED]
    world.finish(extending, 4)
    world.finish(group.sessions[2], 4)
    world.finish(other_group.sessions[0], 4)
    assert group.outcome is Outcome.COMPLETED
    assert [record.outcome for record in world.recorder.records] == [Outcome.COMPLETED] * 2
    assert [candidate.reason for candidate in group.candidates] == [DiscardReason.FAILED, None, None]
    assert world.registry.num_open == 0


async def test_the_running_turns_of_a_session_with_too_many_tokens_are_aborted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_group_module, "MAX_ROW_TOKENS", 10)
    group = await world.create(size=1, extra=0, policy="off")
    session = group.sessions[0]
    running = world.begin(session)
    world.generated[running] = 5
    rewrite(world, session, 9)
    with pytest.raises(TooLarge):
        group.check_turn(session)
    assert world.aborted == [running]
    assert not running.is_stopped
    running.finish([1], [2] * 5, [-1.0] * 5)
    assert (session.tokens, session.state.rows, session.running) == (6, [], {})


async def test_at_the_memory_limit_only_sessions_with_more_than_an_even_share_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_module, "IDLE_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(registry_module, "MAX_RUNNING_BYTES", 40_000)
    world = World(idle_seconds=1e9)
    with as_caller(Caller("alice")):
        group = await world.create(size=2, extra=0, policy="off")
    with as_caller(Caller("bob")):
        other_group = await world.create(size=2, extra=0, policy="off")
    large, larger = group.sessions
    for session in other_group.sessions:
        rewrite(world, session, 250)
    for session in group.sessions:
        for _ in range(3 * (1 + session.index)):
            rewrite(world, session, 1000)
    assert group.size_bytes + other_group.size_bytes > 40_000
    world.begin(large).leave(0)
    async with asyncio.timeout(30):
        while not world.registry._running_bytes:
            world.now += 1.0
            await asyncio.sleep(0.01)

    # Sessions of other groups go on, and so does the second large session, because the memory is enough now.
    for session in other_group.sessions:
        rewrite(world, session, 250)
    with pytest.raises(TooLarge, match="more than its share of the memory") as error:
        world.begin(larger)
    assert error.value.field == "session"
    assert world.ends == [SessionEnd.FAILED]
    rewrite(world, large, 250)
    assert group.size_bytes + other_group.size_bytes < 40_000
    for each in (group, other_group):
        each.cancel()
    async with asyncio.timeout(30):
        while world.registry._polling is not None:
            await asyncio.sleep(0.01)
    assert world.registry._running_bytes == 0


async def test_a_session_runs_a_limited_number_of_requests_at_a_time(world: World) -> None:
    group = await world.create(size=1, extra=0, policy="off")
    for _ in range(MAX_RUNNING_TURNS):
        world.begin(group.sessions[0])
    with pytest.raises(Conflict, match="running requests"):
        world.begin(group.sessions[0])


async def test_sessions_belong_to_the_key_that_created_them(world: World) -> None:
    with as_caller(Caller("alice")):
        group = await world.create()
    session = group.sessions[0]
    with as_caller(Caller("bob")):
        with pytest.raises(NotFound):
            world.registry.find_named(session.session_id)
        with pytest.raises(NotFound):
            world.registry.find(session.session_id)
        with pytest.raises(NotFound):
            world.registry.find_group(group.spec.group_id)
    with as_caller(Caller("alice")):
        assert world.registry.find(session.session_id) is session
        assert world.registry.find_named(session.session_id) is session
        assert world.registry.find_named("another name") is None
        assert world.registry.find_named(None) is None
    assert world.registry.owner_of_key(session.api_key.encode()) == ("alice", session.session_id)
    assert world.registry.owner_of_key(b"a key of the server") is None
    other = group.sessions[1]
    with as_caller(Caller("alice", session=session.session_id)):
        assert world.registry.find_named(None) is session
        assert world.registry.find_named("the harness's own name") is session
        # The key of one session gives no access to another session.
        with pytest.raises(Conflict, match="both named"):
            world.registry.find_named(other.session_id)
        with pytest.raises(NotFound):
            world.registry.find(other.session_id)


async def test_ended_groups_can_be_read_until_they_are_dropped() -> None:
    world = World(kept_bytes=100)
    first = await world.create(size=1, extra=0, policy="off")
    world.finish(first.sessions[0], 3)
    assert world.registry.find_group(first.spec.group_id) is first
    second = await world.create(size=1, extra=0, policy="off")
    world.finish(second.sessions[0], 10)
    with pytest.raises(NotFound):
        world.registry.find(first.sessions[0].session_id)
    with pytest.raises(Unauthorized, match="no session"):
        world.registry.owner_of_key(first.sessions[0].api_key.encode())
    assert world.registry.find(second.sessions[0].session_id) is second.sessions[0]


async def test_every_session_ends_once_whatever_happens(world: World) -> None:
    rng = np.random.default_rng(3)
    groups = []
    for policy in ("uniform", "darts_cut", "informative"):
        for _ in range(60):
            groups.append(await world.create(size=3, extra=2, policy=policy))
    open_turns: list[SessionTurn] = []
    for _ in range(20_000):
        alive = [group for group in groups if group.outcome is None]
        if not alive:
            break
        group = alive[int(rng.integers(len(alive)))]
        session = group.sessions[int(rng.integers(len(group.sessions)))]
        world.now += 0.01
        try:
            match int(rng.integers(12)):
                case 0 | 1 | 2 | 3:
                    turn = world.begin(session)
                    world.generated[turn] = int(rng.integers(20))
                    open_turns.append(turn)
                case 4 | 5 | 6 if open_turns:
                    turn = open_turns.pop(int(rng.integers(len(open_turns))))
                    tokens = world.generated[turn]
                    turn.finish([1], [2] * tokens, [-1.0] * tokens)
                case 7 if open_turns:
                    open_turns.pop().leave(3)
                case 8 | 9:
                    group.end_session(session, reward=float(rng.integers(2)))
                case 10:
                    group.end_session(session, usable=bool(rng.integers(4)))
                case _:
                    group.poll()
        except (SessionOver, Conflict):
            pass
    for group in groups:
        group.cancel()
    for turn in open_turns:
        turn.leave(0)
    sessions = [session for group in groups for session in group.sessions]
    assert world.recorder.started == len(sessions) == len(world.ends)
    assert all(session.state.is_over and not session.running for session in sessions)
    assert len(world.recorder.records) == len(groups)
    for group in groups:
        assert group.record is not None
        if group.outcome is Outcome.COMPLETED:
            assert len(group.record.selected) == 3
        assert group.error is None or "internal" not in str(group.error)


async def test_a_url_with_another_keys_session_names_no_session(world: World) -> None:
    with as_caller(Caller("alice")):
        group = await world.create()
    session = group.sessions[0]
    with as_caller(Caller("bob", session=session.session_id)):
        with pytest.raises(NotFound):
            world.registry.find_named()
        with pytest.raises(NotFound):
            world.registry.find(session.session_id)
    with as_caller(Caller("root", is_admin=True, session=session.session_id)):
        assert world.registry.find_named() is session


async def test_names_that_lie_are_refused_and_a_harness_may_have_names_of_its_own(world: World) -> None:
    with as_caller(Caller("alice")):
        group = await world.create()
    first, second = group.sessions[:2]
    with as_caller(Caller("alice")):
        assert world.registry.find_named("my name", second.session_id) is second
        assert world.registry.find_named(first.session_id, first.session_id) is first
        with pytest.raises(Conflict, match="both named"):
            world.registry.find_named(first.session_id, second.session_id)
        # An id of ours that is dropped must not run as a request outside of any session.
        with pytest.raises(NotFound):
            world.registry.find_named("ses-" + "0" * 24)
        assert world.registry.find_named("ses-of-mine") is None
    with as_caller(Caller("alice", session=first.session_id)), pytest.raises(Conflict, match="both named"):
        world.registry.find_named(second.session_id)
    with as_caller(Caller("bob")), pytest.raises(NotFound):
        world.registry.find_named(first.session_id)


async def test_the_same_end_may_come_again_and_another_end_is_refused(world: World) -> None:
    rewards: list[float] = []
    world.harness.rollouts.observers.trajectory_verified.add(lambda key, index, reward, correct: rewards.append(reward))
    group = await world.create(size=1, extra=0, policy="off")
    session = group.sessions[0]
    world.answer(session, 3)
    group.end_session(session, reward=0.5)
    group.end_session(session, reward=0.5)
    with pytest.raises(Conflict, match="ended already"):
        group.end_session(session, reward=1.0)
    assert (session.reward, session.correct, rewards) == (0.5, True, [0.5])
    # The same holds for a session that the server has stopped.
    group = await world.create(size=1, extra=0, policy="off")
    group.cancel()
    group.end_session(group.sessions[0], reward=0.0)
    with pytest.raises(Conflict, match="ended already"):
        group.end_session(group.sessions[0])
    assert (group.sessions[0].reward, group.sessions[0].correct) == (0.0, False)


async def test_the_tokens_of_a_session_never_decrease(world: World) -> None:
    # The engine forgets the count of a request that its caller has left, and the group may have acted on the count.
    group = await world.create(size=2, extra=2)
    session = group.sessions[0]
    turn = world.begin(session)
    world.generated[turn] = 50
    group.poll()
    assert session.tokens == 50
    world.generated[turn] = 0
    assert session.tokens == 50
    turn.leave(0)
    assert session.tokens == 50
    assert session.state.turns == 0
    turn = world.begin(session)
    world.generated[turn] = 4
    turn.leave(7)
    assert session.tokens == 57
    # The engine of this request is lost. Another engine begins it again, and its answer is shorter.
    turn = world.begin(session)
    world.generated[turn] = 8
    assert session.tokens == 65
    world.generated[turn] = 0
    turn.finish([1], [2] * 3, [-1.0] * 3)
    assert session.tokens == 65
    assert session.state.rows[0].num_generated == 3


async def test_a_turn_learns_at_once_that_its_session_has_ended(world: World) -> None:
    group = await world.create(size=1, extra=0, policy="off")
    turn = world.begin(group.sessions[0])
    assert not turn.session_ended.is_set()
    group.end_session(group.sessions[0])
    assert turn.session_ended.is_set()
    assert not turn.is_stopped
    group = await world.create(size=1, extra=0, policy="off")
    turn = world.begin(group.sessions[0])
    group.cancel()
    assert turn.session_ended.is_set()
    assert turn.is_stopped


async def test_metadata_counts_in_the_memory_of_ended_groups() -> None:
    world = World(kept_bytes=100)
    first = await world.create(size=1, extra=0, policy="off")
    first.end_session(first.sessions[0], metadata=b"a" * 60)
    assert first.size_bytes == 60
    second = await world.create(size=1, extra=0, policy="off", metadata=b"a" * 60)
    second.end_session(second.sessions[0])
    with pytest.raises(NotFound):
        world.registry.find(first.sessions[0].session_id)


async def test_deadlines_in_tokens_do_not_cut_sessions_by_seconds(world: World) -> None:
    with pytest.raises(InvalidRequest, match="learned in tokens") as error:
        await world.create(size=2, extra=None, policy="cap", measure=Measure.SECONDS)
    assert error.value.field == "measure"


async def test_all_groups_end_with_the_error_of_a_server_that_stops(world: World) -> None:
    groups = [await world.create(), await world.create()]
    turn = world.begin(groups[0].sessions[0])
    world.registry.fail_all(ServerStopping("the server is stopping", 30))
    for group in groups:
        assert (group.events[-1].kind, group.events[-1].reason) == ("cancelled", "the server is stopping")
    assert world.aborted == [turn]
    assert world.registry.num_open == 0


async def test_a_session_that_waits_for_its_tool_may_end_with_the_tokens_that_it_has(world: World) -> None:
    # Two places of three are for the shortest. The session with 4 tokens must count as one of them while it may end.
    group = await world.create(size=3, extra=1)
    order = sorted(group.sessions, key=lambda session: session.candidate.tail_draw)
    lowest, tied, last, first = order
    world.finish(first, 2)
    world.answer(tied, 4)
    world.answer(lowest, 6)
    world.finish(last, 4 if tied.index < last.index else 5)
    assert not tied.state.is_over
    assert not lowest.state.is_over, "it has the lowest draw of those that are not among the shortest"
    world.finish(tied, 0)
    world.finish(lowest, 1)
    assert tied.candidate.selected_as is SelectedAs.SHORT
    assert {session.index for session in order if session.candidate.selected_as} == {
        first.index,
        tied.index,
        lowest.index,
    }


async def test_a_session_without_a_turn_is_the_shortest(world: World) -> None:
    group = await world.create(size=2, extra=1)
    order = sorted(group.sessions, key=lambda session: session.candidate.tail_draw)
    world.answer(order[0], 5)
    world.finish(order[2], 0)
    # If no other session can tie, the shortest is certain, and the session with the lower draw wins the tail.
    if not order[1].state.is_over:
        world.finish(order[1], 1)
    world.finish(order[0], 1)
    assert group.outcome is Outcome.COMPLETED
    (record,) = world.recorder.records
    assert record.candidates[order[2].index].tokens == 0
