"""``/darts/v1/live``, the monitor: running and recently ended groups, as one answer or as events."""

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType
from typing import Any, Literal, Self
from weakref import WeakValueDictionary

import anyio
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from darts_server.exceptions import QuotaReached
from darts_server.http.resources.trajectories import Cut, Quality, Reason, SelectedAs
from darts_server.http.resources.weights import UpdateAnswer
from darts_server.http.sse import MEDIA_TYPE, EventStream, encode
from darts_server.rollout.learned.statistics import Rewards, summarize
from darts_server.rollout.observers.monitor import MaySee, Monitor, Viewer
from darts_server.serving.admission import RETRY_SECONDS, caller
from darts_server.types import Outcome
from darts_server.weights.updates import Updates

INTERVAL_SECONDS = 0.25
MAX_CPU_SHARE = 0.05
"""Of one core, for the feeds of all callers together: where an event takes longer to make, events become rarer."""
QUIET_SECONDS = 2.0
"""Maximum time between events, even without changes, unless making them takes longer than that share."""
KEPT_UPDATES = 4
"""A viewer that has missed more of them gets everything."""
NO_TIME = b'"now":null'
"""How a snapshot begins until it is sent."""
MAX_VIEWERS = 32
"""Of one key: sending an event to each of them takes time, too."""
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
    """Objects that the monitor reads, and the feeds that have viewers, by the caller's name and whether it is an admin.

    ``fault``: of the store. ``stopping``: whether streams should end.
    """

    monitor: Monitor
    rewards: Rewards
    updates: Updates
    fault: Callable[[], str | None]
    stopping: Callable[[], bool] = lambda: False
    feeds: "WeakValueDictionary[tuple[str | None, bool], Feed]" = field(default_factory=WeakValueDictionary)

    def health(self) -> dict[str, Any]:
        """Return a `MonitorHealth` as JSON values."""
        updates, learned = self.updates, summarize(self.rewards.dataset)
        last = None if updates.last is None else UpdateAnswer.model_validate(updates.last)
        rewards = None if learned is None else MonitorRewards.model_validate(learned)
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
        who = caller.get()
        if MEDIA_TYPE in request.headers.get("accept", ""):
            return sources.feeds.setdefault((who.name, who.is_admin), Feed(sources, who.may_see)).stream()
        return JSONResponse(Viewer(sources.monitor, who.may_see).next_update() | {"health": sources.health()})

    return api


class Feed:
    """The events of one caller, each made once for all of its viewers, as they come; it does nothing without any.

    Its first viewer, and one that has missed events as it read too slowly, begin with a ``snapshot``, and get an
    ``update`` for changes, at most every ``interval`` seconds. As a context manager it counts a viewer.

    ``quiet``: seconds after which an update is sent in any case.
    """

    def __init__(
        self, sources: MonitorSources, may_see: MaySee, interval: float = INTERVAL_SECONDS, quiet: float = QUIET_SECONDS
    ) -> None:
        self.viewers = 0
        self._sources = sources
        self._may_see = may_see
        self._interval = interval
        self._quiet = quiet
        self._viewer = Viewer(sources.monitor, may_see)
        self._health: dict[str, Any] | None = None
        self._updates: deque[bytes] = deque(maxlen=KEPT_UPDATES)
        self._number = 0  # of the last update
        self._snapshot: bytes | None = None  # since the next update was last due
        self._sent_at = self._due = 0.0

    def stream(self, send_timeout: float = STALL_SECONDS) -> EventStream:
        """Stream the events to one more viewer."""
        return EventStream(self.events(), self, ping_seconds=0, send_timeout=send_timeout)

    def __enter__(self) -> Self:
        if self.viewers >= MAX_VIEWERS:
            raise QuotaReached(
                f"this key has {self.viewers} streams of the monitor, and may have no more; close some", RETRY_SECONDS
            )
        self.viewers += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.viewers -= 1

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events for one viewer. The next one is chosen when the previous one was sent, so none are queued."""
        number: int | None = None
        while not self._sources.stopping():
            if time.monotonic() >= self._due:  # the first viewer to wake makes the event for all
                self._advance()
            kept = len(self._updates)
            missed = kept + 1 if number is None else self._number - number
            number = self._number
            if missed:
                yield self._whole() if missed > kept else b"".join(islice(self._updates, kept - missed, None))
            # Not longer, as the server may be stopping meanwhile.
            await anyio.sleep(min(self._quiet, max(0.0, self._due - time.monotonic())))

    def _advance(self) -> None:
        """Make an update, if there are changes, and decide when the next one is due."""
        cpu, now = time.thread_time(), time.monotonic()
        update, previous_health, self._health = self._viewer.next_update(), self._health, self._sources.health()
        self._snapshot = None
        is_due = self._health != previous_health or now - self._sent_at >= self._quiet
        answer = update | {"health": self._health}
        if previous_health is None:  # the first one is of everything
            self._snapshot, self._sent_at = encode("snapshot", answer | {"now": None}), now
        elif update["groups"] or update["left"] or is_due:
            self._updates.append(encode("update", answer))
            self._number, self._sent_at = self._number + 1, now
        self._due = now + max(self._interval, self._seconds_for(cpu))

    def _whole(self) -> bytes:
        """Return a snapshot for viewers that have missed updates. It may be newer than the last update.

        What changed since then is in the next update, too, which does no harm. Its ``now`` is that of the viewer, which
        tells from it how far the server's clock is from its own.
        """
        if self._snapshot is None:
            cpu = time.thread_time()
            update = Viewer(self._sources.monitor, self._may_see).next_update()
            self._snapshot = encode("snapshot", update | {"now": None, "health": self._sources.health()})
            self._due += self._seconds_for(cpu)
        return self._snapshot.replace(NO_TIME, NO_TIME[:-4] + str(self._sources.monitor.clock()).encode(), 1)

    def _seconds_for(self, cpu_began: float) -> float:
        """Return the time that what was computed since then may be repeated after."""
        return (time.thread_time() - cpu_began) * len(self._sources.feeds) / MAX_CPU_SHARE
