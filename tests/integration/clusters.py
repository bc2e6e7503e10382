"""What holds for several servers behind one address, whoever has started them."""

import asyncio
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import httpx

from darts_server.demo.problems import sample_problem
from darts_server.demo.server import Server
from tests.integration.test_single_requests import SIZE
from tests.integration.waiting import wait_idle, wait_started

START_SECONDS = 180.0


@dataclass(frozen=True)
class Cluster:
    """An ingress, at ``url``, and the servers behind it."""

    url: str
    servers: Sequence[Server]


def wait_healthy(url: str, process: subprocess.Popen[bytes], seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", verify=False).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError("the ingress did not become healthy")


def prompts(count: int) -> list[str]:
    rng = Random(5)
    return list({sample_problem(rng).prompt: None for _ in range(4 * count)})[:count]


def body(prompt: str, **fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 128, "temperature": 1.0, **fields}


def client_of(cluster: Cluster) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=cluster.url, timeout=180, limits=limits, verify=False)


def versions(servers: Sequence[Server]) -> set[int]:
    """Return the versions of the weights that servers serve."""
    return {httpx.get(f"{server.url}/darts/v1/weights", verify=False).json()["version"] for server in servers}


async def check_killed(cluster: Cluster, dying: Server, kill: Callable[[], None]) -> None:
    """Check that callers of 64 groups and of a batch do not notice that a server is killed in the middle of them.

    Afterwards nothing of them runs on the others.
    """
    started = dying.metric("darts_candidates_started_total")
    texts, batch_texts = prompts(72)[:64], prompts(72)[64:]
    batch = {
        "prompts": [{"text": text} for text in batch_texts],
        "group_size": SIZE,
        "sampling": {"max_tokens": 128, "temperature": 1.0},
    }
    async with client_of(cluster) as client:
        batched = asyncio.create_task(client.post("/darts/v1/rollouts", json=batch))
        calls = [
            asyncio.create_task(client.post("/v1/completions", json=body(text, n=SIZE, ignore_eos=True)))
            for text in texts
        ]
        # More groups than those of the batch, which may all be on this server before a call is.
        await asyncio.to_thread(wait_started, dying, started + (len(batch_texts) + 4) * SIZE)
        kill()
        answers = await asyncio.gather(*calls)
        failed = [answer.text for answer in answers if answer.status_code != 200]
        assert not failed, f"{len(failed)} of 64: {failed[0]}"
        assert all(len(answer.json()["choices"]) == SIZE for answer in answers)
        whole = await batched
        assert whole.status_code == 200, whole.text
        groups = whole.json()["groups"]
        assert [len(group["trajectories"]) for group in groups] == [SIZE] * 8
        lines = (await client.get("/metrics")).text.splitlines()
    assert any(line.startswith("darts_ingress_requests_total") and 'outcome="rerun"' in line for line in lines)
    for server in cluster.servers:
        if server is not dying:
            await asyncio.to_thread(wait_idle, server)
