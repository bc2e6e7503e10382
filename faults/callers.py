"""Callers that disconnect, that do not read their answer, and that do not finish their request."""

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

import httpx

from faults.bystanders import GROUP, LONG, bystanders
from faults.case import PROMPT, Fault, Outcome, Scene, Target

CONCURRENCY = 32
MAX_STAY_SECONDS = 1.5
READ_BYTES = 64
"""A slow reader reads this much at a time, and its receive buffer is as small."""


async def disconnects(scene: Scene) -> Outcome:
    """Send requests of every kind and disconnect from each at a random time."""
    outcome, numbers = Outcome(), iter(range(scene.count(2000, 96)))
    url = scene.target.url

    def random_request(number: int) -> tuple[str, dict[str, Any]]:
        prompts = [{"text": PROMPT}] * scene.random.choice([1, 3])
        native = {**GROUP, "prompts": prompts, "stream": scene.random.choice([False, "groups", "tokens"])}
        single = {**LONG, "n": 1, "vllm_xargs": {"darts_group_id": f"abandoned {number // 3}", "darts_group_size": 3}}
        group = {**LONG, "stream": scene.random.random() < 0.5}
        kind = scene.random.choice(["native", "single", "group", "group"])
        return {
            "native": ("/darts/v1/rollouts", native),
            "single": ("/v1/completions", single),
            "group": ("/v1/completions", group),
        }[kind]

    async def send_and_leave(client: httpx.AsyncClient) -> None:
        for number in numbers:
            path, body = random_request(number)
            with suppress(TimeoutError, httpx.HTTPError):
                async with asyncio.timeout(scene.random.uniform(0, MAX_STAY_SECONDS)):
                    await client.post(url + path, json=body)
            outcome.injected += 1

    async with bystanders(scene.target, outcome), httpx.AsyncClient(timeout=None) as client:
        await asyncio.gather(*(send_and_leave(client) for _ in range(CONCURRENCY)))
    return outcome


async def slow_readers(scene: Scene) -> Outcome:
    """Open token streams and read next to nothing of them. The engine must not wait for these readers."""
    outcome = Outcome(injected=scene.count(64, 8))
    sampling = {"max_tokens": 280, "ignore_eos": True, "logprobs": 1}
    body = {"prompts": [{"text": PROMPT}] * 4, "group_size": 4, "sampling": sampling, "stream": "tokens"}
    async with bystanders(scene.target, outcome):
        readers = [_open_slow_reader(scene, body) for _ in range(outcome.injected)]
        try:
            for _ in range(scene.count(50, 15)):
                for reader in readers:
                    with suppress(BlockingIOError):
                        reader.recv(READ_BYTES)
                await asyncio.sleep(0.1)
        finally:
            for reader in readers:
                reader.close()
    return outcome


async def half_open(scene: Scene) -> Outcome:
    """Open connections, send nothing, half a head or half a body, and keep them open."""
    outcome = Outcome(injected=scene.count(200, 30))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    beginnings = [
        b"",
        head[:20],
        head,
        head + b"Content-Length: 500\r\n\r\n",
        head + b'Content-Length: 500\r\n\r\n{"model": "ti',
    ]
    async with bystanders(scene.target, outcome):
        sockets = [_connect(scene) for _ in range(outcome.injected)]
        try:
            for number, each in enumerate(sockets):
                each.send(beginnings[number % len(beginnings)])
            await asyncio.sleep(scene.count(20, 3))
        finally:
            for each in sockets:
                each.close()
    return outcome


def _open_slow_reader(scene: Scene, body: dict[str, Any]) -> socket.socket:
    sent = json.dumps(body).encode()
    reader = _connect(scene)
    head = (
        f"POST /darts/v1/rollouts HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}"
    )
    reader.send(head.encode() + b"\r\n\r\n" + sent)
    reader.setblocking(False)
    return reader


def _connect(scene: Scene) -> socket.socket:
    connected = socket.socket()
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
    connected.connect(("127.0.0.1", int(scene.target.url.rpartition(":")[2])))
    return connected


FAULTS = [
    Fault("disconnects", "callers disconnect at random times", Target.SHARED, disconnects),
    Fault("slow-readers", "callers read next to nothing of their streams", Target.SHARED, slow_readers),
    Fault("half-open", "connections stay open in the middle of a request", Target.SHARED, half_open),
]
