"""Servers whose batches run on scripted engines, behind an ingress."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
from fastapi import FastAPI

from darts_server.engine.scripted import Script
from darts_server.http import errors
from darts_server.http.resources import rollouts
from darts_server.policy.auto.options import AutoLimits, build_auto
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, build_policies
from darts_server.rollout.batches.registry import BatchRegistry
from darts_server.rollout.plan import Limits, Planner
from tests.ingress.servers import FakeServer, RunningIngress, ingress_over
from tests.ingress.test_batches import parse
from tests.rollout.helpers import Harness, Texts

PATH = "/darts/v1/rollouts"
SIZE = 4
SURE = Deadline(exploration=0.0)
EXPLORING = Deadline(exploration=1.0)
STEP_SECONDS = 0.004
"""Between two steps of all engines: about what a message between ingress and server takes."""

Scripts = Callable[[str, int], Script]


class SeededTexts(Texts):
    """Prompts are numbers, and seeds of their groups' tails."""

    def tail_seed(self, request: str) -> Sequence[int] | None:
        return (int(request),)


class ScriptedServer:
    """A server with one engine. ``deadline``: how the deadlines of its policies are computed."""

    def __init__(self, server: FakeServer, script: Scripts, deadline: Deadline) -> None:
        self.server = server
        self.harness = Harness(script, poll=0.002)
        policies = build_policies(Shaping(redundancy=1.5), deadline)
        auto = build_auto(Shaping(), deadline, AutoLimits(("uniform",)))

        def new_planner(overrides: Mapping[str, object]) -> Planner:
            return Planner(policies, str(overrides.get("name", "darts_cut")), Limits(64), auto)

        self.batches: BatchRegistry[str, list[int]] = BatchRegistry(self.harness.rollouts, SeededTexts(), new_planner)
        app = FastAPI()
        errors.install(app)
        app.include_router(rollouts.routes(self.batches), prefix="/darts/v1")
        server.app = app

    @property
    def parts(self) -> list[Any]:
        """The requests for parts of batches that it got."""
        return self.server.bodies(PATH)

    @property
    def deadlines(self) -> list[Any]:
        """The deadlines that were set."""
        return [each.json for each in self.server.received if each.path.endswith("/deadline")]

    async def server_events(self, body: Any) -> list[tuple[str, Any]]:
        """Send it a batch that is streamed; return the events."""
        async with httpx.AsyncClient(verify=False) as client:
            answer = await client.post(f"{self.server.url}{PATH}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return parse(answer)

    @property
    def tokens(self) -> int:
        """The most tokens that a running candidate has."""
        return max((candidate.generated for candidate in self.harness.engine.running), default=0)


class Cluster:
    """``servers`` behind an ingress, whose engines run in step once all have something to do."""

    def __init__(self, ingress: RunningIngress, servers: Sequence[ScriptedServer]) -> None:
        self.ingress = ingress
        self.servers = servers
        self.is_paused = False

    async def step(self) -> None:
        """Step all engines, in time with each other, until this is cancelled."""
        while not all(each.harness.engine.started for each in self.servers):
            await asyncio.sleep(STEP_SECONDS)
        while True:
            if not self.is_paused:
                for each in self.servers:
                    if not each.server.killed:
                        await each.harness.engine.step()
            await asyncio.sleep(STEP_SECONDS)

    async def post(self, count: int, **fields: Any) -> httpx.Response:
        return await self.ingress.post(PATH, batch(count, **fields))


def batch(count: int, **fields: Any) -> dict[str, Any]:
    return {"prompts": [{"text": str(number)} for number in range(count)], "group_size": SIZE, **fields}


@asynccontextmanager
async def cluster(count: int, script: Scripts, deadline: Deadline = SURE) -> AsyncIterator[Cluster]:
    """Run so many servers, and an ingress in front of them."""
    async with ingress_over(count) as (ingress, fakes):
        servers = [ScriptedServer(fake, script, deadline) for fake in fakes]
        running = Cluster(ingress, servers)
        stepping = asyncio.create_task(running.step())
        try:
            yield running
        finally:
            stepping.cancel()
            with suppress(asyncio.CancelledError):
                await stepping
