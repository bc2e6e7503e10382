"""``/darts/v1/live``, the live monitor: running and recently ended groups, as one answer or as events."""

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from darts_server.caller import caller
from darts_server.http.answers import Readers
from darts_server.http.resources.trajectories import Cut, Quality, Reason, SelectedAs, ToolSeconds, Turns
from darts_server.http.resources.weights import UpdateAnswer
from darts_server.http.sse import MEDIA_TYPE, EventStream, encode_event
from darts_server.rollout.learned.statistics import Rewards, summarize
from darts_server.rollout.observers.monitor import MaySee, Monitor, Viewer
from darts_server.store import Store
from darts_server.types import Outcome
from darts_server.weights.coordinator import Coordinator

INTERVAL_SECONDS = 0.25
MAX_CPU_SHARE = 0.05
"""Share of one core for all streams together. If events take longer, they become rarer."""
QUIET_SECONDS = 2.0
"""Maximum time between events, unless `MAX_CPU_SHARE` makes events rarer."""
MAX_VIEWERS = 32
STALL_SECONDS = 60.0
"""Timeout for a viewer that accepts nothing."""
TIME = "Seconds on the clock of `now`."


class MonitorCandidate(BaseModel):
    """A candidate. Fields that are unknown or do not apply are omitted; `update` events have only changed fields."""

    model_config = ConfigDict(extra="forbid")

    index: int
    state: Literal["waiting", "running", "finished", "selected", "discarded"] | None = Field(
        None, description="`finished`: not yet selected or discarded."
    )
    tokens: int | None = Field(None, description="Tokens generated so far.")
    start: float | None = Field(None, description=TIME)
    stop: float | None = Field(None, description=TIME)
    selected_as: SelectedAs = None
    reason: Reason = None
    cut: Cut | None = None
    resumed: int | None = Field(None, description="Tokens of an earlier batch that the candidate has continued.")
    quality: Quality = None
    turns: Turns = None
    tool_seconds: ToolSeconds = None
    tools: list[tuple[float, float | None]] | None = Field(
        None,
        description="Begin and end of each time without a running turn of a session, on the clock of `now`. The end is "
        "null while a tool runs. Only the first of a session with very many turns are listed.",
    )


class MonitorGroup(BaseModel):
    """A group. Unknown fields are omitted; `update` events have only changed fields."""

    model_config = ConfigDict(extra="forbid")

    group_id: str
    began: float | None = Field(None, description=f"{TIME} A group with this field is complete.")
    prompt_key: str | None = None
    policy: str | None = None
    size: int | None = Field(None, description="Number of trajectories that it returns.")
    started: int | None = Field(
        None, description="Number of started candidates. Only the first candidates of a very large group are listed."
    )
    ended: float | None = Field(None, description=TIME)
    outcome: Outcome | None = None
    deadline: int | None = Field(None, description="Length in tokens at which its tail was cut.")
    error: str | None = None
    candidates: list[MonitorCandidate]


class MonitorWeights(BaseModel):
    """The weights that are served."""

    version: int
    state: str
    last: UpdateAnswer | None


class MonitorRewards(BaseModel):
    """Statistics of all rewards so far."""

    rewarded: int
    pass_rate: float
    rewarded_groups: int
    zero_variance_groups: int


class MonitorHealth(BaseModel):
    """Health of the server."""

    weights: MonitorWeights
    rewards: MonitorRewards | None = Field(description="Null while no trajectory has a reward.")
    store_fault: str | None = Field(description="Why learned state cannot be written.")


class MonitorAnswer(BaseModel):
    """State of the server, or in an `update` its changes."""

    now: float = Field(description="Seconds on the server's clock.")
    running: int = Field(description="Number of running groups, of all callers.")
    candidates: int = Field(description="Number of candidates of running groups, of all callers.")
    groups: list[MonitorGroup] = Field(
        description="Recently ended groups, then running groups, the newest running group first."
    )
    left: list[str] = Field(
        description="`update`: running groups that get no more updates, because newer groups took their places."
    )
    health: MonitorHealth


@dataclass(frozen=True, slots=True)
class MonitorSources:
    monitor: Monitor
    rewards: Rewards
    updates: Coordinator
    store: Store
    is_stopping: Callable[[], bool] = lambda: False
    streams: Readers = field(default_factory=lambda: Readers("the live monitor", MAX_VIEWERS))

    def read_health(self) -> dict[str, Any]:
        weights = MonitorWeights(
            version=self.updates.version,
            state=self.updates.state.value,
            last=UpdateAnswer.of(self.updates.last),
        )
        rewards = None
        reward_summary = summarize(self.rewards.dataset)
        if reward_summary is not None:
            rewards = MonitorRewards.model_validate(reward_summary)
        return MonitorHealth(weights=weights, rewards=rewards, store_fault=self.store.fault).model_dump(mode="json")


def add_routes(api: APIRouter, sources: MonitorSources) -> None:
    responses: dict[int | str, dict[str, Any]] = {200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}}

    @api.get("/live", response_model=MonitorAnswer, responses=responses)
    async def live(request: Request) -> Response:
        """Return the caller's running and recently ended groups; with ``Accept: text/event-stream``, stream them.

        Admins get the groups of all callers.
        """
        may_see = caller.get().may_see
        if MEDIA_TYPE in request.headers.get("accept", ""):
            # Without pings, because an event is sent every `QUIET_SECONDS` if nothing changes.
            return EventStream(
                stream_updates(sources, may_see),
                sources.streams.count_connection(),
                ping_seconds=0,
                send_timeout=STALL_SECONDS,
            )
        return JSONResponse(Viewer(sources.monitor, may_see).next_update() | {"health": sources.read_health()})


async def stream_updates(
    sources: MonitorSources,
    may_see: MaySee,
    interval: float = INTERVAL_SECONDS,
    quiet: float = QUIET_SECONDS,
) -> AsyncGenerator[bytes, None]:
    """Yield a ``snapshot``, and then an ``update`` for changes, at most every ``interval`` seconds.

    The next event is made when the previous event was sent, so a slow reader gets all changes in one event. After
    ``quiet`` seconds an update is sent in any case.
    """
    viewer = Viewer(sources.monitor, may_see)
    sent_health = None
    next_event_at = 0.0
    sent_at = 0.0
    while not sources.is_stopping():
        now = time.monotonic()
        if now >= next_event_at:
            # Measure the processor time of this thread, because the machine may be busy with the engine.
            cpu_begin = time.thread_time()
            update = viewer.next_update()
            health = sources.read_health()
            has_changes = update["groups"] or update["left"] or health != sent_health
            event = None
            if has_changes or now - sent_at >= quiet:
                kind = "snapshot" if sent_health is None else "update"
                event = encode_event(kind, update | {"health": health})
                sent_health = health
            cpu_seconds = time.thread_time() - cpu_begin
            next_event_at = now + max(interval, cpu_seconds * sources.streams.num_connections / MAX_CPU_SHARE)
            if event is not None:
                sent_at = now
                yield event

        # Sleep `quiet` seconds at most, because the server may be stopping meanwhile.
        await anyio.sleep(min(quiet, max(0.0, next_event_at - time.monotonic())))
