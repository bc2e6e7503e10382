"""What holds for several servers behind one address, whoever has started them."""

import asyncio
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import httpx

from darts_server.demo.problems import sample_problem
from darts_server.demo.server import Server
from tests.integration.test_single_requests import SIZE, check_selection

START_SECONDS = 180.0
GROUP = {"X-Darts-Group": f"size={SIZE}"}


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


async def check_groups(cluster: Cluster) -> None:
    """Check that groups are exact, and that each server has some."""
    async with client_of(cluster) as client:
        calls = (client.post("/v1/completions", json=body(prompt, n=SIZE)) for prompt in prompts(8))
        for answer in await asyncio.gather(*calls):
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["choices"]) == SIZE
            found = await client.get(f"/darts/v1/groups/{answer.headers['X-Darts-Group-Id']}")
            [group] = found.json()["groups"]
            assert (group["outcome"], group["group_size"]) == ("completed", SIZE)
            check_selection(group)
    for server in cluster.servers:
        assert server.metric("darts_groups_total", outcome="completed") > 0


async def check_single_requests(cluster: Cluster) -> None:
    """Check that single requests of a group meet."""
    async with client_of(cluster) as client:
        callers = [prompt for prompt in prompts(6) for _ in range(SIZE)]
        Random(1).shuffle(callers)
        calls = (client.post("/v1/completions", json=body(prompt), headers=GROUP) for prompt in callers)
        answers = await asyncio.gather(*calls)
        names = {answer.headers["X-Darts-Group-Id"] for answer in answers}
        assert len(names) == 6
        for name in names:
            [group] = (await client.get(f"/darts/v1/groups/{name}")).json()["groups"]
            assert (group["outcome"], group["group_size"], len(group["members"])) == ("completed", SIZE, SIZE)


async def check_one_deadline(cluster: Cluster) -> None:
    """Check that a divided batch is cut at the same length on all servers, on each of which half of the groups is."""
    batch = {
        "prompts": [{"text": prompt} for prompt in prompts(12 * len(cluster.servers))],
        "group_size": SIZE,
        "sampling": {"max_tokens": 512, "temperature": 1.3},
        "policy": {"name": "cap", "exploration": 0.0, "deadline_quantile": 0.5},
    }
    async with client_of(cluster) as client:
        answer = await client.post("/darts/v1/rollouts", json=batch)
    assert answer.status_code == 200, answer.text
    cut: dict[str, list[int]] = {}
    for group in answer.json()["groups"]:
        part = cut.setdefault(group["group_id"].rpartition("-")[0], [])
        part += [each["length"] for each in group["trajectories"] if each["cut"]]
    assert len(cut) == len(cluster.servers)
    # Groups that need longer trajectories than the deadline wait for these, up to the bound.
    assert len({min(lengths) for lengths in cut.values()}) == 1, cut
