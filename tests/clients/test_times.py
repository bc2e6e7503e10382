"""How long a client waits, on real sockets."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from darts_client import AsyncClient, Client, TimedOut

from .serving import Listening, listening
from .transcripts import BATCH, GROUPS

SIZES: dict[str, Any] = {"group_size": 2, "max_tokens": 16}
PROMPTS = ["a", "b"]


class Slow:
    """Tells a batch in pieces: each, then silence, with or without comments."""

    def __init__(self) -> None:
        self.comments = 0
        self.cancelled = 0
        self.app = Starlette(
            routes=[
                Route("/darts/v1/rollouts", self.begin, methods=["POST"]),
                Route(f"/darts/v1/rollouts/{BATCH}", self.resume, methods=["GET"]),
                Route(f"/darts/v1/rollouts/{BATCH}", self.cancel, methods=["DELETE"]),
            ]
        )

    async def begin(self, _: Request) -> StreamingResponse:
        async def told() -> Any:
            yield GROUPS[0]
            yield GROUPS[1]
            for _ in range(self.comments):
                await asyncio.sleep(0.05)
                yield b": still here\n\n"
            if not self.comments:
                await asyncio.sleep(5)
            for piece in GROUPS[2:]:
                yield piece

        return StreamingResponse(told(), media_type="text/event-stream")

    async def resume(self, request: Request) -> StreamingResponse:
        last = int(request.headers["last-event-id"])
        return StreamingResponse(iter(GROUPS[last:]), media_type="text/event-stream")

    async def cancel(self, _: Request) -> JSONResponse:
        self.cancelled += 1
        return JSONResponse({"id": BATCH, "cancelled": True})


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def server(slow: Slow) -> Iterator[Listening]:
    with listening(slow.app) as found:
        yield found


def test_comments_are_life(slow: Slow, server: Listening) -> None:
    slow.comments = 20
    with Client(server.url, idle_timeout=0.4, retries=0) as client:
        assert len(list(client.rollouts(PROMPTS, **SIZES))) == 2


def test_silence_is_a_lost_connection_that_is_picked_up(server: Listening) -> None:
    began = time.monotonic()
    with Client(server.url, idle_timeout=0.2) as client:
        assert len(list(client.rollouts(PROMPTS, **SIZES))) == 2
    assert time.monotonic() - began < 4


def test_silence_ends_a_batch_that_cannot_be_picked_up(server: Listening) -> None:
    with Client(server.url, idle_timeout=0.2) as client, pytest.raises(TimedOut, match="ReadTimeout"):
        list(client.rollouts(PROMPTS, durable=False, **SIZES))


@pytest.mark.parametrize("comments", [0, 200])
def test_the_total_ends_it_whether_the_server_lives_or_not(slow: Slow, server: Listening, comments: int) -> None:
    slow.comments = comments
    began = time.monotonic()
    with Client(server.url) as client, pytest.raises(TimedOut, match=r"after 0\.3 s"):
        list(client.rollouts(PROMPTS, timeout=0.3, **SIZES))
    assert time.monotonic() - began < 4
    assert slow.cancelled == 1


@pytest.mark.anyio
async def test_the_total_ends_it_for_the_async_client_too(slow: Slow, server: Listening) -> None:
    slow.comments = 200
    async with AsyncClient(server.url) as client:
        with pytest.raises(TimedOut, match=r"after 0\.3 s"):
            [group async for group in client.rollouts(PROMPTS, timeout=0.3, **SIZES)]
    assert slow.cancelled == 1
