"""Invalid requests: broken JSON, broken HTTP, wrong fields, bodies that are too large."""

import asyncio
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx

from faults.bystanders import ANSWER_SECONDS, GROUP, bystanders
from faults.case import PROMPT, Fault, Outcome, Scene, Target

CONCURRENCY = 16
MAX_BODY_BYTES = 1_000_000
"""The shared server's limit."""
VALID: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "n": 4, "max_tokens": 20}
PATHS = {"/v1/completions": VALID, "/darts/v1/rollouts": GROUP, "/darts/v1/rewards": {"rewards": []}}
LIMITED = ("/v1/completions", "/darts/v1/rollouts", "/tokenize")
JUNK: list[Any] = [
    None,
    -1,
    10**30,
    1e400,
    "x" * 300,
    [],
    {},
    [[]],
    {"a": {}},
    True,
    "\ud800",
    "\0",
    [-5],
    "../..",
    0.5,
]
CLIENT_ERRORS = range(400, 500)


async def malformed(scene: Scene) -> Outcome:
    """Send randomly mutated bodies. Those that are still valid may be served; all others must be refused."""
    outcome, numbers = Outcome(), iter(range(scene.count(10_000, 400)))

    async def send(client: httpx.AsyncClient) -> None:
        for number in numbers:
            path, body = _mutated(Random(f"{scene.random.random()} {number}"))
            answer = await client.post(scene.target.url + path, content=body, headers=JSON)
            outcome.injected += 1
            served = answer.status_code == httpx.codes.OK
            refused = answer.status_code in CLIENT_ERRORS and _has_message(answer)
            outcome.expect(
                served or refused, f"{path} {body[:200]!r} was answered with {answer.status_code} {answer.text[:200]}"
            )

    async with bystanders(scene.target, outcome), httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
        await asyncio.gather(*(send(client) for _ in range(CONCURRENCY)))
        outcome.injected += await _broken_http(scene, scene.count(500, 40))
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


def _mutated(rng: Random) -> tuple[str, bytes]:
    path = rng.choice(list(PATHS))
    body = dict(PATHS[path])
    kind = rng.randrange(4)
    if kind == 0:
        body[rng.choice([*body, "stream", "seed", "logprobs", "temperature", "vllm_xargs"])] = rng.choice(JUNK)
    elif kind == 1:
        body[f"unknown{rng.randrange(9)}"] = rng.choice(JUNK)
        del body[rng.choice(list(PATHS[path]))]
    text = json.dumps(body).encode()
    if kind == 2:
        return path, text[: rng.randrange(len(text))]
    if kind == 3:
        mixed = bytearray(text)
        for _ in range(rng.randint(1, 8)):
            mixed[rng.randrange(len(mixed))] = rng.randrange(256)
        return path, bytes(mixed)
    return path, text


def _has_message(answer: httpx.Response) -> bool:
    """Return whether it is an error object of the API."""
    try:
        return bool(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return False


async def _status(client: httpx.AsyncClient, url: str, content: Any) -> int | None:
    """Return the status; ``None`` if the server closed the connection before it had the whole body."""
    try:
        return (await client.post(url, content=content, headers=JSON)).status_code
    except httpx.TransportError:
        return None


async def _broken_http(scene: Scene, count: int) -> int:
    """Send bytes that are not HTTP; the server must close the connection, with or without an answer."""
    for junk in _junk(scene.random, count):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(scene.target.url.rpartition(":")[2]))
        writer.write(junk)
        try:
            await writer.drain()
            writer.write_eof()
            await asyncio.wait_for(reader.read(100), ANSWER_SECONDS)
        except OSError:
            pass
        writer.close()
    return count


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
    Fault("malformed", "randomly mutated bodies and HTTP", Target.SHARED, malformed),
    Fault("oversized", f"bodies above {MAX_BODY_BYTES} bytes", Target.SHARED, oversized),
]
