import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from darts_server.caller import caller
from darts_server.exceptions import (
    RETRY_SECONDS,
    Conflict,
    DartsError,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuotaReached,
    Unauthorized,
)
from darts_server.rollout.plan import UNSHAPED, Plan
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.sessions.session_group import AgentSession, SessionGroup, SessionGroupSpec, StoppedAs
from darts_server.serving.fair_cache import FairCache
from darts_server.types import AUTO, OFF, Measure, RequestOptions

IDLE_SECONDS = 1800.0
"""Most tools take seconds, and test runs take minutes."""
MAX_OPEN_SESSIONS = 65_536
"""An eight-GPU node runs some thousand sessions at a time."""
MAX_RUNNING_BYTES = 8 << 30
"""8,192 sessions of 131,072 generated tokens. Beyond it, sessions with more than an even share fail."""
KEPT_GROUPS = 8192
"""A step has 256 to 1,024 groups."""
IDLE_CHECK_SECONDS = 1.0
SESSION_PREFIX = "ses-"
LEARNED_AS = {Measure.TOKENS: "sessions", Measure.SECONDS: "session-seconds"}
"""Suffix of the policy's name in records and statistics."""
SESSION_ID_BYTES = 12
_SESSION_ID = re.compile(f"{SESSION_PREFIX}[0-9a-f]{{{2 * SESSION_ID_BYTES}}}")
KEY_PREFIX = "ses-key-"
"""No key of a server begins so, unless its operator chooses it."""


@dataclass(frozen=True, slots=True)
class SessionGroupRequest:
    """``extra``: sessions beyond ``size``, or None for the policy's redundancy. ``metadata``: JSON."""

    size: int
    extra: int | None = None
    policy: str | None = None
    prompt_key: str | None = None
    measure: Measure = Measure.TOKENS
    metadata: bytes | None = None
    stopped_as: StoppedAs = StoppedAs.ABORT
    over_status: int = 410


class SessionRegistry:
    """Creates groups of sessions, and finds their sessions by id and by key.

    Args:
        idle_seconds: seconds without a request after which a session ends as silent.
        kept_bytes: memory of the tokens of ended groups.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        rollouts: Rollouts[Any, Any],
        idle_seconds: float = IDLE_SECONDS,
        kept_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rollouts = rollouts
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._running: dict[str, SessionGroup] = {}
        self._ended: FairCache[str, SessionGroup] = FairCache(KEPT_GROUPS, kept_bytes)
        # Sessions of running groups, by owner.
        self._num_running: Counter[str | None] = Counter()
        # Memory of running groups at the latest check.
        self._running_bytes = 0
        # Sessions of running and ended groups.
        self._sessions: dict[str, AgentSession] = {}
        self._by_api_key: dict[str, AgentSession] = {}
        # None while no group runs.
        self._polling: asyncio.Task[None] | None = None
        rollouts.observers.weights_changing.add(self._record_weight_version)

    # --- groups ---------------------------------------------------------------

    async def create(self, request: SessionGroupRequest) -> SessionGroup:
        """Create a group with its sessions.

        Raises:
            InvalidRequest: a field is wrong, or the policy cannot act on sessions.
            Overloaded: too many sessions are open.
            QuotaReached: the caller has too many open sessions.
        """
        rollouts = self._rollouts
        plan = self._plan(request)
        allocation = await rollouts.allocator.allocate(plan, request.prompt_key or "")
        if request.extra is not None:
            allocation = replace(allocation, candidates=request.size + request.extra)
        try:
            self._check_open_sessions(allocation.candidates)
            spec = SessionGroupSpec(
                group_id=f"sessions-{uuid4().hex}",
                plan=plan,
                prompt_key=request.prompt_key,
                owner=caller.get().name,
                measure=request.measure,
                metadata=request.metadata,
                stopped_as=request.stopped_as,
                over_status=request.over_status,
            )
            group = SessionGroup(
                spec,
                rollouts.observers,
                self._clock,
                lambda: rollouts.engine.weight_version,
                self._create_session,
                self._keep_ended,
                self._grant_memory,
            )
        except BaseException:
            # Otherwise the cohort would wait for the group.
            allocation.drop()
            raise
        self._running[spec.group_id] = group
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll_running(), name="darts-session-poller")
        group.open(allocation)
        return group

    def find_group(self, group_id: str) -> SessionGroup:
        """Return a group of the caller.

        Raises:
            NotFound
        """
        group = self._running.get(group_id)
        for _, ended_groups in self._ended:
            if group_id in ended_groups:
                group = ended_groups[group_id]
        if group is None or not caller.get().may_see(group.spec.owner):
            raise NotFound("group_id", f"there is no group of sessions {group_id!r} of yours; ended groups are dropped")
        return group

    def find(self, session_id: str) -> AgentSession:
        """Return a session of the caller.

        Raises:
            NotFound
        """
        session = self._find_visible(session_id)
        # A caller with a session's key sees this session alone.
        session_of_key = caller.get().session
        if session is None or session_of_key not in (None, session_id):
            raise NotFound(
                "session_id",
                f"there is no session {session_id!r} of yours; POST /darts/v1/sessions creates sessions, and the "
                "sessions of groups that ended long ago, or before a restart of the server, are dropped",
            )
        return session

    def owner_of_key(self, key: bytes) -> tuple[str | None, str] | None:
        """Return owner and id of a key's session, or None for a key of another kind.

        Raises:
            Unauthorized: the session is dropped.
        """
        if not key.startswith(KEY_PREFIX.encode()):
            return None
        session = self._by_api_key.get(key.decode("latin-1"))
        if session is None:
            # A server without keys would serve the request outside of any session.
            raise Unauthorized("the key belongs to no session: its group ended long ago, or the server was restarted")
        return session.group.spec.owner, session.session_id

    def find_named(self, *names: str | None) -> AgentSession | None:
        """Return a turn's session: by the caller's key or URL, or by the ``names`` in its headers.

        Raises:
            NotFound: there is no such session, or it belongs to another key.
            Conflict: key, URL and headers name different sessions.
        """
        session_of_key_or_url = caller.get().session
        session = None
        if session_of_key_or_url is not None:
            session = self.find(session_of_key_or_url)
        for name in names:
            # Harnesses send names of their own in the same headers.
            if name is None or not _SESSION_ID.fullmatch(name):
                continue
            if session is None:
                session = self.find(name)
            elif self._find_visible(name) is not session:
                raise Conflict("session", f"{session.session_id} and {name} are both named; send one of them")
        return session

    @property
    def running(self) -> list[SessionGroup]:
        """The oldest group comes first."""
        return list(self._running.values())

    @property
    def num_open(self) -> int:
        return sum(not session.state.is_over for group in self._running.values() for session in group.sessions)

    def fail_all(self, error: DartsError) -> None:
        """End all groups, so that harnesses get the events."""
        for group in list(self._running.values()):
            group.cancel(error)

    # --- inside -----------------------------------------------------------------

    def _find_visible(self, session_id: str) -> AgentSession | None:
        session = self._sessions.get(session_id)
        if session is None or not caller.get().may_see(session.group.spec.owner):
            return None
        return session

    def _plan(self, request: SessionGroupRequest) -> Plan:
        # Without a size, a group of one would count as a single request of a larger group.
        options = RequestOptions(
            policy=request.policy,
            prompt_key=request.prompt_key,
            group_size=1 if request.size == 1 else None,
        )
        try:
            # As in a batch, no request joins the group.
            plan = self._rollouts.planner.plan(request.size, options, in_batch=True)
        except InvalidRequest as error:
            # Other requests name their size `n`.
            raise InvalidRequest("size" if error.field == "n" else error.field, error.message) from None
        # None is `off`, and `auto` does nothing outside of batches.
        if plan is None or plan.policy == AUTO:
            plan = Plan(OFF, UNSHAPED, request.size)
        if plan.shaping.prunes:
            raise InvalidRequest(
                "policy", f"{plan.policy!r} scores single answers, and sessions have several; use 'uniform' or 'cap'"
            )
        if request.measure is Measure.SECONDS and plan.shaping.deadline is not None:
            raise InvalidRequest(
                "measure", f"must be 'tokens' under {plan.policy!r}, whose deadlines are learned in tokens; change one"
            )
        if request.extra and plan.shaping.candidates(request.size) == request.size:
            raise InvalidRequest(
                "extra",
                f"must be 0 under {plan.policy!r} and for a size of 1, where all sessions are returned; set it to 0, "
                "or use policy 'uniform'",
            )
        largest = self._rollouts.planner.limits.max_group_size
        if request.size + (request.extra or 0) > largest:
            raise InvalidRequest("extra", f"size and extra together must be at most {largest}; lower one of them")
        # Deadlines are learned by policy, and sessions are longer than answers.
        return replace(plan, policy=f"{plan.policy}:{LEARNED_AS[request.measure]}")

    def _check_open_sessions(self, more: int) -> None:
        num_open = self._num_running.total()
        free = MAX_OPEN_SESSIONS - num_open - more
        if free < 0:
            raise Overloaded(
                f"{num_open} sessions are open, and at most {MAX_OPEN_SESSIONS} may be; retry when some groups have "
                "ended",
                RETRY_SECONDS,
            )
        # A key may have as many open sessions as stay free for other keys: half of all if it is alone, a third if
        # another key has as many. So a new key always finds free sessions. Admins have no share, as in `Admission`.
        who = caller.get()
        num_open_of_key = self._num_running[who.name]
        if who.name is not None and not who.is_admin and num_open_of_key + more > free:
            raise QuotaReached(
                f"this key has {num_open_of_key} open sessions, and {more} more would leave only {free} for other "
                "keys, which is less than this key would have; retry when some of its groups have ended",
                RETRY_SECONDS,
            )

    def _grant_memory(self, session: AgentSession) -> bool:
        even_share = MAX_RUNNING_BYTES / self._num_running.total()
        session_bytes = session.state.size_bytes
        if self._running_bytes <= MAX_RUNNING_BYTES or session_bytes <= even_share:
            return True
        # Otherwise, further sessions would fail until the next check.
        self._running_bytes -= session_bytes
        return False

    def _create_session(self, group: SessionGroup, index: int) -> AgentSession:
        # The id is a part of URLs and logs, so it gives no access where the server has keys.
        session = AgentSession(
            group,
            index,
            SESSION_PREFIX + secrets.token_hex(SESSION_ID_BYTES),
            KEY_PREFIX + secrets.token_urlsafe(24),
        )
        self._sessions[session.session_id] = session
        self._by_api_key[session.api_key] = session
        self._num_running[group.spec.owner] += 1
        return session

    def _keep_ended(self, group: SessionGroup) -> None:
        del self._running[group.spec.group_id]
        owner = group.spec.owner
        self._num_running[owner] -= len(group.sessions)
        dropped = self._ended.put(owner, group.spec.group_id, group, group.size_bytes)
        for _, dropped_group in dropped:
            for session in dropped_group.sessions:
                del self._sessions[session.session_id]
                del self._by_api_key[session.api_key]

    def _record_weight_version(self) -> None:
        version = self._rollouts.engine.weight_version
        for group in self._running.values():
            group.record_weight_version(version)

    async def _poll_running(self) -> None:
        next_idle_check = self._clock() + IDLE_CHECK_SECONDS
        while self._running:
            await asyncio.sleep(self._rollouts.poll_seconds)
            for group in list(self._running.values()):
                group.poll()
            if self._clock() >= next_idle_check:
                next_idle_check = self._clock() + IDLE_CHECK_SECONDS
                running_bytes = 0
                for group in list(self._running.values()):
                    group.end_silent(self._idle_seconds)
                    running_bytes += group.size_bytes
                    # Tens of thousands of sessions in one turn would hold up the event loop.
                    await asyncio.sleep(0)
                self._running_bytes = running_bytes
        self._running_bytes = 0
        self._polling = None
