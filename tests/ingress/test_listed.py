"""Servers that come and go."""

import asyncio
from collections.abc import Sequence

import pytest
from starlette.requests import Request
from starlette.responses import Response

from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.member import State
from tests.ingress.servers import FakeServer, fake_servers, ingress, until

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


class Listing:
    """A list of servers. ``broken``: whether it cannot be read."""

    def __init__(self, *servers: FakeServer) -> None:
        self.servers: Sequence[FakeServer] = servers
        self.broken = False
        self.reads = 0

    async def __call__(self) -> list[str]:
        self.reads += 1
        if self.broken:
            raise ConnectionError("the list is elsewhere")
        return [server.url for server in self.servers]

    async def wait_for_reads(self, count: int) -> None:
        """Wait until it was read so many times more."""
        reads = self.reads
        await until(lambda: self.reads >= reads + count)


def hosts(fleet: Fleet) -> list[str]:
    return [f"http://{member.name}" for member in fleet.members]


async def test_a_server_that_joins_gets_requests() -> None:
    async with fake_servers(2) as (one, two):
        listing = Listing(one)
        async with ingress((), listing) as running:
            assert hosts(running.fleet) == [one.url]
            listing.servers = [one, two]
            await until(lambda: len(running.fleet.serving) == 2)
            answers = [(await running.post(PATH, {"prompt": "p", "n": 2})).json()["server"] for _ in range(4)]
            assert sorted(answers) == ["a", "a", "b", "b"]


async def test_a_server_that_was_stopped_leaves_when_its_requests_have_ended() -> None:
    async with fake_servers(2) as (one, two):
        listing, release = Listing(one, two), asyncio.Event()

        async def wait(_: Request) -> Response:
            await release.wait()
            return Response(b"done")

        one.on("POST", PATH, wait)
        two.on("POST", PATH, wait)
        async with ingress((), listing) as running:
            calls = [asyncio.create_task(running.post(PATH, {"prompt": "p", "n": 2})) for _ in range(2)]
            await until(lambda: one.running == two.running == 1)
            one.health, one.retry_after = 503, "30"  # it drains
            listing.servers = [two]
            await until(lambda: running.fleet.members[0].state is State.UNHEALTHY)
            reads = listing.reads
            await until(lambda: listing.reads > reads + 1)
            assert hosts(running.fleet) == [one.url, two.url]
            release.set()
            assert [(await call).text for call in calls] == ["done", "done"]
            await until(lambda: hosts(running.fleet) == [two.url])
            health = (await running.client.get("/health")).json()
            assert [f"http://{each['name']}" for each in health["replicas"]] == [two.url]


async def test_servers_that_answer_stay_while_the_list_is_lost_or_empty() -> None:
    async with fake_servers(1) as (one,):
        listing = Listing(one)
        async with ingress((), listing) as running:
            for broken in (True, False):
                listing.broken, listing.servers = broken, []
                await listing.wait_for_reads(3)
                assert [member.serves for member in running.fleet.members] == [True]
