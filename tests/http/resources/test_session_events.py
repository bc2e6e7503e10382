"""The stream of a group's events, in which a reader may be slow."""

import asyncio
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI

from darts_server.http.resources.sessions import add_routes
from tests.rollout.sessions.test_registry import World

pytestmark = pytest.mark.anyio


async def test_a_group_that_ends_while_its_events_are_sent_sends_all_of_them() -> None:
    world = World()
    group = await world.create(size=2, extra=0, policy="off")
    router = APIRouter(prefix="/darts/v1")
    add_routes(router, world.registry)
    app = FastAPI()
    app.include_router(router)
    received: list[bytes] = []

    async def send(message: Any) -> None:
        body = message.get("body")
        if body and not received:
            # The group ends while the first event is on its way.
            for session in group.sessions:
                world.finish(session, 3)
            await asyncio.sleep(0)
        if body:
            received.append(body)

    async def receive() -> Any:
        await asyncio.sleep(3600)

    path = f"/darts/v1/session-groups/{group.spec.group_id}/events"
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"accept", b"text/event-stream")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("localhost", 1),
        "client": ("localhost", 2),
        "root_path": "",
        "state": {},
    }
    async with asyncio.timeout(10):
        await app(scope, receive, send)
    kinds = [line.removeprefix("event: ") for line in b"".join(received).decode().splitlines() if "event: " in line]
    assert kinds == ["started", "started", "ended", "ended", "completed"] == [event.kind for event in group.events]
