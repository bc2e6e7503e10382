"""Servers behind an ingress learn from each other's groups."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from darts_server.http import errors
from darts_server.http.resources import observations, state
from darts_server.ingress.replicas import sharing
from darts_server.rollout.allocation import auto
from darts_server.rollout.learned import latency
from darts_server.store import Store
from tests.ingress.servers import OBSERVATIONS, FakeServer, RunningIngress, fake_servers, ingress, until
from tests.rollout.exchange.learners import Learner, play
from tests.store.reading import saved_documents

pytestmark = pytest.mark.anyio


class LearningServer:
    """A server that learns. ``start`` restarts it, with another store if it keeps none."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        server.shares = True
        self.start(Store())

    def start(self, store: Store) -> None:
        self.store = store
        self.learner = Learner(store)  # type: ignore[arg-type]
        app = FastAPI()
        errors.install(app)
        app.include_router(observations.routes(self.learner.exchange), prefix="/darts/v1")
        app.include_router(state.routes(store, self.learner.exchange), prefix="/darts/v1")
        self.server.app = app

    def play(self, seed: int, groups: int = 20) -> None:
        play(self.learner, np.random.default_rng(seed), groups)

    @property
    def learned(self) -> dict[str, Any]:
        """Statistics of prompts and deadlines."""
        kinds = ("prompt", "prompt_rewards", "losses", "lost_groups", "deadline")
        return {
            f"{kind} {key}": document for kind in kinds for key, document in saved_documents(self.store, kind).items()
        }

    @property
    def groups(self) -> int:
        """Groups of all prompts that it has learned from."""
        return sum(document["groups"] for document in saved_documents(self.store, "prompt").values())


@asynccontextmanager
async def cluster(count: int, **settings: Any) -> AsyncIterator[tuple[RunningIngress, list[LearningServer]]]:
    async with fake_servers(count) as fakes:
        servers = [LearningServer(fake) for fake in fakes]
        async with ingress(fakes, **settings) as running:
            yield running, servers


def are_equal(servers: list[LearningServer]) -> bool:
    return all(each.learned == servers[0].learned for each in servers) and bool(servers[0].learned)


async def counted(running: RunningIngress, outcome: str) -> float:
    """Observations that had this outcome, on all servers."""
    lines = (await running.client.get("/metrics")).text.splitlines()
    name = "darts_ingress_observations_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and f'"{outcome}"' in line)


async def test_all_servers_learn_from_the_groups_of_each_once() -> None:
    async with cluster(3) as (running, servers):
        for number, each in enumerate(servers):
            each.play(number)
            await until(lambda: are_equal(servers))
        sent = sum(each.learner.exchange.log.last for each in servers)
        assert await counted(running, "learned") == 2 * sent
        assert await counted(running, "repeated") == await counted(running, "missed") == 0


async def test_a_server_that_restarts_with_its_store_learns_nothing_twice() -> None:
    async with cluster(2) as (running, servers):
        for number, each in enumerate(servers):
            each.play(number)
        total = sum(each.groups for each in servers)
        await until(lambda: [each.groups for each in servers] == [total] * 2)
        servers[1].start(servers[1].store)
        servers[0].play(2)
        servers[1].play(3)
        await until(lambda: servers[0].groups == servers[1].groups > total)
        assert await counted(running, "missed") == 0


async def test_a_new_server_gets_the_state_of_another_one_but_not_what_was_measured_there() -> None:
    async with fake_servers(2) as fakes:
        servers = [LearningServer(fake) for fake in fakes]
        measured = [(latency.KIND, latency.KEY), (auto.KIND, "8")]
        for each in servers:
            for name in measured:
                each.store.put(*name, {"value": f'"{each.server.name}"'})
        servers[0].store.put(auto.KIND, "4", {"value": "1"})
        servers[0].play(0)
        servers[0].learner.statistics.flush()
        restarted = Learner(servers[0].store)  # type: ignore[arg-type]
        servers[0].start(servers[0].store)  # what it learned before is in no log
        assert not restarted.exchange.is_new
        async with ingress(fakes):
            await until(lambda: are_equal(servers))
            for each in servers:
                for name in measured:
                    assert each.store.get(*name) == {"value": f'"{each.server.name}"'}
            assert servers[1].store.get(auto.KIND, "4") is None
            servers[1].play(1)
            await until(lambda: are_equal(servers))


@asynccontextmanager
async def with_new_server(count: int) -> AsyncIterator[tuple[list[FakeServer], list[LearningServer]]]:
    """Run servers, of which all but the last have learned what no log has any more."""
    async with fake_servers(count) as fakes:
        servers = [LearningServer(fake) for fake in fakes]
        servers[0].play(0)
        servers[0].learner.statistics.flush()
        for each in servers[:-1]:
            each.store.restore(servers[0].store.export())
            each.start(each.store)
        yield fakes, servers


def refusing(app: ASGIApp | None, method: str, path: str, status: int, times: float = inf) -> ASGIApp:
    """Let an app refuse a route so often."""
    assert app is not None
    refused = 0

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal refused
        refuses = (scope["method"], scope["path"]) == (method, path) and refused < times
        refused += refuses
        await (JSONResponse({"error": {"message": "not now"}}, status) if refuses else app)(scope, receive, send)

    return refuse


def got(server: FakeServer, method: str, path: str) -> int:
    """How often a server got a request."""
    return sum((each.method, each.path) == (method, path) for each in server.received)


@pytest.mark.parametrize(("at", "method"), [(0, "GET"), (1, "PUT")])
async def test_a_new_server_gets_the_state_however_often_that_has_failed(
    at: int, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sharing, "MAX_COPY_WAIT", 0.01)
    monkeypatch.setattr(sharing, "RETRY_SECONDS", 0.01)
    async with with_new_server(2) as (fakes, servers):
        fakes[at].app = refusing(fakes[at].app, method, sharing.STATE, 503, times=5)
        servers[0].play(1)
        async with ingress(fakes):
            await until(lambda: got(fakes[at], method, sharing.STATE) > 5)
            await until(lambda: are_equal(servers))
    assert caplog.text.count("has not got what others have learned") == 1
    assert "does not learn from the others" not in caplog.text


async def test_another_ingress_repeats_nothing() -> None:
    async with cluster(2) as (_, servers):
        servers[0].play(0)
        await until(lambda: are_equal(servers))
        async with ingress([each.server for each in servers]) as second:
            servers[1].play(1)
            await until(lambda: are_equal(servers))
            assert await counted(second, "missed") == 0


@pytest.mark.parametrize("status", [400, 413])
async def test_of_many_observations_only_those_that_are_wrong_are_refused(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(2) as (running, servers):
        wrong = {3, 60}
        app = servers[1].server.app

        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["method"] == "GET":
                await app(scope, receive, send)  # type: ignore[misc]
                return
            message = await receive()
            numbers = {each["number"] for each in json.loads(message["body"])["observations"]}

            async def again() -> Message:
                return message

            await (JSONResponse({"error": {"message": "no"}}, status) if numbers & wrong else app)(scope, again, send)  # type: ignore[misc]

        servers[1].server.app = refuse
        servers[0].play(0, 80)
        log = servers[0].learner.exchange.log
        assert log.last > 100
        await until(lambda: servers[1].learner.exchange.positions.of(log.life) == log.last)
        await asyncio.sleep(0.2)
        assert await counted(running, "learned") == log.last - 2
        assert (await counted(running, "refused"), await counted(running, "missed")) == (2, 0)
        assert caplog.text.count("refused observations") == 1


async def test_observations_go_with_the_ingresss_own_key() -> None:
    async with cluster(2, admin_key="secret") as (_, servers):
        for each in servers:
            each.server.needs_key = True
        servers[0].play(0)
        await until(lambda: are_equal(servers))
        sent = [each for server in servers for each in server.server.received if each.path == OBSERVATIONS]
        assert {each.headers.get("authorization") for each in sent} == {"Bearer secret"}
