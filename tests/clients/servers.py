"""Servers in a thread of this process: any app, or the server's own routes on the scripted engine."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from unittest.mock import Mock

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from darts_server.control import Control
from darts_server.engine.scripted import Script, ScriptedEngine
from darts_server.http import errors
from darts_server.http.resources.monitor import MonitorSources
from darts_server.http.security.heads import LimitedHttp
from darts_server.records import UpdateRecord
from darts_server.rollout.batches.registry import BatchRegistry, BatchRetention
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.observers.monitor import Monitor
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.observers.reward_matching import RewardMatcher
from darts_server.rollout.rollouts import Intervals, Rollouts
from darts_server.rollout.sessions.registry import SessionRegistry
from darts_server.rollout.voting import Confidence, VoteRunner
from darts_server.settings import load
from darts_server.store import Store
from darts_server.types import PromptSpec, Sample, UpdateOutcome
from darts_server.verify.types import Verifier
from darts_server.weights.coordinator import Coordinator, State
from tests.http.serving import our_routes
from tests.rollout.helpers import AtOnce, Texts

WAIT_SECONDS = 60.0
STEP_SECONDS = 0.002


class SlowTexts(Texts):
    """Takes token ids and sampling too; a text with ``slow`` takes a while."""

    async def make_request(self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str) -> str:
        if "slow" in (prompt.text or ""):
            await asyncio.sleep(0.3)
        text = prompt.text or " ".join(str(token) for token in prompt.token_ids or ())
        return await super().make_request(PromptSpec(text=text), {}, size, request_id)

    async def to_sample(self, output: list[int]) -> Sample:
        return replace(await super().to_sample(output), text=f"{len(output)} tokens")


class Listener:
    """A server that listens at ``url``."""

    def __init__(self, server: uvicorn.Server) -> None:
        self._server = server
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve()

        asyncio.run(serve())

    @property
    def ready(self) -> bool:
        return self._server.started

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def drop_connections(self) -> None:
        """Abort every connection."""

        def drop() -> None:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()

        assert self._loop is not None
        self._loop.call_soon_threadsafe(drop)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds. Fail after WAIT_SECONDS seconds."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)


@contextmanager
def listening(app: ASGIApp, protocol: type[asyncio.Protocol] = LimitedHttp) -> Iterator[Listener]:
    """Serve the app on a free port. ``protocol`` is uvicorn's HTTP protocol, by default the server's own."""
    config = uvicorn.Config(app, port=0, http=protocol, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    listener = Listener(server)
    thread = threading.Thread(target=listener.run)
    thread.start()
    try:
        wait_until(lambda: listener.ready)
        yield listener
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)


class RunningServer:
    """The server's routes on a port, and their engine."""

    def __init__(self, listener: Listener, engine: ScriptedEngine) -> None:
        self.url = listener.url
        self.engine = engine
        self.drop_connections = listener.drop_connections

    def wait_running(self) -> None:
        wait_until(lambda: bool(self.engine.running))

    def wait_idle(self) -> None:
        """Wait until the engine is idle. Without a cancellation that would take much longer."""
        wait_until(lambda: not self.engine.running)


@contextmanager
def serving(script: Callable[[str, int], Script], verifier: Verifier | None = None) -> Iterator[RunningServer]:
    """Serve our routes on a port."""
    with application(script, verifier=verifier) as (app, engine), listening(app) as listener:
        yield RunningServer(listener, engine)


@contextmanager
def application(
    script: Callable[[str, int], Script],
    step: float = STEP_SECONDS,
    needs_key: bool = False,
    verifier: Verifier | None = None,
) -> Iterator[tuple[FastAPI, ScriptedEngine]]:
    """Build an app with our routes, whose engine makes a step every 2 ms during the app's lifespan.

    ``app.state.sessions`` has the groups of sessions. The weights had an update that took 2 seconds.
    """
    engine = ScriptedEngine(script)
    # The name of a verifier lets batches choose `informative`. `verifier` stands for it.
    control = Control(load({"policy": "uniform", "verifier": "boxed" if verifier else ""}, None))
    with Store() as store:
        statistics, provenance = Statistics(store), Provenance()
        confidence = Confidence(store)
        reward_matcher = RewardMatcher(statistics.rewards, Mock(), Mock(), on_reward=[confidence.learn_reward])
        rollouts: Rollouts[str, list[int]] = Rollouts(
            engine, control.planner, statistics, Intervals(poll=STEP_SECONDS, allocation=0), verifier=verifier
        )
        rollouts.observers.trajectory_verified.add(reward_matcher.trajectory_verified)
        rollouts.observers.trajectory_returned.add(reward_matcher.trajectory_returned)
        rollouts.observers.group_ended.add(provenance.group_ended, reward_matcher.group_ended)
        control.connect(rollouts)
        kept = BatchRetention(resume_seconds=3600.0)  # so that a durable batch ends early only if it is cancelled
        batches = BatchRegistry(rollouts, SlowTexts(), control.new_planner, kept)
        votes = VoteRunner(rollouts, SlowTexts(), confidence, Mock(), AtOnce())

        @asynccontextmanager
        async def stepping(_: FastAPI) -> AsyncGenerator[None, None]:
            async def steps() -> None:
                while True:
                    await engine.step()
                    await asyncio.sleep(step)

            task = asyncio.create_task(steps())
            yield
            task.cancel()

        app = FastAPI(lifespan=stepping)
        app.state.sessions = SessionRegistry(rollouts)
        errors.install_handlers(app)
        live, updates = Monitor(rollouts, app.state.sessions), Mock(spec=Coordinator, version=7, state=State.SERVING)
        rollouts.observers.group_ended.add(live.group_ended)
        updates.last = UpdateRecord(7, UpdateOutcome.COMPLETED, "push", "finish", False, {"wait": 1.7, "load": 0.3})
        monitor_sources = MonitorSources(live, statistics.rewards, updates, store)
        app.state.sessions = SessionRegistry(rollouts)
        parts = {"control": control, "batches": batches, "votes": votes, "monitor_sources": monitor_sources}
        parts["session_registry"] = app.state.sessions
        app.include_router(our_routes(store, statistics, provenance, reward_matcher, needs_key=needs_key, **parts))
        yield app, engine
