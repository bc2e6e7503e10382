"""``/darts/v1/live``, the monitor: running and recently ended groups, as one answer or as events."""

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Literal

import anyio
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from darts_server.http.resources.trajectories import Cut, Quality, Reason, SelectedAs
from darts_server.http.resources.weights import UpdateAnswer
from darts_server.http.sse import MEDIA_TYPE, EventStream, encode
from darts_server.rollout.learned.rewards import Rewards, summarize
from darts_server.rollout.observers.monitor import GroupState, Monitor, MonitorUpdate, Viewer
from darts_server.serving.admission import caller
from darts_server.types import Outcome
from darts_server.weights.updates import Updates

INTERVAL_SECONDS = 0.25
MAX_CPU_SHARE = 0.05
"""Of one core, for all viewers together: where an event takes longer to make, events become rarer."""
QUIET_SECONDS = 2.0
"""Maximum time between events, even without changes."""
STALL_SECONDS = 60.0
"""A viewer that accepts nothing for so long is dropped."""
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
    quality: Quality = None


class MonitorGroup(BaseModel):
    """A group. Unknown fields are omitted; `update` events have only changed fields."""

    model_config = ConfigDict(extra="forbid")

    group_id: str
    began: float | None = Field(None, description=f"{TIME} A group with this field is complete.")
    prompt_key: str | None = None
    policy: str | None = None
    size: int | None = Field(None, description="Number of trajectories that it returns.")
    started: int | None = Field(
        None, description="Number of started candidates. Of a very large group only the first are listed."
    )
    ended: float | None = Field(None, description=TIME)
    outcome: Outcome | None = None
    deadline: int | None = Field(None, description="Tokens at which its tail was cut.")
    error: str | None = None
    server: str | None = Field(None, description="Where it runs. Only from an ingress.")
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
        description="Recently ended groups, then running ones, the newest of these first."
    )
    left: list[str] = Field(
        description="`update`: running groups that get no more updates, because newer ones took their place."
    )
    health: MonitorHealth


@dataclass(frozen=True, slots=True)
class MonitorSources:
    """Objects that the monitor reads. ``fault``: of the store. ``stopping``: whether streams should end."""

    monitor: Monitor
    rewards: Rewards
    updates: Updates
    fault: Callable[[], str | None]
    stopping: Callable[[], bool] = lambda: False

    def health(self) -> dict[str, Any]:
        """Return a `MonitorHealth` as JSON values."""
        updates, learned = self.updates, summarize(self.rewards.dataset)
        last = None if updates.last is None else UpdateAnswer.of(updates.last)
        rewards = None
        if learned is not None:
            rewards = MonitorRewards(
                rewarded=learned.rewarded,
                pass_rate=learned.pass_rate,
                rewarded_groups=learned.rewarded_groups,
                zero_variance_groups=learned.zero_variance_groups,
            )
        weights = MonitorWeights(version=updates.version, state=updates.state.value, last=last)
        return MonitorHealth(weights=weights, rewards=rewards, store_fault=self.fault()).model_dump(mode="json")


def routes(sources: MonitorSources) -> APIRouter:
    """Create the route."""
    api = APIRouter()
    stream: dict[int | str, dict[str, Any]] = {200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}}

    @api.get("/live", response_model=MonitorAnswer, responses=stream)
    async def live(request: Request) -> Response:
        """Return the caller's running and recently ended groups; with ``Accept: text/event-stream``, stream them.

        Admins get the groups of all callers.
        """
        viewer = Viewer(sources.monitor, caller.get().may_see)
        if MEDIA_TYPE in request.headers.get("accept", ""):
            return stream_events(viewer, sources)
        return JSONResponse(_to_json(viewer.next_update(), sources.health()))

    return api


def stream_events(viewer: Viewer, sources: MonitorSources, send_timeout: float = STALL_SECONDS) -> EventStream:
    """Stream events to a viewer. Each is made when the previous one was sent, so a slow viewer skips states."""
    return EventStream(event_chunks(viewer, sources), viewer, ping_seconds=0, send_timeout=send_timeout)


async def event_chunks(
    viewer: Viewer, sources: MonitorSources, interval: float = INTERVAL_SECONDS, quiet: float = QUIET_SECONDS
) -> AsyncGenerator[bytes, None]:
    """Yield a ``snapshot``, then an ``update`` for changes, at most every ``interval`` seconds.

    ``quiet``: seconds after which an update is sent in any case.
    """
    name, sent_at, health = "snapshot", 0.0, None
    while not sources.stopping():
        now, cpu, chunk = time.monotonic(), time.thread_time(), b""
        update, previous_health, health = viewer.next_update(), health, sources.health()
        if update.groups or update.dropped or health != previous_health or now - sent_at >= quiet:
            chunk = encode(name, _to_json(update, health))
            name, sent_at = "update", now
        cpu = time.thread_time() - cpu
        if chunk:
            yield chunk
        await anyio.sleep(max(interval, min(quiet, cpu * viewer.monitor.viewers / MAX_CPU_SHARE)))


def _to_json(update: MonitorUpdate, health: dict[str, Any]) -> dict[str, Any]:
    return {
        "now": update.now,
        "running": update.running,
        "candidates": update.candidates,
        "groups": [_group(group) for group in update.groups],
        "left": list(update.dropped),
        "health": health,
    }


def _group(group: GroupState) -> dict[str, Any]:
    return {"group_id": group.group_id, **group.fields, "candidates": list(group.candidates)}
