"""``/darts/v1/sessions`` and ``/darts/v1/session-groups``: groups of sessions of agents that others run."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Literal, Self

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from darts_server.caller import caller
from darts_server.exceptions import Forbidden
from darts_server.http.answers import JSON, Readers, encode_json, respond, run_in_encoder_thread
from darts_server.http.body import Body, parse_body, read_body, while_connected
from darts_server.http.openapi import json_body
from darts_server.http.resources.rollouts_models import JsonObject, Metadata
from darts_server.http.sse import MEDIA_TYPE, EventStream, encode_event
from darts_server.identifiers import Name
from darts_server.rollout.sessions.registry import SessionGroupRequest, SessionRegistry
from darts_server.rollout.sessions.session_group import AgentSession, SessionEvent, SessionGroup, StoppedAs
from darts_server.types import DiscardReason, FinishReason, Measure, Outcome, SelectedAs, SessionEnd

MAX_BODY_BYTES = 1024 * 1024
"""Metadata of a session are a task's name, an answer to compare with, or the log of a test."""
WAIT_SECONDS = 20.0
MAX_WAIT_SECONDS = 60.0
"""Limit of a long poll. Some proxies close a connection that is silent for longer."""
EXAMPLES = (
    {"prompt_key": "task-17", "size": 8, "extra": 4},
    {"prompt_key": "task-17", "size": 8, "extra": 4, "policy": "uniform", "measure": "seconds", "over_status": 409},
)


class SessionGroupIn(Body):
    """A group of sessions to create."""

    prompt_key: Name | None = Field(None, description="Name of the task in statistics: equal in every epoch.")
    size: int = Field(8, ge=1, description="Number of sessions that are returned.")
    extra: int | None = Field(None, ge=0, description="Further sessions. By default, the policy's redundancy.")
    policy: Name | None = Field(None, description="By default, the server's policy.")
    measure: Measure = Field(Measure.TOKENS, description="What is compared as the length of a session.")
    metadata: JsonObject | None = Field(None, description="Returned with the group.")
    stopped_as: StoppedAs = Field(
        StoppedAs.ABORT, description="Finish reason of the answer in whose turn the server stops the session."
    )
    over_status: Literal[410, 409, 200] = Field(
        410,
        description="HTTP status of each request of a session that is over. 200 is for agents that retry errors or do "
        "not survive them: the request gets an answer without tokens.",
    )


class SessionEndIn(Body):
    """How a harness ends a session."""

    reward: float | None = Field(None, allow_inf_nan=False)
    correct: bool | None = Field(None, description="By default, whether the reward is above 0.")
    usable: bool = Field(
        True, description="False if a tool failed, so that the session is no sample: another session takes its place."
    )
    finish_reason: FinishReason = Field(
        FinishReason.STOP, description="`length` if the agent reached a limit of its own, such as its number of turns."
    )
    metadata: JsonObject | None = Field(None, description="Returned with the session.")


class SessionOut(BaseModel):
    """A session to run. Send its turns to `base_url`, with any key of yours or with `api_key`."""

    id: str
    index: int
    trajectory_id: str = Field(description="For POST /darts/v1/rewards.")
    base_url: str = Field(description="Has vLLM's generation routes below it.")
    api_key: str = Field(description="Key for this session alone. It can be given to a sandbox.")

    @classmethod
    def of(cls, session: AgentSession, root: str) -> Self:
        return cls(
            id=session.session_id,
            index=session.index,
            trajectory_id=session.trajectory_id,
            base_url=f"{root}darts/v1/sessions/{session.session_id}/v1",
            api_key=session.api_key,
        )


class SessionGroupOut(BaseModel):
    """A new group, and its sessions to run."""

    group_id: str
    policy: str
    size: int
    sessions: list[SessionOut]


class SessionState(BaseModel):
    """State of a session."""

    id: str
    index: int
    trajectory_id: str
    group_id: str
    state: Literal["open", "over"]
    end: SessionEnd | None
    reason: DiscardReason | None = Field(description="Why the session is not in its group; null while it may be.")
    turns: int = Field(description="Answered turns.")
    running_turns: int
    tokens: int = Field(description="Generated tokens of all turns.")
    prompt_tokens: int = Field(description="Prompt tokens of all answered turns.")
    tool_seconds: float = Field(description="Seconds between turns.")
    seconds: float = Field(description="Seconds since the first turn began.")
    selected: bool | None = Field(description="Whether the session is in its group; null while that is open.")
    selected_as: SelectedAs | None
    weight: float | None = Field(description="1 / (probability to be in the group). Null if it is not known.")
    reward: float | None
    correct: bool | None
    advantage: float | None = Field(description="Under `informative`, the advantage among all sessions of the group.")
    cut: bool = Field(description="Whether the session was cut at a deadline. Its first tokens are in the group.")
    metadata: Metadata

    @classmethod
    def of(cls, session: AgentSession) -> Self:
        state = session.state
        group = session.group
        # Null while the session may still be selected.
        selected = None
        if group.outcome is not None or session.candidate.reason is not None:
            selected = session.candidate.selected_as is not None
        weight, advantage = group.weights_of(session)
        return cls(
            id=session.session_id,
            index=session.index,
            trajectory_id=session.trajectory_id,
            group_id=group.spec.group_id,
            state="over" if state.is_over else "open",
            end=state.end_reason,
            reason=session.candidate.reason,
            turns=state.turns,
            running_turns=state.running_turns,
            tokens=session.tokens,
            prompt_tokens=state.prompt_tokens,
            tool_seconds=state.tool_seconds,
            seconds=session.seconds(),
            selected=selected,
            selected_as=session.candidate.selected_as,
            weight=weight,
            reward=session.reward,
            correct=session.correct,
            advantage=advantage,
            cut=session.candidate.cut,
            metadata=session.metadata,
        )


class RowOut(BaseModel):
    """Tokens to train on, in the order of the model's context."""

    token_ids: list[int]
    mask: list[int] = Field(description="1 for tokens that the policy has generated, 0 for prompts and tool results.")
    logprobs: list[float] = Field(description="Log-prob of each token; 0 where the mask is 0.")
    version_spans: list[tuple[int, int]] = Field(description="Weight versions of the generated tokens, in order.")


class SessionTrajectory(SessionState):
    """State and tokens of a session."""

    rows: list[RowOut] = Field(
        description="One row if each turn begins with all tokens before it, and several rows if the history was "
        "rewritten or forked. Empty for sessions that are not in their complete group."
    )


class GroupState(BaseModel):
    """State of a group of sessions."""

    group_id: str
    prompt_key: str | None
    policy: str
    size: int
    state: Outcome | Literal["running"]
    error: str | None
    metadata: Metadata
    sessions: list[SessionState]

    @classmethod
    def of(cls, group: SessionGroup) -> Self:
        return cls(
            group_id=group.spec.group_id,
            prompt_key=group.spec.prompt_key,
            policy=group.policy,
            size=group.spec.plan.size,
            state="running" if group.outcome is None else group.outcome,
            error=None if group.error is None else str(group.error),
            metadata=group.spec.metadata,
            sessions=[SessionState.of(session) for session in group.sessions],
        )


class EventOut(BaseModel):
    """An event of a group or of one of its sessions."""

    type: str = Field(
        description="`started`, `stopped` or `ended` for a session; `completed`, `failed` or `cancelled` for the group."
    )
    session: str | None = Field(None, description="Id of the session.")
    reason: str | None = None
    start: SessionOut | None = Field(None, description="Of `started`: the session to run.")


class EventsOut(BaseModel):
    """Events of a group or of a session. Send `next` as `after` with the next request."""

    events: list[EventOut]
    next: int


def _encode_trajectory(state: SessionState, rows: list[dict[str, Any]]) -> bytes:
    fields = state.model_dump()
    fields["rows"] = rows
    return encode_json(fields)


def _encodable_rows(session: AgentSession) -> list[dict[str, Any]]:
    return [
        {
            "token_ids": row.token_ids,
            # An array, because `encode_json` would write bytes as base64.
            "mask": array("B", row.mask),
            "logprobs": row.logprobs,
            "version_spans": row.spans,
        }
        for row in session.state.rows
    ]


def add_routes(api: APIRouter, registry: SessionRegistry) -> None:
    readers = Readers("events of sessions", limit=4096)

    def convert_event(event: SessionEvent, root: str) -> EventOut:
        session = event.session
        session_to_run = None
        if session is not None and event.kind == "started":
            session_to_run = SessionOut.of(session, root)
        return EventOut(
            type=event.kind,
            session=None if session is None else session.session_id,
            reason=event.reason,
            start=session_to_run,
        )

    async def respond_with_events(
        group: SessionGroup,
        session: AgentSession | None,
        request: Request,
        wait: float,
        after: int,
    ) -> Response:
        """Return the events after number ``after``."""
        root = str(request.base_url)

        def read_events(after: int) -> list[tuple[int, EventOut]]:
            numbered_events = []
            for number, event in enumerate(group.events[after:], after + 1):
                # Events without a session are of the group, and every session's reader gets them.
                if session is None or event.session in (None, session):
                    numbered_events.append((number, convert_event(event, root)))
            return numbered_events

        if MEDIA_TYPE in request.headers.get("accept", ""):

            async def stream() -> AsyncIterator[bytes]:
                last_number = after
                while True:
                    numbered_events = read_events(last_number)
                    # After a number that is too large, the stream continues with the next event.
                    last_number = len(group.events)
                    # The group may end while its events are sent, and then has further events.
                    had_ended = group.outcome is not None
                    for number, event in numbered_events:
                        yield encode_event(event.type, event.model_dump(mode="json"), number)
                    if had_ended:
                        return
                    await group.wait_for_events(last_number, MAX_WAIT_SECONDS)

            return EventStream(stream(), readers.count_connection())

        async def poll() -> EventsOut:
            loop = asyncio.get_running_loop()
            last_number = after
            wait_until = loop.time() + wait
            while True:
                numbered_events = read_events(last_number)
                # After a number that is too large, the caller waits until the group has more events than that.
                last_number = max(last_number, len(group.events))
                seconds_left = wait_until - loop.time()
                if numbered_events or seconds_left <= 0 or group.outcome is not None:
                    return EventsOut(events=[event for _, event in numbered_events], next=last_number)
                await group.wait_for_events(last_number, seconds_left)

        with readers.count_connection():
            answer = await while_connected(request, poll())
        return Response(answer.model_dump_json(), media_type=JSON)

    @api.post("/sessions", response_model=SessionGroupOut, openapi_extra=json_body(SessionGroupIn, *EXAMPLES))
    async def create(request: Request) -> SessionGroupOut:
        """Create a group of sessions. Your agents run all of them; the server stops those that are not needed."""
        body = await parse_body(SessionGroupIn, await read_body(request, MAX_BODY_BYTES))
        group = await registry.create(
            SessionGroupRequest(
                size=body.size,
                extra=body.extra,
                policy=body.policy,
                prompt_key=body.prompt_key,
                measure=body.measure,
                metadata=body.metadata,
                stopped_as=body.stopped_as,
                over_status=body.over_status,
            )
        )
        root = str(request.base_url)
        return SessionGroupOut(
            group_id=group.spec.group_id,
            policy=group.policy,
            size=group.spec.plan.size,
            sessions=[SessionOut.of(session, root) for session in group.sessions],
        )

    @api.post("/sessions/{session_id}:end", response_model=SessionState, openapi_extra=json_body(SessionEndIn))
    async def end(session_id: str, request: Request) -> SessionState:
        """End a session. A session that the server has stopped only gets the reward and the metadata."""
        session = registry.find(session_id)
        # Without a body, the defaults apply.
        body = await parse_body(SessionEndIn, await read_body(request, MAX_BODY_BYTES) or b"{}")
        has_session_key = caller.get().session is not None
        if has_session_key and (body.reward is not None or body.correct is not None):
            # The key may be in a sandbox, whose code must not choose its own reward.
            raise Forbidden(
                "a reward needs a key of the server; with the key of a session, send no reward and no correct"
            )
        session.group.end_session(
            session,
            usable=body.usable,
            finish_reason=body.finish_reason,
            reward=body.reward,
            correct=body.correct,
            metadata=body.metadata,
        )
        return SessionState.of(session)

    @api.get("/sessions/{session_id}", response_model=SessionTrajectory)
    async def read(session_id: str, request: Request) -> Response:
        """Return the state of a session, and its tokens with their log-probs, ready for training."""
        session = registry.find(session_id)
        # The last tokens of a session that was just cut may not have arrived yet.
        await while_connected(request, session.wait_for_last_tokens())
        # State and rows are read here, because turns may extend a row while the thread encodes it.
        encode_session = partial(_encode_trajectory, SessionState.of(session), _encodable_rows(session))
        return respond(await run_in_encoder_thread(encode_session), JSON)

    wait_query = Query(
        WAIT_SECONDS,
        ge=0,
        le=MAX_WAIT_SECONDS,
        description="Seconds to wait for an event.",
    )
    after_query = Query(0, ge=0, description="Number of events that you have: `next` of the last answer.")

    @api.get("/sessions/{session_id}/events", response_model=EventsOut)
    async def session_events(
        session_id: str,
        request: Request,
        wait: float = wait_query,
        after: int = after_query,
    ) -> Response:
        """Wait for events of a session and for the end of its group. `Accept: text/event-stream` gets a stream."""
        session = registry.find(session_id)
        return await respond_with_events(session.group, session, request, wait, after)

    @api.get("/session-groups/{group_id}/events", response_model=EventsOut)
    async def group_events(
        group_id: str,
        request: Request,
        wait: float = wait_query,
        after: int = after_query,
    ) -> Response:
        """Wait for events of a group and its sessions. `Accept: text/event-stream` gets a stream."""
        return await respond_with_events(registry.find_group(group_id), None, request, wait, after)

    @api.get("/session-groups/{group_id}")
    async def read_group(group_id: str) -> GroupState:
        """Return the state of a group and of its sessions, without their tokens."""
        return GroupState.of(registry.find_group(group_id))

    @api.delete("/session-groups/{group_id}")
    async def delete_group(group_id: str) -> GroupState:
        """End a group: all its sessions are aborted."""
        group = registry.find_group(group_id)
        group.cancel()
        return GroupState.of(group)
