"""Servers on this machine, in a thread: any app, or the server's own routes over the scripted engine."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from unittest.mock import Mock

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from darts_server.control import Control
from darts_server.engine.scripted import Script, ScriptedEngine, generated
from darts_server.exceptions import InvalidRequest
from darts_server.http import errors
from darts_server.http.routes import router
from darts_server.rollout.batches.registry import BatchRegistry
from darts_server.rollout.batches.submission import Submissions
from darts_server.rollout.learned.prompts import Prompts
from darts_server.rollout.learned.rewards import Rewards
from darts_server.rollout.observers.feedback import Feedback
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.voting.confidence import Confidence
from darts_server.rollout.voting.votes import Votes
from darts_server.settings import load
from darts_server.store import Store
from darts_server.types import FinishReason, PromptSpec, Sample

PATIENCE = 20.0
STEP_SECONDS = 0.002


class Texts:
    """Makes requests that are the prompts as texts; a text with an ``x`` is refused, and ``slow`` ones take a while."""

    async def request(self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str) -> str:
        if "x" in (prompt.text or ""):
            raise InvalidRequest("text", "has an x")
        if "slow" in (prompt.text or ""):
            await asyncio.sleep(0.3)
        return prompt.text or " ".join(str(token) for token in prompt.token_ids or ())

    def key(self, request: str) -> str:
        return f"key of {request}"

    def tail_seed(self, request: str) -> Sequence[int] | None:
        return (1,)

    def sample(self, output: list[int]) -> Sample:
        return Sample(output, generated(output, 0).logprobs, f"{len(output)} tokens", FinishReason.STOP)


class Listening:
    """A server that answers at ``url``."""

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
        """Every connection is lost, as by a cable that is cut."""

        def drop() -> None:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()

        assert self._loop is not None
        self._loop.call_soon_threadsafe(drop)


def wait_until(true: Callable[[], bool]) -> None:
    """Return as soon as it is so; a failure if it is not in time."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


@contextmanager
def listening(app: ASGIApp) -> Iterator[Listening]:
    """The app on a free port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    found = Listening(server)
    thread = threading.Thread(target=found.run)
    thread.start()
    try:
        wait_until(lambda: found.ready)
        yield found
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


class Served:
    """The server's routes, and what runs behind them."""

    def __init__(self, listener: Listening, engine: ScriptedEngine) -> None:
        self.url = listener.url
        self.engine = engine
        self.drop_connections = listener.drop_connections

    def wait_running(self) -> None:
        wait_until(lambda: bool(self.engine.running))

    def wait_idle(self) -> None:
        """Until the engine runs nothing; what it runs in these tests would take much longer than that."""
        wait_until(lambda: not self.engine.running)


@contextmanager
def serving(script: Callable[[str, int], Script]) -> Iterator[Served]:
    """Our routes on a port."""
    with application(script) as (app, engine), listening(app) as listener:
        yield Served(listener, engine)


@contextmanager
def application(script: Callable[[str, int], Script]) -> Iterator[tuple[FastAPI, ScriptedEngine]]:
    """Our routes over an engine that makes a step every other millisecond during the app's lifespan."""
    engine = ScriptedEngine(script)
    control = Control(load({}, None))
    with Store() as store:
        prompts, rewards, provenance = Prompts(store), Rewards(store), Provenance()
        sureness = Confidence(store)
        feedback = Feedback(rewards, Mock(), Mock(), on_reward=[sureness.rewarded])
        rollouts: Rollouts[str, list[int]] = Rollouts(
            engine,
            *control.configuration(),
            documents=store,
            observers=(provenance, feedback),
            peek_interval=STEP_SECONDS,
            batch_window=0,
            on_return=feedback.trajectory_returned,
        )
        control.drive(rollouts)
        batches = BatchRegistry(Submissions(rollouts, Texts(), control.planner), interval=STEP_SECONDS)
        votes = Votes(rollouts, Texts(), sureness, Mock())

        @asynccontextmanager
        async def stepping(_: FastAPI) -> AsyncGenerator[None, None]:
            async def steps() -> None:
                while True:
                    await engine.step()
                    await asyncio.sleep(STEP_SECONDS)

            task = asyncio.create_task(steps())
            yield
            task.cancel()

        app = FastAPI(lifespan=stepping)
        errors.install(app)
        told = router(
            provenance,
            prompts,
            rewards,
            store,
            control,
            batches=lambda: batches,
            votes=lambda: votes,
            feedback=lambda: feedback,
            updates=Mock(),
            viewed=Mock(),
            guarded=False,
        )
        app.include_router(told)
        yield app, engine
