"""Invalid requests: broken HTTP, and bodies that are too large. `faults.fuzz` sends invalid bodies."""

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx

from faults.bystanders import ANSWER_SECONDS, bystanders
from faults.case import Fault, Outcome, Scene, Target

MAX_BODY_BYTES = 1_000_000
"""The shared server's limit."""
LIMITED = ("/v1/completions", "/darts/v1/rollouts", "/tokenize")


async def broken_http(scene: Scene) -> Outcome:
    """Send bytes that are not HTTP; the server must close the connection, with or without an answer."""
    outcome = Outcome()
    async with bystanders(scene.target, outcome):
        for junk in _junk(scene.random, scene.count(500, 40)):
            outcome.injected += 1
            reader, writer = await asyncio.open_connection("127.0.0.1", int(scene.target.url.rpartition(":")[2]))
            writer.write(junk)
            try:
                await writer.drain()
                writer.write_eof()
                await asyncio.wait_for(reader.read(100), ANSWER_SECONDS)
            except OSError:
                pass
            writer.close()
    return outcome


async def oversized(scene: Scene) -> Outcome:
    """Send bodies above the limit, with and without a Content-Length."""
    outcome = Outcome()

    async def endless() -> Any:
        for _ in range(MAX_BODY_BYTES // 10_000 + 10):
            yield b" " * 10_000

    async with bystanders(scene.target, outcome), httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
        for path in LIMITED:
            for has_length in (True, False):
                for _ in range(scene.count(20, 2)):
                    outcome.injected += 1
                    content = b" " * (MAX_BODY_BYTES + 1) if has_length else endless()
                    status = await _status(client, scene.target.url + path, content)
                    outcome.expect(status in (413, None), f"{path} answered {status} to a body that is too large")
    return outcome


JSON = {"Content-Type": "application/json"}


async def _status(client: httpx.AsyncClient, url: str, content: Any) -> int | None:
    """Return the status; ``None`` if the server closed the connection before it had the whole body."""
    try:
        return (await client.post(url, content=content, headers=JSON)).status_code
    except httpx.TransportError:
        return None


def _junk(rng: Random, count: int) -> Iterator[bytes]:
    line = b"POST /v1/completions HTTP/1.1\r\n"
    for _ in range(count):
        noise = rng.randbytes(rng.randint(1, 2000))
        yield rng.choice(
            [
                noise,
                line + noise,
                line + b"Content-Length: -1\r\n\r\n",
                line + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\n12345",
                line + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + noise,
                b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
            ]
        )


FAULTS = [
    Fault("broken-http", "bytes that are not HTTP", Target.SHARED, broken_http),
    Fault("oversized", f"bodies above {MAX_BODY_BYTES} bytes", Target.SHARED, oversized),
]
