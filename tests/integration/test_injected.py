"""Unrelated callers are served, and the server gets idle, whatever others do to their connections."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.server import Server
from tests.integration.waiting import wait_idle

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
PROMPTS = [{"text": "7a-5b*4>"}]
GROUP: dict[str, Any] = {"prompts": PROMPTS, "group_size": 4, "sampling": {"max_tokens": 60}}
TOKENS = {"max_tokens": 280, "ignore_eos": True, "logprobs": 1}
STREAMED: dict[str, Any] = {"prompts": PROMPTS * 4, "group_size": 4, "sampling": TOKENS, "stream": "tokens"}
HEAD = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
COMPLETION = HEAD % b"/v1/completions"
READ_BYTES = 64
"""A slow reader reads this much at a time, and its receive buffer is as small."""


@asynccontextmanager
async def bystanders(server: Server) -> AsyncIterator[None]:
    """Let callers request one group after the other while the block runs, at least one each; each must come back whole.

    Afterwards the server must get idle.
    """
    finished = asyncio.Event()

    async def request_groups(client: httpx.AsyncClient) -> None:
        while True:
            answer = await client.post("/darts/v1/rollouts", json=GROUP)
            assert answer.status_code == 200, answer.text
            assert [len(group["trajectories"]) for group in answer.json()["groups"]] == [4]
            if finished.is_set():
                return

    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client, asyncio.TaskGroup() as requests:
        for _ in range(3):
            requests.create_task(request_groups(client))
        try:
            yield
        finally:
            finished.set()
    await asyncio.to_thread(wait_idle, server)


@contextmanager
def connections(server: Server, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as life:
        opened = [life.enter_context(socket.socket()) for _ in range(count)]
        for each in opened:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
            each.connect(("127.0.0.1", port(server)))
        yield opened


def port(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


async def test_the_engine_does_not_wait_for_callers_that_read_next_to_nothing_of_their_streams(server: Server) -> None:
    sent = json.dumps(STREAMED).encode()
    async with bystanders(server):
        with connections(server, 8) as readers:
            for reader in readers:
                reader.send(HEAD % b"/darts/v1/rollouts" + b"Content-Length: %d\r\n\r\n" % len(sent) + sent)
                reader.setblocking(False)
            for _ in range(15):
                for reader in readers:
                    with suppress(BlockingIOError):
                        reader.recv(READ_BYTES)
                await asyncio.sleep(0.1)


async def test_connections_that_stay_open_in_the_middle_of_a_request_hold_nobody_up(server: Server) -> None:
    with_length = COMPLETION + b"Content-Length: 500\r\n\r\n"
    async with bystanders(server):
        with connections(server, 30) as halves:
            for number, each in enumerate(halves):
                each.send((b"", COMPLETION[:20], COMPLETION, with_length, with_length + b'{"model": "ti')[number % 5])
            await asyncio.sleep(1)
