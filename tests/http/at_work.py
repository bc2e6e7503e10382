"""A server at work for a browser: our routes and the page, over groups on the scripted engine, by real time."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from random import Random
from unittest.mock import Mock

import uvicorn
from fastapi import FastAPI, Response

from darts_server.engine.scripted import Script, ScriptedEngine
from darts_server.http import errors, page
from darts_server.http.body import BodyLimits
from darts_server.http.resources.monitor import MonitorSources
from darts_server.http.security.access import Access, Keys
from darts_server.http.security.middleware import SecurityMiddleware
from darts_server.policy.shaping import Shaping
from darts_server.records import UpdateRecord
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.observers.monitor import Monitor
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.observers.reward_matching import RewardMatcher
from darts_server.rollout.plan import Limits, Planner
from darts_server.rollout.rollouts import Intervals, Rollouts
from darts_server.rollout.spec import GroupSpec
from darts_server.store import Store
from darts_server.types import RequestOptions, UpdateOutcome
from darts_server.weights.coordinator import State
from darts_server.weights.updates import Updates
from tests.http.serving import our_routes
from tests.rollout.helpers import collect

STEP_SECONDS = 0.02
STARTUP_SECONDS = 20.0


class Work:
    """Groups of 8 that the test requests from the thread of the browser."""

    def __init__(self, store: Store) -> None:
        self.engine = ScriptedEngine(lambda request, index: Script(length=heavy_tail(request, index)))
        self.provenance, self.statistics = Provenance(), Statistics(store)
        self.reward_matcher = RewardMatcher(self.statistics.rewards, Mock(), Mock())
        self.rollouts: Rollouts[str, list[int]] = Rollouts(
            self.engine,
            Planner({"uniform": Shaping(redundancy=1.5)}, "uniform", Limits(1024)),
            self.statistics,
            Intervals(allocation=0),
        )
        self.live = Monitor(self.rollouts)
        events = self.rollouts.observers
        events.candidates_started.add(self.live.candidates_started)
        events.trajectory_returned.add(self.reward_matcher.trajectory_returned)
        events.group_ended.add(self.provenance.group_ended, self.reward_matcher.group_ended, self.live.group_ended)
        self.stopping: Callable[[], bool] = lambda: False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._groups: set[asyncio.Task[object]] = set()

    async def steps(self) -> None:
        """The engine goes on for ever."""
        self._loop = asyncio.get_running_loop()
        while True:
            await self.engine.step()
            await asyncio.sleep(STEP_SECONDS)

    def ask(self, *names: str, size: int = 8) -> None:
        """Begin a group for each of these prompts."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._begin(names, size), self._loop).result()

    async def _begin(self, names: Sequence[str], size: int) -> None:
        plan = self.rollouts.plan(size, RequestOptions("uniform"))
        assert plan is not None
        for name in names:
            allocation = await self.rollouts.allocator.allocate(plan, name)
            group_id = f"group-{self.live.ended + self.rollouts.running}"
            run = self.rollouts.start(GroupSpec.of_plan(plan, name, group_id, name, (1,)), plan, allocation)
            task = asyncio.create_task(collect(run))
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)


def heavy_tail(request: str, index: int) -> int:
    """Lengths as prompts have them: most are short, some very long."""
    rng = Random(f"{request}/{index}")
    return min(400, round(20 * rng.lognormvariate(0.4, 0.8)) + 5)


@contextmanager
def at_work(*keys: str) -> Iterator[tuple[str, Work]]:
    """The address of the page, and what runs behind it."""
    with Store() as store, socket.create_server(("127.0.0.1", 0)) as listener:
        work = Work(store)
        server = uvicorn.Server(uvicorn.Config(_app(work, store, keys), log_level="warning", lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        work.stopping = lambda: server.should_exit
        thread.start()
        try:
            deadline = time.monotonic() + STARTUP_SECONDS
            while not server.started:
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/darts/", work
        finally:
            server.should_exit = True
            thread.join()


def _app(work: Work, store: Store, keys: Sequence[str]) -> FastAPI:
    @asynccontextmanager
    async def working(_: FastAPI) -> AsyncIterator[None]:
        steps = asyncio.create_task(work.steps())
        yield
        steps.cancel()

    app, access = FastAPI(lifespan=working), Access(Keys(keys))
    app.add_middleware(SecurityMiddleware, access=access, limits=BodyLimits(2**20), on_refusal=Mock())
    errors.install(app)
    seconds = {"transfer": 0.2, "check": 0.1, "wait": 1.4, "load": 0.3}
    updates = Mock(spec=Updates, version=7, state=State.SERVING)
    updates.last = UpdateRecord(7, UpdateOutcome.COMPLETED, "push", "finish", False, seconds)
    monitored = MonitorSources(
        work.live, work.statistics.rewards, updates, lambda: store.fault, lambda: work.stopping()
    )
    more = {"updates": updates, "monitored": monitored, "needs_key": bool(keys)}
    app.include_router(our_routes(store, work.statistics, work.provenance, work.reward_matcher, **more))
    app.include_router(page.routes())

    @app.get("/health")
    async def health() -> Response:
        return Response()

    return app
