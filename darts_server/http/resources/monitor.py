"""``/darts/v1/live``, the monitor: running and recently ended groups, as one answer or as events."""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from darts_server.caller import caller
from darts_server.exceptions import RETRY_SECONDS, QuotaReached
from darts_server.http.resources.trajectories import Cut, Quality, Reason, SelectedAs
from darts_server.http.resources.weights import UpdateAnswer
from darts_server.http.sse import MEDIA_TYPE, EventStream, encode
from darts_server.rollout.learned.statistics import Rewards, summarize
from darts_server.rollout.observers.monitor import MaySee, Monitor, Viewer
from darts_server.types import Outcome
from darts_server.weights.coordinator import Coordinator

INTERVAL_SECONDS = 0.25
MAX_CPU_SHARE = 0.05
"""Of one core, for all streams together: where an event takes longer to make, events become rarer."""
QUIET_SECONDS = 2.0
"""Maximum time between events, even without changes, unless making them takes longer than that share."""
MAX_VIEWERS = 32
"""Streams of one key: each takes time and memory."""
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
    resumed: int | None = Field(None, description="Tokens that an earlier batch has generated, from which it went on.")
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
    """Objects that the monitor reads, and the number of streams, by the caller's name and whether it is an admin.

    ``fault``: of the store. ``stopping``: whether streams should end.
    """

    monitor: Monitor
    rewards: Rewards
    updates: Coordinator
    fault: Callable[[], str | None]
    stopping: Callable[[], bool] = lambda: False
    streams: Counter[tuple[str | None, bool]] = field(default_factory=Counter)

    def health(self) -> dict[str, Any]:
        """Return a `MonitorHealth` as JSON values."""
        updates, learned = self.updates, summarize(self.rewards.dataset)
        last = None if updates.last is None else UpdateAnswer.model_validate(updates.last)
        rewards = None if learned is None else MonitorRewards.model_validate(learned)
        weights = MonitorWeights(version=updates.version, state=updates.state.value, last=last)
        return MonitorHealth(weights=weights, rewards=rewards, store_fault=self.fault()).model_dump(mode="json")

    @contextmanager
    def count_stream(self, name: str | None, is_admin: bool) -> Iterator[None]:
        """Count a stream of that caller.

        Raises:
            QuotaReached
        """
        if (open_now := self.streams[name, is_admin]) >= MAX_VIEWERS:
            raise QuotaReached(
                f"this key has {open_now} streams of the monitor, and may have no more; close some", RETRY_SECONDS
            )
        self.streams[name, is_admin] += 1
        try:
            yield
        finally:
            self.streams[name, is_admin] -= 1


def add_routes(api: APIRouter, sources: MonitorSources) -> None:
    stream: dict[int | str, dict[str, Any]] = {200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}}

    @api.get("/live", response_model=MonitorAnswer, responses=stream)
    async def live(request: Request) -> Response:
        """Return the caller's running and recently ended groups; with ``Accept: text/event-stream``, stream them.

        Admins get the groups of all callers.
        """
        who = caller.get()
        if MEDIA_TYPE in request.headers.get("accept", ""):
            counted = sources.count_stream(who.name, who.is_admin)
            return EventStream(events(sources, who.may_see), counted, ping_seconds=0, send_timeout=STALL_SECONDS)
        return JSONResponse(Viewer(sources.monitor, who.may_see).next_update() | {"health": sources.health()})


async def events(
    sources: MonitorSources, may_see: MaySee, interval: float = INTERVAL_SECONDS, quiet: float = QUIET_SECONDS
) -> AsyncGenerator[bytes, None]:
    """Yield a ``snapshot`` for one viewer, and then an ``update`` for changes, at most every ``interval`` seconds.

    The next one is made when the previous one was sent: a slow reader gets all changes in one, and none are queued.
    ``quiet``: seconds after which an update is sent in any case.
    """
    viewer, health, due, sent_at = Viewer(sources.monitor, may_see), None, 0.0, 0.0
    while not sources.stopping():
        if (now := time.monotonic()) >= due:
            cpu, event = time.thread_time(), None
            update, previous, health = viewer.next_update(), health, sources.health()
            if previous is None or update["groups"] or update["left"] or health != previous or now - sent_at >= quiet:
                event = encode("snapshot" if previous is None else "update", update | {"health": health})
            due = now + max(interval, (time.thread_time() - cpu) * sources.streams.total() / MAX_CPU_SHARE)
            if event is not None:
                sent_at = now
                yield event
        # Not longer, as the server may be stopping meanwhile.
        await anyio.sleep(min(quiet, max(0.0, due - time.monotonic())))
