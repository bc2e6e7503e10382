"""The page of an ingress, and the feed of all servers' groups for it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from darts_server.http import page
from darts_server.http.resources.monitor import MonitorAnswer
from darts_server.http.sse import MEDIA_TYPE, encode
from tests.http.at_work import at_work
from tests.ingress.servers import FakeServer, RunningIngress, fake_servers, ingress, ingress_over, until

pytestmark = pytest.mark.anyio
LIVE = "/darts/v1/live"


def event(now: float, *groups: dict[str, Any], **fields: Any) -> dict[str, Any]:
    health = {
        "weights": {"version": fields.pop("version", 3), "state": fields.pop("state", "serving"), "last": None},
        "rewards": fields.pop("rewards", None),
        "store_fault": fields.pop("fault", None),
    }
    return {"now": now, "running": 1, "candidates": 4, "groups": list(groups), "left": [], "health": health, **fields}


def group(name: str, began: float, **fields: Any) -> dict[str, Any]:
    candidate = {"index": 0, "state": "running", "tokens": 5, "start": began + 1}
    return {"group_id": name, "began": began, "policy": "uniform", "candidates": [candidate], **fields}


class LiveServer:
    """A server with a feed. What is put into ``events`` is sent to each viewer."""

    def __init__(self, server: FakeServer, snapshot: dict[str, Any]) -> None:
        self.server = server
        self.snapshot = snapshot
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.viewers = 0
        server.on("GET", LIVE, self._live)

    async def _live(self, request: Request) -> Response:
        if MEDIA_TYPE not in request.headers.get("accept", ""):
            return JSONResponse(self.snapshot)
        return StreamingResponse(self._stream(), media_type=MEDIA_TYPE)

    async def _stream(self) -> AsyncIterator[bytes]:
        self.viewers += 1
        try:
            yield encode("snapshot", self.snapshot)
            while (update := await self.events.get()) is not None:
                yield encode("update", update)
        finally:
            self.viewers -= 1


@asynccontextmanager
async def cluster(count: int) -> AsyncIterator[tuple[RunningIngress, list[LiveServer]]]:
    """Run servers with one running group each, whose clocks differ."""
    async with fake_servers(count) as fakes:
        servers = [
            LiveServer(fake, event(1000.0 * at, group(fake.name, 1000.0 * at - 2))) for at, fake in enumerate(fakes)
        ]
        async with ingress(fakes) as running:
            yield running, servers


@asynccontextmanager
async def viewing(running: RunningIngress) -> AsyncIterator[AsyncIterator[tuple[str, dict[str, Any]]]]:
    """Open the feed; yield its events."""
    async with running.client.stream("GET", LIVE, headers={"Accept": MEDIA_TYPE}) as answer:
        assert answer.status_code == 200
        yield read(answer)


async def read(answer: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    name = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            data = json.loads(line[6:])
            MonitorAnswer.model_validate(data)
            yield name, data


async def next_with(events: AsyncIterator[tuple[str, dict[str, Any]]], key: str) -> dict[str, Any]:
    """Return the next event in which a field is not empty."""
    async with asyncio.timeout(30):
        async for _, data in events:
            if data[key]:
                return data
    raise AssertionError("the feed ended")


async def test_the_page_is_the_servers_own() -> None:
    async with ingress_over(1) as (running, [server]):
        answer = await running.client.get("/darts/")
        assert (answer.status_code, answer.text) == (200, page.document())
        assert answer.headers["content-security-policy"] == page.content_policy()
        moved = await running.client.get("/darts")
        assert (moved.status_code, moved.headers["location"]) == (307, "darts/")
        assert not server.received


async def test_groups_of_real_monitors_are_followed_from_their_start_to_their_end() -> None:
    with at_work() as (one, first), at_work() as (two, second):
        urls = [url.removesuffix("/darts/") for url in (one, two)]
        async with ingress((), server_list=urls) as running, viewing(running) as events:
            name, data = await anext(events)
            assert (name, data["groups"]) == ("snapshot", [])
            for work in (first, second):
                await asyncio.to_thread(work.ask, "math/1", "math/2")
            groups: dict[tuple[str, str], dict[str, Any]] = {}
            async with asyncio.timeout(60):
                while len(groups) < 4 or not all("ended" in each for each in groups.values()):
                    _, data = await anext(events)
                    for news in data["groups"]:
                        before = groups.setdefault((news["server"], news["group_id"]), {})
                        assert before or "began" in news
                        before.update(news)
            assert {server for server, _ in groups} == {url.removeprefix("http://") for url in urls}
            for each in groups.values():
                assert each["began"] < each["ended"] <= data["now"]
            while data["running"]:
                _, data = await anext(events)


async def test_what_ran_on_a_server_that_is_lost_leaves_the_feed_and_one_that_is_back_is_in_it() -> None:
    async with cluster(2) as (running, servers), viewing(running) as events:
        await anext(events)
        servers[1].snapshot = event(1010.0, group("c", 1009.0))
        servers[1].events.put_nowait(None)
        left, groups = list[str](), list[str]()
        async with asyncio.timeout(30):
            async for _, data in events:
                left += data["left"]
                groups += [each["group_id"] for each in data["groups"]]
                if "b" in left and "c" in groups:
                    break
        assert (left, groups) == (["b"], ["c"])
        await servers[0].server.kill()
        gone = await next_with(events, "left")
        assert (gone["left"], gone["running"]) == (["a"], 1)


async def test_when_a_viewer_disconnects_or_the_ingress_stops_the_feeds_of_the_servers_end() -> None:
    async with cluster(2) as (running, servers):
        async with viewing(running) as events:
            await anext(events)
            assert [each.viewers for each in servers] == [1, 1]
        for each in servers:
            each.events.put_nowait(event(1.0))  # a server notices it when it sends
        await until(lambda: [each.viewers for each in servers] == [0, 0])
        async with viewing(running) as events:
            await anext(events)
            running.lifecycle.stop(Exception("it stops"))  # type: ignore[arg-type]
            async with asyncio.timeout(30):
                assert [name async for name, _ in events] == []


async def test_callers_see_what_their_own_key_shows_and_without_one_what_servers_say() -> None:
    async with cluster(2) as (running, servers):
        for each in servers:
            each.server.needs_key = True
        for accept in (MEDIA_TYPE, "*/*"):
            refused = await running.client.get(LIVE, headers={"Accept": accept})
            assert (refused.status_code, refused.json()["error"]["message"]) == (401, "key?")
        answer = await running.client.get(LIVE, headers={"Authorization": "Bearer mine"})
        assert answer.status_code == 200
        sent = [got for each in servers for got in each.server.received if got.path == LIVE]
        assert {got.headers["authorization"] for got in sent} == {"Bearer mine"}
