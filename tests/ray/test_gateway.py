"""The ingress as Ray Serve runs it: with lifespan events, behind a proxy."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import Message

from darts_server.ingress.settings import IngressSettings
from darts_server.ray.gateway import Gateway, list_through
from tests.ingress.servers import POLL_SECONDS, FakeServer, fake_servers

pytestmark = pytest.mark.anyio
SETTINGS = IngressSettings((), "0.0.0.0", poll_interval=POLL_SECONDS, poll_timeout=30.0, allow_unauthenticated=True)


class Directory:
    """The handle of a directory."""

    def __init__(self, *servers: FakeServer) -> None:
        self.servers = servers

    @property
    def urls(self) -> "Directory":
        return self

    async def remote(self) -> list[str]:
        return [server.url for server in self.servers]


@asynccontextmanager
async def started(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    """Run it from the startup event to the shutdown event."""
    events, sent = asyncio.Queue[Message](), asyncio.Queue[Message]()
    life = asyncio.create_task(gateway({"type": "lifespan"}, events.get, sent.put))
    await events.put({"type": "lifespan.startup"})
    assert await sent.get() == {"type": "lifespan.startup.complete"}
    transport = httpx.ASGITransport(gateway)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        yield client
    await events.put({"type": "lifespan.shutdown"})
    assert await sent.get() == {"type": "lifespan.shutdown.complete"}
    await life


async def test_it_serves_with_the_servers_of_the_directory() -> None:
    async with fake_servers(2) as (one, two):
        directory = Directory(one)
        async with started(Gateway(list_through(directory), SETTINGS)) as client:
            body = {"prompt": "p", "n": 2}
            assert (await client.post("/v1/completions", json=body)).json() == {"server": "a"}
            directory.servers = (one, two)

            async def both() -> bool:
                return len([await client.get("/health")][0].json()["replicas"]) == 2

            while not await both():
                await asyncio.sleep(POLL_SECONDS)
            answers = {(await client.post("/v1/completions", json=body)).json()["server"] for _ in range(4)}
            assert answers == {"a", "b"}


async def test_without_permission_servers_without_a_key_are_not_used_behind_a_proxy() -> None:
    async with fake_servers(1) as (one,):
        settings = IngressSettings((), "0.0.0.0", poll_interval=POLL_SECONDS)
        async with started(Gateway(list_through(Directory(one)), settings)) as client:
            answer = await client.post("/v1/completions", json={"prompt": "p"})
            assert answer.status_code == 503
            assert "without a key" in answer.text
