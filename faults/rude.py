"""Callers that send what no client sends: large and slow heads, answers that nobody reads, and floods."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

KEY, FLOODING_KEY = "fuzzed", "flooding"
RUDE = "RUDE"
"""Stands for the method of such a request."""
FLOOD = "flood"
FLOOD_REQUESTS, FLOOD_SECONDS = 30, 20.0
"""Requests that one key sends at the same time, and seconds in which another key is served meanwhile."""
PAUSE_SECONDS, ANSWER_SECONDS = 0.05, 10.0

_AUTHORIZED = f"Host: localhost\r\nAuthorization: Bearer {KEY}\r\n".encode()
_STREAM = b'{"model": "tiny", "prompt": "7a>", "n": 64, "max_tokens": 100, "ignore_eos": true, "stream": true}'


@dataclass(frozen=True)
class Rude:
    """What one connection sends.

    ``pause``: seconds after each part. ``expected``: statuses of the first answer; empty if the caller reads nothing.
    """

    parts: tuple[bytes, ...]
    pause: float = 0.0
    expected: tuple[int, ...] = ()


CALLERS = {
    "large URL": Rude((b"GET /health?" + b"x" * 1_000_000,), expected=(431,)),
    "large header": Rude((b"GET /health HTTP/1.1\r\n" + _AUTHORIZED + b"a: " + b"x" * 1_000_000,), expected=(431,)),
    "many headers": Rude((b"GET /health HTTP/1.1\r\n" + _AUTHORIZED + b"a: b\r\n" * 1_000 + b"\r\n",), expected=(431,)),
    "large trailer": Rude(
        (
            b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + _AUTHORIZED + b"\r\n0\r\na: ",
            b"x" * 1_000_000,
        ),
        expected=(431,),
    ),
    "slow head": Rude((b"GET /health HTTP/1.1\r\n", *[b"a: b\r\n"] * 5), PAUSE_SECONDS),
    "many requests": Rude((b"GET /metrics HTTP/1.1\r\n" + _AUTHORIZED + b"\r\n",) * 100, expected=(200, 429)),
    "pages that nobody reads": Rude((b"GET /openapi.json HTTP/1.1\r\n" + _AUTHORIZED + b"\r\n",) * 20, PAUSE_SECONDS),
    "a stream that nobody reads": Rude(
        (
            b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + _AUTHORIZED,
            b"Content-Length: %d\r\n\r\n" % len(_STREAM) + _STREAM,
        ),
        pause=5 * PAUSE_SECONDS,
    ),
}


async def call(url: str, name: str) -> int | None:
    """Send what this caller sends; return the status of its first answer.

    0 if the server waits for more, and None if the caller reads nothing or the connection was closed.
    """
    rude = CALLERS[name]
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        with suppress(ConnectionError):  # the server may close the connection
            for part in rude.parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(rude.pause)
            if rude.expected:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return int((await reader.readexactly(12))[-3:])
    except TimeoutError:
        return 0
    except asyncio.IncompleteReadError:
        return None
    finally:
        writer.close()
    return None


async def flood(client: httpx.AsyncClient, is_served: Callable[[], Awaitable[bool]]) -> int | None:
    """Let one key send many requests; return 200 if another key is served meanwhile, or None if it is not."""
    body = {"model": "tiny", "prompt": "7a>", "n": 64, "max_tokens": 100, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {FLOODING_KEY}"}

    async def send() -> None:
        with suppress(httpx.HTTPError):
            await client.post("/v1/completions", json=body, headers=headers)

    flooding = [asyncio.create_task(send()) for _ in range(FLOOD_REQUESTS)]
    try:
        async with asyncio.timeout(FLOOD_SECONDS):
            while not await is_served():  # the other key's own requests may have used its share
                await asyncio.sleep(PAUSE_SECONDS)
        return httpx.codes.OK
    except TimeoutError:
        return None
    finally:
        for each in flooding:
            each.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
