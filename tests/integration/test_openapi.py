"""The running server rejects malformed bodies; the fuzzer checks its answers against its OpenAPI description."""

import asyncio
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest

from darts_server.demo.server import DARTS, Server
from tests.integration.fork_server import Serve

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
KEY = "Authorization: Bearer secret"
AT_ONCE = 32


@pytest.fixture(scope="module")
def guarded(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own, because its policy and state are changed at random."""
    log = tmp_path_factory.mktemp("guarded") / "log"
    with serve(DARTS, log, "--api-key", "secret", "--max-group-size", "4") as running:
        yield running


ROLLOUTS: dict[str, Any] = {
    "prompts": [{"text": "7a-5b*4>", "key": "a", "metadata": {"answer": 8}}, {"token_ids": [5, 6, 7]}],
    "group_size": 4,
    "sampling": {"max_tokens": 20, "temperature": 1.0},
    "policy": {"name": "darts", "redundancy": 1.5},
    "budget": 12,
    "stream": False,
}
POLICY: dict[str, Any] = {"policy": "darts", "redundancy": 1.25, "num_longest": 1}
REWARDS: dict[str, Any] = {"rewards": [{"trajectory_id": "a:0", "reward": 1.0, "correct": True}]}
VOTE: dict[str, Any] = {
    "prompt": "7a-5b*4>",
    "key": "a",
    "n": 4,
    "sampling": {"max_tokens": 20},
    "pattern": "#([0-9])",
    "weights": "rank",
    "score": "logprob",
}
WEIGHTS: dict[str, Any] = {
    "path": "step-7.safetensors",
    "rule": "finish",
    "version": 7,
    "stage": True,
    "expires_after": 60,
}
VALID = [
    ("POST", "rollouts", ROLLOUTS),
    ("PATCH", "policy", POLICY),
    ("POST", "rewards", REWARDS),
    ("POST", "vote", VOTE),
    ("POST", "weights", WEIGHTS),
]
NEVER_VALID = [{"a": {"b": 1}}, [[1]], [None], "\x00", -1, 1e300, 10**30, True, ""]
ANYTHING_GOES = {"metadata", "key", "text"}
"""Fields in which some of these values are valid."""


def malformed(rng: Random, body: dict[str, Any]) -> bytes:
    """Return the body with one error in it."""
    text = json.dumps(body)
    kind = rng.randrange(4)
    if kind == 0:
        return text[: rng.randrange(len(text))].encode()
    if kind == 1:
        return rng.randbytes(rng.randrange(1, 200))
    wrong = json.loads(text)
    if kind == 2:
        rng.choice(_objects(wrong))["unknown" + str(rng.random())] = rng.choice(NEVER_VALID)
        return json.dumps(wrong).encode()
    name = rng.choice(sorted(set(wrong) - ANYTHING_GOES))
    wrong[name] = rng.choice([value for value in NEVER_VALID if type(value) is not type(wrong[name])])
    return json.dumps(wrong).encode()


def _objects(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of a body that allow no other field."""
    return [body, *(part for name in ("prompts", "rewards") for part in body.get(name, []))]


async def test_malformed_bodies_are_rejected_by_field_and_start_nothing(guarded: Server, nightly: bool) -> None:
    started = guarded.metric("darts_candidates_started_total")
    rng = Random(7)
    headers = dict([KEY.split(": ")])
    before = httpx.get(f"{guarded.url}/darts/v1/policy", headers=headers).json()
    wrong: list[str] = []

    async def send(client: httpx.AsyncClient, turns: Iterator[int]) -> None:
        for _ in turns:
            method, route, body = rng.choice(VALID)
            content = malformed(rng, body)
            answer = await client.request(method, f"/darts/v1/{route}", content=content, headers=headers)
            if not (400 <= answer.status_code < 500 and answer.json()["error"]["param"]):
                wrong.append(f"{method} {route} {content!r}: {answer.status_code} {answer.text}")

    async with httpx.AsyncClient(base_url=guarded.url, timeout=240) as client:
        turns = iter(range(10_000 if nightly else 2_000))
        await asyncio.gather(*(send(client, turns) for _ in range(AT_ONCE)))
    assert not wrong, wrong[:3]
    assert guarded.busy() == 0
    assert guarded.metric("darts_candidates_started_total") == started
    assert httpx.get(f"{guarded.url}/darts/v1/policy", headers=headers).json() == before
