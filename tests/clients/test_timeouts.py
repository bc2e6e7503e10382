"""Timeouts of the clients, on real sockets."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from darts_client import Client, TimedOut

from .servers import listening
from .transcripts import BATCH, GROUPS

SIZES: dict[str, Any] = {"group_size": 2, "max_tokens": 16}
PROMPTS = ["a", "b"]


class SlowServer:
    """Sends half of a batch, pauses with or without comments, and sends the rest."""

    def __init__(self) -> None:
        self.url = ""
        self.comments = 0
        self.cancelled = 0
        self.app = Starlette(
            routes=[
                Route("/darts/v1/rollouts", self.start, methods=["POST"]),
                Route(f"/darts/v1/rollouts/{BATCH}", self.resume, methods=["GET"]),
                Route(f"/darts/v1/rollouts/{BATCH}", self.cancel, methods=["DELETE"]),
            ]
        )

    async def start(self, _: Request) -> StreamingResponse:
        async def events() -> Any:
            yield GROUPS[0]
            yield GROUPS[1]
            for _ in range(self.comments):
                await asyncio.sleep(0.05)
                yield b": ping\n\n"
            if not self.comments:
                await asyncio.sleep(60)
            for event in GROUPS[2:]:
                yield event

        return StreamingResponse(events(), media_type="text/event-stream")

    async def resume(self, request: Request) -> StreamingResponse:
        last = int(request.headers["last-event-id"])
        return StreamingResponse(iter(GROUPS[last:]), media_type="text/event-stream")

    async def cancel(self, _: Request) -> JSONResponse:
        self.cancelled += 1
        return JSONResponse({"id": BATCH, "cancelled": True})


@pytest.fixture
def server() -> Iterator[SlowServer]:
    slow = SlowServer()
    with listening(slow.app) as listener:
        slow.url = listener.url
        yield slow


def test_comments_reset_the_idle_timeout(server: SlowServer) -> None:
    server.comments = 40
    with Client(server.url, idle_timeout=1.5, retries=0) as client:
        assert len(list(client.rollouts(PROMPTS, **SIZES))) == 2


def test_a_durable_batch_is_resumed_after_the_idle_timeout(server: SlowServer) -> None:
    start = time.monotonic()
    with Client(server.url, idle_timeout=0.2) as client:
        assert len(list(client.rollouts(PROMPTS, **SIZES))) == 2
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("comments", [0, 2000])
def test_the_timeout_of_a_batch_ends_it_with_or_without_comments(server: SlowServer, comments: int) -> None:
    server.comments = comments
    start = time.monotonic()
    with Client(server.url) as client, pytest.raises(TimedOut, match=r"after 1 s"):
        list(client.rollouts(PROMPTS, timeout=1, **SIZES))
    assert time.monotonic() - start < 30
    assert server.cancelled == 1
