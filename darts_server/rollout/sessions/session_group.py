"""Feed a group's state machine with the turns and ends of its sessions, and stop sessions that are not needed.

A trainer's harness runs the sessions. It learns from events which sessions start and stop.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus

import numpy as np

from darts_server.exceptions import Conflict, DartsError, GroupAborted, SessionFailed, SessionOver, TooLarge
from darts_server.group.candidate import Candidate
from darts_server.group.events import (
    Complete,
    Cut,
    DeadlineSet,
    Decision,
    Event,
    Failed,
    Finished,
    GiveUp,
    Progress,
    Rewarded,
    Start,
    Started,
    Stop,
)
from darts_server.group.group import Group, advantages, selection_weights
from darts_server.group.session import FinishedTurn, Session
from darts_server.observers import GroupEvents
from darts_server.records import (
    CandidateRecord,
    GroupRecord,
    TrajectoryRecord,
    VersionSpans,
    append_spans,
    extend_spans,
)
from darts_server.rollout.allocation.cohort import Allocation, CohortMember
from darts_server.rollout.group_record import make_group_record
from darts_server.rollout.plan import Plan
from darts_server.types import DiscardReason, FinishReason, Measure, Outcome, SessionEnd

logger = logging.getLogger(__name__)

MILLISECONDS = 1000
"""Length units per second of sessions that are compared by seconds."""
MAX_RUNNING_TURNS = 64
"""Requests of one session at a time: more than a harness with a few subagents needs."""
MAX_ROW_TOKENS = 1 << 24
"""Tokens of a session's rows: 256 turns that each rewrite 65,536 tokens, in 200 MB of JSON."""
SETTLE_SECONDS = 10.0
"""Aborted requests return their tokens after one decode step, on a busy engine after some seconds."""


class StoppedAs(StrEnum):
    """Finish reason of the turn in which a session is stopped."""

    ABORT = "abort"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SessionGroupSpec:
    """``metadata``: the caller's JSON. ``over_status``: HTTP status of turns after the session has been stopped."""

    group_id: str
    plan: Plan
    prompt_key: str | None = None
    owner: str | None = None
    measure: Measure = Measure.TOKENS
    metadata: bytes | None = None
    stopped_as: StoppedAs = StoppedAs.ABORT
    over_status: int = 410


@dataclass(frozen=True, slots=True)
class SessionReport:
    """How a harness ends a session.

    ``usable``: False for a session whose tool failed. ``correct``: None for whether the reward is above 0.
    """

    usable: bool = True
    finish_reason: FinishReason = FinishReason.STOP
    reward: float | None = None
    correct: bool | None = None
    metadata: bytes | None = None


class SessionTurn:
    """A running request of a session. It must `finish` or `leave`."""

    def __init__(self, session: "AgentSession", count_tokens: Callable[[], int], abort: Callable[[], None]) -> None:
        self.session = session
        self._count_on_engine = count_tokens
        self._most_counted = 0
        self._abort_on_engine = abort
        self.spans: VersionSpans = ()
        """Versions of the tokens before the latest weight update."""
        self.is_stopped = False
        """Whether the server has stopped the session."""
        self.session_ended = asyncio.Event()
        self._is_over = False

    def count_tokens(self) -> int:
        # A lost engine counts fewer tokens, but the group may have acted on the larger number.
        self._most_counted = max(self._most_counted, self._count_on_engine())
        return self._most_counted

    def abort(self, *, is_stopped: bool) -> None:
        """Stop the request, because its session has ended."""
        self.is_stopped = is_stopped
        self.session_ended.set()
        self._abort_on_engine()

    def finish(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """End the request with an answer."""
        spans = extend_spans(self.spans, self.session.group.weight_version(), len(token_ids))
        # A lost engine may have counted more tokens than the answer has, see `count_tokens`.
        tokens = max(len(token_ids), self._most_counted)
        self._end(tokens, FinishedTurn(prompt_token_ids, token_ids, logprobs, spans))

    def leave(self, tokens: int) -> None:
        """End a running request without an answer. ``tokens``: number of received tokens."""
        if not self._is_over:
            tokens = max(tokens, self.count_tokens())
            self.spans = extend_spans(self.spans, self.session.group.weight_version(), tokens)
            self._end(tokens, None)

    def _end(self, tokens: int, finished: FinishedTurn | None) -> None:
        # The end of the session may have ended the request before.
        if not self._is_over:
            self._is_over = True
            self.session.group.end_turn(self, tokens, finished)


class AgentSession:
    """A session, as its harness sees it. ``api_key``: valid for turns of this session alone."""

    def __init__(
        self,
        group: "SessionGroup",
        index: int,
        session_id: str,
        api_key: str,
    ) -> None:
        self.group = group
        self.session_id = session_id
        self.api_key = api_key
        self.created_at = group.clock()
        self.state = Session(index)
        self.running: dict[SessionTurn, None] = {}
        self.rank: int | None = None
        """Engine that has the prefix of the latest turn."""
        self.spans: VersionSpans = ()
        """Versions of all generated tokens, turn by turn."""
        self.report: SessionReport | None = None
        self.candidate: Candidate = group.candidates[index]

    @property
    def index(self) -> int:
        return self.state.index

    @property
    def trajectory_id(self) -> str:
        return f"{self.group.spec.group_id}:{self.index}"

    @property
    def reward(self) -> float | None:
        return None if self.report is None else self.report.reward

    @property
    def correct(self) -> bool | None:
        report = self.report
        if report is None:
            return None
        if report.correct is None and report.reward is not None:
            return report.reward > 0
        return report.correct

    @property
    def metadata(self) -> bytes | None:
        return None if self.report is None else self.report.metadata

    @property
    def tokens(self) -> int:
        return self.state.tokens + sum(turn.count_tokens() for turn in self.running)

    def seconds(self) -> float:
        return self.state.seconds(self.group.clock())

    def length(self, now: float) -> int:
        """Return tokens or milliseconds, by the group's measure."""
        if self.group.spec.measure is Measure.TOKENS:
            return self.tokens
        return int(MILLISECONDS * self.state.seconds(now))

    def progress(self, now: float) -> int:
        # The state machine expects one more token of a running candidate. But a session may end while its tool runs.
        return max(0, self.length(now) - 1)

    async def wait_for_last_tokens(self) -> None:
        """Wait until aborted requests have returned their tokens, at most `SETTLE_SECONDS`."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.state.is_over and self.running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """``kind``: ``started``, ``stopped``, ``ended`` for a session; ``completed``, ``failed``, ``cancelled`` for a
    group."""

    kind: str
    session: AgentSession | None = None
    reason: str | None = None


class SessionGroup:
    """Runs a group of sessions until it has its outcome.

    Everything is synchronous, so a stop reaches the engine in the same turn of the event loop.

    Args:
        create_session: called with the group and the session's index.
        on_end: called once.
        grant_memory: returns whether a session may have a further turn. Otherwise it ends.
    """

    def __init__(
        self,
        spec: SessionGroupSpec,
        observer: GroupEvents,
        clock: Callable[[], float],
        weight_version: Callable[[], int],
        create_session: Callable[["SessionGroup", int], AgentSession],
        on_end: Callable[["SessionGroup"], None],
        grant_memory: Callable[[AgentSession], bool],
        tail_seed: Sequence[int] | None = None,
    ) -> None:
        self.spec = spec
        self.owner = spec.owner
        self.size = spec.plan.size
        self.weight_version = weight_version
        self.started_at = clock()
        self.ended_at: float | None = None
        self.sessions: list[AgentSession] = []
        self.events: list[SessionEvent] = []
        self.record: GroupRecord | None = None
        self.error: Exception | None = None
        self._observer = observer
        self.clock = clock
        self._create_session = create_session
        self._on_end = on_end
        self._grant_memory = grant_memory
        self._event_added = asyncio.Event()
        self._group = Group(rng=np.random.default_rng(tail_seed))
        self.candidates: Sequence[Candidate] = self._group.candidates
        self._member: CohortMember | None = None

    # --- the life of the group ----------------------------------------------

    def open(self, allocation: Allocation) -> None:
        rule = self.spec.plan.rule_for(allocation.saturated)
        if allocation.cohort is not None:
            self._member = CohortMember(
                allocation.cohort,
                self._group,
                rule.completion_place,
                allocation.candidates,
                lambda tokens, cut_length: self._handle_events(DeadlineSet(tokens, cut_length)),
            )
        self._apply_decisions(self._group.open(rule, allocation.candidates))

    def poll(self) -> None:
        """Report sessions that have reached their `Group.check_at`."""
        now = self.clock()
        events = []
        for index, check_at in self._group.check_at.items():
            session = self.sessions[index]
            # Without a running turn, tokens do not change.
            if session.running or self.spec.measure is Measure.SECONDS:
                progress = session.progress(now)
                if progress >= check_at:
                    events.append(Progress(index, progress))
        if self._member is not None:
            self._member.report_if_over_cut_length(
                lambda: {s.index: s.progress(now) for s in self.sessions if s.candidate.is_running},
            )
        if events:
            self._handle_events(*events)

    def end_silent(self, idle_seconds: float) -> None:
        now = self.clock()
        for session in list(self.sessions):
            used_at = session.state.used_at
            # A session may be younger than its group.
            silent_since = session.created_at if used_at is None else used_at
            if not session.state.is_over and not session.running and now - silent_since > idle_seconds:
                error = SessionFailed(f"session {session.session_id} had no request for {idle_seconds:g} seconds")
                self._fail_session(session, SessionEnd.SILENT, error)

    def cancel(self, error: DartsError | None = None) -> None:
        """Stop all sessions, unless the group has ended."""
        if self.ended_at is not None:
            return
        self.error = self.error or error or GroupAborted("the group was ended by its caller")
        self._apply_decisions(self._group.cancel(DiscardReason.ABORTED))
        self._report_end()

    @property
    def policy(self) -> str:
        # The plan's policy has the suffix of `LEARNED_AS` after a colon.
        return self.spec.plan.policy.partition(":")[0]

    @property
    def outcome(self) -> Outcome | None:
        return self._group.outcome

    @property
    def size_bytes(self) -> int:
        size = len(self.spec.metadata or b"")
        for session in self.sessions:
            size += session.state.size_bytes + len(session.metadata or b"")
        return size

    async def wait_for_events(self, after: int, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while len(self.events) <= after:
                    await self._event_added.wait()
        except TimeoutError:
            return

    # --- turns and ends ---------------------------------------------------

    def begin_turn(
        self,
        session: AgentSession,
        count_tokens: Callable[[], int],
        abort: Callable[[], None],
    ) -> SessionTurn:
        """Count a request of a session.

        Raises:
            SessionOver, TooLarge: see `check_turn`.
            Conflict: the session has too many running requests.
        """
        self.check_turn(session)
        if len(session.running) >= MAX_RUNNING_TURNS:
            raise Conflict(
                "session",
                f"{session.session_id} has {MAX_RUNNING_TURNS} running requests; wait for some of their answers",
            )
        session.state.begin_turn(self.clock())
        turn = SessionTurn(session, count_tokens, abort)
        session.running[turn] = None
        return turn

    def check_turn(self, session: AgentSession) -> None:
        """Refuse a request of a session that is over, or that ends now because it has too many tokens.

        Raises:
            SessionOver: the session is over, or its harness understands no error.
            TooLarge: the session has too many tokens.
        """
        state = session.state
        if state.is_over:
            self._observer.session_request_refused()
            raise self.over_error(session)
        if state.row_tokens >= MAX_ROW_TOKENS:
            reason = f"its rows have {state.row_tokens} tokens, and the limit is {MAX_ROW_TOKENS}"
        elif not self._grant_memory(session):
            reason = f"it takes {state.size_bytes} bytes, more than its share of the memory for running sessions"
        else:
            return

        error = TooLarge(
            "session",
            f"{session.session_id} has failed: {reason}; let turns extend the history instead of rewriting it, or run "
            "fewer turns or sessions",
        )
        self._fail_session(session, SessionEnd.FAILED, error)
        # A harness with this status understands no error: it gets an empty answer instead.
        if self.spec.over_status == HTTPStatus.OK:
            raise self.over_error(session)
        raise error

    def end_turn(self, turn: SessionTurn, tokens: int, finished: FinishedTurn | None) -> None:
        session = turn.session
        state = session.state
        del session.running[turn]
        turn_spans = turn.spans if finished is None else finished.spans
        session.spans = append_spans(session.spans, turn_spans)
        # A stopped session returns nothing. When others ended, their turns left without an answer.
        drops_answer = state.is_over and not session.candidate.cut
        state.end_turn(self.clock(), tokens, None if drops_answer else finished)
        if not state.is_over:
            self._handle_events(Progress(session.index, session.progress(self.clock())))
        elif session.candidate.cut:
            state.cut(session.candidate.tokens)

    def end_session(
        self,
        session: AgentSession,
        *,
        usable: bool = True,
        finish_reason: FinishReason = FinishReason.STOP,
        reward: float | None = None,
        correct: bool | None = None,
        metadata: bytes | None = None,
    ) -> None:
        """End a session for its harness, see `SessionReport`. A session that is over gets only reward and metadata.

        Another session replaces an unusable session, if the group needs it. A second call with the same arguments
        changes nothing: the harness may have lost the first answer.

        Raises:
            Conflict: the harness has ended the session in another way.
        """
        report = SessionReport(usable, finish_reason, reward, correct, metadata)
        if session.report == report:
            return
        if session.report is not None:
            raise Conflict("session", f"{session.session_id} has ended already; end each session once")
        session.report = report
        if session.state.is_over:
            # A session that was cut is in the group, and its reward counts.
            if session.candidate.selected_as is not None:
                self._report_reward(session)
            return
        if not report.usable:
            self._fail_session(session, SessionEnd.FAILED, SessionFailed(f"session {session.session_id} is unusable"))
            return

        now = self.clock()
        self._end(session, SessionEnd.FINISHED, "finished")
        # In the state machine, a finished candidate has at least one token.
        length = max(1, session.length(now))
        self._handle_events(
            Finished(session.index, length, report.finish_reason),
            Rewarded(session.index, report.reward),
        )

    def over_error(self, session: AgentSession) -> SessionOver:
        end = session.state.end_reason
        reason = session.candidate.reason
        because = "" if reason is None else f" ({reason})"
        return SessionOver(
            f"session {session.session_id} is {end}{because}: send no further request of it, and end its environment",
            self.spec.over_status,
        )

    # --- the state machine ----------------------------------------------------

    def _end(self, session: AgentSession, end: SessionEnd, reason: str | None) -> None:
        session.state.end(end, self.clock())
        is_stopped = end in (SessionEnd.STOPPED, SessionEnd.ABORTED)
        for turn in list(session.running):
            turn.abort(is_stopped=is_stopped)
            if not is_stopped:
                # The session's length is final, so later tokens must not count.
                turn.leave(0)
        self._add_event(SessionEvent("stopped" if is_stopped else "ended", session, reason))
        self._observer.session_ended(end, session.state.turns, session.state.tool_seconds)

    def _fail_session(self, session: AgentSession, end: SessionEnd, error: DartsError) -> None:
        self._end(session, end, str(error))
        session.state.drop_rows()
        self._handle_events(Failed(session.index, error))

    def _handle_events(self, *events: Event) -> None:
        try:
            self._apply_decisions(self._group.handle(*events))
        except Exception as error:
            # A bug of ours ends this group alone.
            logger.exception("session group %s failed on the events %s", self.spec.group_id, events)
            self.cancel(GroupAborted(f"an internal error: {error!r}"))

    def _apply_decisions(self, decisions: list[Decision]) -> None:
        if self._member is not None:
            has_new_candidates = any(isinstance(decision, Start) for decision in decisions)
            self._member.report_need(has_new_candidates=has_new_candidates)
        for decision in decisions:
            match decision:
                case Start(indices=indices):
                    for index in indices:
                        session = self._create_session(self, index)
                        self.sessions.append(session)
                        self._add_event(SessionEvent("started", session))
                    self._observer.candidates_started(len(indices))
                    # A session waits for no engine.
                    self._apply_decisions(self._group.handle(*[Started(index) for index in indices]))
                case Stop(index=index, reason=reason):
                    is_aborted = reason in (DiscardReason.ABORTED, DiscardReason.CANCELLED)
                    end = SessionEnd.ABORTED if is_aborted else SessionEnd.STOPPED
                    self._end(self.sessions[index], end, reason.value)
                    self.sessions[index].state.drop_rows()
                case Cut(index=index, tokens=tokens):
                    session = self.sessions[index]
                    if not session.state.is_over:
                        self._end(session, SessionEnd.STOPPED, "cut")
                    # Otherwise the last tokens are still to come, see `end_turn`.
                    if not session.running:
                        session.state.cut(tokens)
                case Complete():
                    self._report_end()
                case GiveUp(error=error):
                    self.error = error
                    self._report_end()

    def _report_end(self) -> None:
        outcome = self._group.outcome
        # The last decision and `cancel` may both report the end.
        if outcome is None or self.ended_at is not None:
            return
        self.ended_at = self.clock()
        try:
            self.record = self._make_record(outcome, self.ended_at)
            self._observer.group_ended(self.record)
            for session in self.sessions:
                if session.candidate.selected_as is not None:
                    self._report_trajectory(session)
                else:
                    session.state.drop_rows()
        finally:
            self._add_event(SessionEvent(outcome.value, reason=None if self.error is None else str(self.error)))
            self._on_end(self)
            if self._member is not None:
                self._member.end(self.record)

    def _make_record(self, outcome: Outcome, now: float) -> GroupRecord:
        weights = selection_weights(self._group)
        advantage_of = advantages(self._group)
        candidates = []
        for index in range(len(self.sessions)):
            candidates.append(self.make_candidate_record(index, weights.get(index), advantage_of.get(index)))
        return make_group_record(
            self._group,
            candidates,
            self._member,
            group_id=self.spec.group_id,
            prompt_key=self.spec.prompt_key,
            policy=self.spec.plan.policy,
            outcome=outcome,
            started_at=self.started_at,
            ended_at=now,
            owner=self.spec.owner,
            error=self.error,
            weight_version=self.weight_version(),
        )

    def _report_trajectory(self, session: AgentSession) -> None:
        # Arrays, because a list of a long history takes milliseconds.
        tokens = array("i")
        prompt_end = 0
        if session.state.rows:
            first_row = session.state.rows[0]
            tokens = first_row.token_ids
            # The mask is 1 for generated tokens.
            prompt_end = max(0, first_row.mask.find(1))
        self._observer.trajectory_returned(
            TrajectoryRecord(
                self.spec.group_id,
                self.spec.prompt_key,
                self.started_at,
                session.index,
                tokens[:prompt_end],
                tokens[prompt_end:],
                self.spec.owner,
            )
        )
        self._report_reward(session)

    def _report_reward(self, session: AgentSession) -> None:
        if session.reward is None:
            return
        key = (self.spec.owner, self.spec.group_id)
        self._observer.trajectory_verified(key, session.index, session.reward, bool(session.correct))

    def _add_event(self, event: SessionEvent) -> None:
        session_id = None if event.session is None else event.session.session_id
        self._observer.session_event(self.spec.group_id, session_id, event.kind, event.reason)
        self.events.append(event)
        # The next event wakes later waiters.
        self._event_added.set()
        self._event_added = asyncio.Event()

    # --- what others read -------------------------------------------------------

    def make_candidate_record(
        self,
        index: int,
        weight: float | None = None,
        advantage: float | None = None,
    ) -> CandidateRecord:
        session = self.sessions[index]
        state = session.state
        candidate = session.candidate
        # A cut length is in tokens: sessions that are compared by seconds have no deadline.
        tokens = candidate.tokens if candidate.cut else session.tokens
        spans = session.spans
        for turn in session.running:
            spans = append_spans(spans, extend_spans(turn.spans, self.weight_version(), turn.count_tokens()))
        # Spans have more tokens than a cut candidate, and lack tokens of a lost engine.
        spans = extend_spans(spans, self.weight_version(), tokens)
        milliseconds = None
        if self.spec.measure is Measure.SECONDS:
            # The state machine counts milliseconds as tokens.
            milliseconds = candidate.tokens
        return CandidateRecord(
            index=index,
            tokens=tokens,
            finish_reason=candidate.finish_reason,
            selected_as=candidate.selected_as,
            reason=candidate.reason,
            cut=candidate.cut,
            started_at=state.started_at,
            ended_at=self.ended_at if state.ended_at is None else state.ended_at,
            weight_version_start=spans[0][0] if spans else None,
            weight_version_end=spans[-1][0] if spans else None,
            weight=weight,
            version_spans=spans,
            reward=session.reward,
            correct=session.correct,
            advantage=advantage,
            turns=state.turns,
            tool_seconds=state.tool_seconds,
            tool_times=state.tool_times(),
            milliseconds=milliseconds,
        )

    def weights_of(self, session: AgentSession) -> tuple[float | None, float | None]:
        """Return weight and advantage, each None if the session has none or the group is not complete."""
        if self.record is None or session.index >= len(self.record.candidates):
            return None, None
        candidate = self.record.candidates[session.index]
        return candidate.weight, candidate.advantage

    def record_weight_version(self, version: int) -> None:
        for session in self.sessions:
            for turn in session.running:
                turn.spans = extend_spans(turn.spans, version, turn.count_tokens())
