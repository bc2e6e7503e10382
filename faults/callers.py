"""Callers that go away, that do not read, and that do not finish what they say."""

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

import httpx

from faults.case import PROMPT, Fault, Outcome, Scene, Where
from faults.others import GROUP, LONG, others

AT_ONCE = 32
LONGEST_STAY = 1.5
SIPPED = 64
"""Bytes that a slow reader takes at a time, into a buffer that holds little more."""


async def disconnects(scene: Scene) -> Outcome:
    """Requests of every kind, each hung up on at a random point."""
    outcome, numbers = Outcome(), iter(range(scene.few(2000, 96)))
    url = scene.target.url

    def asked(number: int) -> tuple[str, dict[str, Any]]:
        prompts = [{"text": PROMPT}] * scene.random.choice([1, 3])
        native = {**GROUP, "prompts": prompts, "stream": scene.random.choice([False, "groups", "tokens"])}
        single = {**LONG, "n": 1, "vllm_xargs": {"darts_group_id": f"left {number // 3}", "darts_group_size": 3}}
        whole = {**LONG, "stream": scene.random.random() < 0.5}
        kind = scene.random.choice(["native", "single", "whole", "whole"])
        return {
            "native": ("/darts/v1/rollouts", native),
            "single": ("/v1/completions", single),
            "whole": ("/v1/completions", whole),
        }[kind]

    async def leave(client: httpx.AsyncClient) -> None:
        for number in numbers:
            path, body = asked(number)
            with suppress(TimeoutError, httpx.HTTPError):
                async with asyncio.timeout(scene.random.uniform(0, LONGEST_STAY)):
                    await client.post(url + path, json=body)
            outcome.injected += 1

    async with others(scene.target, outcome), httpx.AsyncClient(timeout=None) as client:
        await asyncio.gather(*(leave(client) for _ in range(AT_ONCE)))
    return outcome


async def slow_readers(scene: Scene) -> Outcome:
    """Token streams whose readers take next to nothing of them. The engine must not wait for these."""
    outcome = Outcome(injected=scene.few(64, 8))
    sampling = {"max_tokens": 280, "ignore_eos": True, "logprobs": 1}
    body = {"prompts": [{"text": PROMPT}] * 4, "group_size": 4, "sampling": sampling, "stream": "tokens"}
    async with others(scene.target, outcome):
        readers = [_slow(scene, body) for _ in range(outcome.injected)]
        try:
            for _ in range(scene.few(50, 15)):
                for reader in readers:
                    with suppress(BlockingIOError):
                        reader.recv(SIPPED)
                await asyncio.sleep(0.1)
        finally:
            for reader in readers:
                reader.close()
    return outcome


async def half_open(scene: Scene) -> Outcome:
    """Connections that say nothing, half a head, or half a body, and stay."""
    outcome = Outcome(injected=scene.few(200, 30))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    said = [
        b"",
        head[:20],
        head,
        head + b"Content-Length: 500\r\n\r\n",
        head + b'Content-Length: 500\r\n\r\n{"model": "ti',
    ]
    async with others(scene.target, outcome):
        sockets = [_connected(scene) for _ in range(outcome.injected)]
        try:
            for number, each in enumerate(sockets):
                each.send(said[number % len(said)])
            await asyncio.sleep(scene.few(20, 3))
        finally:
            for each in sockets:
                each.close()
    return outcome


def _slow(scene: Scene, body: dict[str, Any]) -> socket.socket:
    sent = json.dumps(body).encode()
    reader = _connected(scene)
    head = (
        f"POST /darts/v1/rollouts HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}"
    )
    reader.send(head.encode() + b"\r\n\r\n" + sent)
    reader.setblocking(False)
    return reader


def _connected(scene: Scene) -> socket.socket:
    connected = socket.socket()
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SIPPED)
    connected.connect(("127.0.0.1", int(scene.target.url.rpartition(":")[2])))
    return connected


FAULTS = [
    Fault("disconnects", "callers hang up at random points", Where.SHARED, disconnects),
    Fault("slow-readers", "callers read hardly anything of their streams", Where.SHARED, slow_readers),
    Fault("half-open", "connections stay in the middle of a request", Where.SHARED, half_open),
]
