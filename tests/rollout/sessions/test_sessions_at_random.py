"""Random sessions: selection against brute force on the lengths of all sessions, and weights that undo the selection.

Every session has a plan before it runs, so the length that a stopped session would have had is known.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import pytest

from darts_server.group.events import DeadlineSet
from darts_server.policy.shaping import Shaping
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.plan import UNSHAPED, Plan
from darts_server.rollout.sessions.session_group import AgentSession, SessionGroup, SessionGroupSpec, SessionTurn
from darts_server.types import FinishReason, Measure, Outcome, SessionEnd
from tests.rollout.helpers import Recorder
from tests.rollout.sessions.test_registry import SHAPINGS

pytestmark = pytest.mark.anyio
TICK = 0.125
"""Seconds in which a running turn generates a token. Sums of it are exact."""
Rng = np.random.Generator


@dataclass(slots=True)
class PlannedTurn:
    """``is_left``: whether the harness leaves the request, and sends it again. ``tool_ticks``: time after the turn."""

    tokens: int
    is_left: bool
    tool_ticks: int


@dataclass(slots=True)
class PlannedSession:
    """A session as its harness runs it. ``fails``: whether a tool fails in the end."""

    turns: list[PlannedTurn]
    fails: bool
    finish_reason: FinishReason
    reward: float
    number: int = 0
    generated: int = 0
    waits: int = 0
    turn: SessionTurn | None = None

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def milliseconds(self) -> int:
        ticks = self.tokens + sum(turn.tool_ticks for turn in self.turns[:-1])
        return int(1000 * TICK * ticks)


def plan_session(rng: Rng, failures: float) -> PlannedSession:
    turns = []
    for _ in range(int(rng.integers(1, 6))):
        tokens = 1 + int(rng.lognormal(1.0, 0.8))
        turns.append(PlannedTurn(tokens, bool(rng.random() < 0.1), int(rng.integers(0, 5))))
    reason = FinishReason.STOP if rng.random() < 0.9 else FinishReason.LENGTH
    return PlannedSession(turns, bool(rng.random() < failures), reason, float(rng.integers(2)))


@dataclass
class World:
    """A group of planned sessions on a clock in ticks."""

    rng: Rng
    policy: str
    size: int
    candidates: int
    measure: Measure = Measure.TOKENS
    failures: float = 0.0
    ticks: int = 0
    planned: list[PlannedSession] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)
    ends: list[SessionEnd] = field(default_factory=list)

    def __post_init__(self) -> None:
        shaping: Shaping = UNSHAPED if self.policy == "off" else SHAPINGS[self.policy]
        spec = SessionGroupSpec("g", Plan(self.policy, shaping, self.size), measure=self.measure)
        self.recorder.events.session_ended.add(lambda end, turns, seconds: self.ends.append(end))
        self.group = SessionGroup(
            spec,
            self.recorder.events,
            lambda: TICK * self.ticks,
            lambda: 0,
            self.new_session,
            lambda group: None,
            lambda session: True,
            (int(self.rng.integers(1 << 30)),),
        )
        self.group.open(Allocation(self.candidates))

    def new_session(self, group: SessionGroup, index: int) -> AgentSession:
        self.planned.append(plan_session(self.rng, self.failures))
        return AgentSession(group, index, f"session {index}", f"key {index}")

    def length(self, index: int) -> int:
        """Length of a session if it runs to its end."""
        planned = self.planned[index]
        return planned.tokens if self.measure is Measure.TOKENS else planned.milliseconds

    def run(self) -> None:
        """Run all sessions to their ends, in an order that changes from tick to tick."""
        while self.group.outcome is None:
            # A turn that begins in this tick has its first token at the next tick.
            running = list(zip(self.group.sessions, self.planned, strict=True))
            for place in self.rng.permutation(len(running)):
                self.begin(*running[place])
            self.ticks += 1
            for place in self.rng.permutation(len(running)):
                self.advance(*running[place])
            self.group.poll()

    def begin(self, session: AgentSession, planned: PlannedSession) -> None:
        if session.state.is_over or planned.waits or planned.turn is not None:
            return
        planned.turn = self.group.begin_turn(session, lambda: planned.generated, lambda: None)

    def advance(self, session: AgentSession, planned: PlannedSession) -> None:
        """Generate a token, or wait for a tool."""
        if session.state.is_over:
            self.leave(planned)
            return
        if planned.turn is None:
            planned.waits -= 1
            return
        planned.generated += 1
        turn = planned.turns[planned.number]
        if planned.generated < turn.tokens:
            return

        running = planned.turn
        planned.turn = None
        tokens = planned.generated
        planned.generated = 0
        if turn.is_left:
            running.leave(tokens)
        else:
            running.finish([1] * (planned.number + 1), [2] * tokens, [-1.0] * tokens)
        planned.waits = turn.tool_ticks
        planned.number += 1
        if planned.number < len(planned.turns) or session.state.is_over:
            return
        if planned.fails:
            self.group.end_session(session, usable=False)
        else:
            self.group.end_session(session, finish_reason=planned.finish_reason, reward=planned.reward)

    def leave(self, planned: PlannedSession) -> None:
        if planned.turn is not None:
            planned.turn.leave(planned.generated)
            planned.turn = None

    def check_books(self) -> None:
        """Every session has started and ended once, and none has more tokens than its plan."""
        for session, planned in zip(self.group.sessions, self.planned, strict=True):
            self.leave(planned)
            assert session.state.is_over
            assert not session.running
            assert session.tokens <= planned.tokens
            generated = sum(row.num_generated for row in session.state.rows)
            assert generated <= session.tokens
        assert self.recorder.started == len(self.group.sessions) == len(self.ends)
        (record,) = self.recorder.records
        assert "internal" not in (record.error or "")

    @property
    def selected(self) -> set[int]:
        return {session.index for session in self.group.sessions if session.candidate.selected_as is not None}

    @property
    def usable(self) -> list[int]:
        failed = (SessionEnd.FAILED, SessionEnd.SILENT)
        return [s.index for s in self.group.sessions if s.state.end_reason not in failed]


def worlds(policy: str, count: int, **more: object) -> Iterator[World]:
    rng = np.random.default_rng(7)
    for _ in range(count):
        size = int(rng.integers(2, 6))
        extra = 0 if policy in ("off", "cap") else int(rng.integers(1, 5))
        world = World(rng, policy, size, size + extra, **more)  # type: ignore[arg-type]
        yield world


@pytest.mark.parametrize("measure", Measure)
def test_uniform_selects_the_shortest_sessions_and_the_lowest_draws_of_the_others(measure: Measure) -> None:
    stopped = 0
    for world in worlds("uniform", 150, measure=measure):
        world.run()
        world.check_books()
        stopped += world.ends.count(SessionEnd.STOPPED)
        # A session that reached a limit of its harness is none of the shortest.
        valid = [index for index in world.usable if world.planned[index].finish_reason is FinishReason.STOP]
        short = sorted(valid, key=lambda index: (world.length(index), index))
        short = short[: world.group._group.rule.num_shortest]
        rest = sorted(set(world.usable) - set(short), key=lambda index: world.group.candidates[index].tail_draw)
        assert world.selected == {*short, *rest[: world.size - len(short)]}
    assert stopped > 100


@pytest.mark.parametrize("policy", ["off", "uniform", "darts", "darts_cut", "informative", "cap"])
def test_groups_of_every_policy_end_with_their_size_whatever_their_sessions_do(policy: str) -> None:
    completed = 0
    for world in worlds(policy, 80, failures=0.1):
        world.run()
        world.check_books()
        if world.group.outcome is Outcome.COMPLETED:
            completed += 1
            assert len(world.selected) == world.size
            assert world.selected <= set(world.usable)
    assert completed > 50


def test_cap_returns_all_sessions_and_cuts_each_at_the_deadline() -> None:
    cuts = 0
    for world in worlds("cap", 80):
        deadline = int(world.rng.integers(4, 25))
        world.group._handle_events(DeadlineSet(deadline, deadline))
        world.run()
        world.check_books()
        assert world.selected == set(range(world.size))
        (record,) = world.recorder.records
        for candidate in record.candidates:
            planned = world.planned[candidate.index]
            assert candidate.tokens == min(planned.tokens, deadline)
            assert candidate.cut == (planned.tokens > deadline)
            rows = world.group.sessions[candidate.index].state.rows
            assert sum(row.num_generated for row in rows) <= deadline
            cuts += candidate.cut
    assert cuts > 50


@pytest.mark.parametrize("measure", Measure)
@pytest.mark.parametrize("failures", [0.0, 0.15])
def test_weighted_lengths_are_those_of_all_sessions(measure: Measure, failures: float) -> None:
    errors = []
    for world in worlds("uniform", 600, measure=measure, failures=failures):
        world.run()
        if world.group.outcome is not Outcome.COMPLETED:
            continue
        weighted = 0.0
        weights = 0.0
        for index in world.selected:
            weight, _ = world.group.weights_of(world.group.sessions[index])
            assert weight is not None
            weighted += weight * world.length(index)
            weights += weight
        assert weights == pytest.approx(len(world.usable))
        errors.append((weighted - sum(world.length(index) for index in world.usable)) / len(world.usable))
    z = np.mean(errors) / (np.std(errors) / sqrt(len(errors)))
    assert len(errors) > 400
    assert np.std(errors) > 0.1, "the selection leaves sessions out"
    assert abs(z) < 3
