"""Requests that are no good: broken JSON, broken HTTP, wrong fields, too much."""

import asyncio
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx

from faults.case import PROMPT, Fault, Outcome, Scene, Where
from faults.others import ANSWER_SECONDS, GROUP, others

AT_ONCE = 16
MOST_BODY = 1_000_000
"""Bytes that the shared server takes."""
GOOD: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "n": 4, "max_tokens": 20}
PATHS = {"/v1/completions": GOOD, "/darts/v1/rollouts": GROUP, "/darts/v1/rewards": {"rewards": []}}
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
REFUSALS = range(400, 500)


async def malformed(scene: Scene) -> Outcome:
    """Bodies that were mutilated by lot. What is still good may be served; nothing else may start anything."""
    outcome, numbers = Outcome(), iter(range(scene.few(10_000, 400)))

    async def send(client: httpx.AsyncClient) -> None:
        for number in numbers:
            path, body = _mutilated(Random(f"{scene.random.random()} {number}"))
            answer = await client.post(scene.target.url + path, content=body, headers=JSON)
            outcome.injected += 1
            good = answer.status_code == httpx.codes.OK or (answer.status_code in REFUSALS and _is_told(answer))
            outcome.expect(good, f"{path} {body[:200]!r} was answered with {answer.status_code} {answer.text[:200]}")

    async with others(scene.target, outcome), httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
        await asyncio.gather(*(send(client) for _ in range(AT_ONCE)))
        outcome.injected += await _broken_http(scene, scene.few(500, 40))
    return outcome


async def oversized(scene: Scene) -> Outcome:
    """Bodies beyond the limit, announced or not."""
    outcome = Outcome()

    async def endless() -> Any:
        for _ in range(MOST_BODY // 10_000 + 10):
            yield b" " * 10_000

    async with others(scene.target, outcome), httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
        for path in LIMITED:
            for announced in (True, False):
                for _ in range(scene.few(20, 2)):
                    outcome.injected += 1
                    content = b" " * (MOST_BODY + 1) if announced else endless()
                    status = await _status(client, scene.target.url + path, content)
                    outcome.expect(status in (413, None), f"{path} answered {status} to a body that is too large")
    return outcome


JSON = {"Content-Type": "application/json"}


def _mutilated(lots: Random) -> tuple[str, bytes]:
    path = lots.choice(list(PATHS))
    body = dict(PATHS[path])
    kind = lots.randrange(4)
    if kind == 0:
        body[lots.choice([*body, "stream", "seed", "logprobs", "temperature", "vllm_xargs"])] = lots.choice(JUNK)
    elif kind == 1:
        body[f"unknown{lots.randrange(9)}"] = lots.choice(JUNK)
        del body[lots.choice(list(PATHS[path]))]
    text = json.dumps(body).encode()
    if kind == 2:
        return path, text[: lots.randrange(len(text))]
    if kind == 3:
        mixed = bytearray(text)
        for _ in range(lots.randint(1, 8)):
            mixed[lots.randrange(len(mixed))] = lots.randrange(256)
        return path, bytes(mixed)
    return path, text


def _is_told(answer: httpx.Response) -> bool:
    """Whether the refusal says why, in the form of the API."""
    try:
        return bool(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return False


async def _status(client: httpx.AsyncClient, url: str, content: Any) -> int | None:
    """``None``: the server hung up before it had all of it."""
    try:
        return (await client.post(url, content=content, headers=JSON)).status_code
    except httpx.TransportError:
        return None


async def _broken_http(scene: Scene, count: int) -> int:
    """Bytes that are no HTTP; the server hangs up, or says 400."""
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


def _junk(lots: Random, count: int) -> Iterator[bytes]:
    line = b"POST /v1/completions HTTP/1.1\r\n"
    for _ in range(count):
        noise = lots.randbytes(lots.randint(1, 2000))
        yield lots.choice(
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
    Fault("malformed", "bodies and HTTP mutilated by lot", Where.SHARED, malformed),
    Fault("oversized", f"bodies above {MOST_BODY} bytes", Where.SHARED, oversized),
]
