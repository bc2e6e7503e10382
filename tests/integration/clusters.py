"""What holds for several servers behind one address, whoever has started them."""

import asyncio
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import load, save

from darts_server.demo.problems import sample_problem
from darts_server.demo.server import MODEL, Server
from tests.integration.test_single_requests import SIZE, check_selection
from tests.integration.waiting import wait_idle, wait_started

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


def changed_weights() -> bytes:
    """Return other weights than those of the start."""
    tensors = load((MODEL / "model.safetensors").read_bytes())
    return save({name: tensor * np.float32(1.01) for name, tensor in tensors.items()})


def versions(servers: Sequence[Server]) -> set[int]:
    """Return the versions of the weights that servers serve."""
    return {httpx.get(f"{server.url}/darts/v1/weights", verify=False).json()["version"] for server in servers}


async def check_weights_switch_together(cluster: Cluster) -> None:
    """Check that under the rule ``finish`` no group, and no divided batch, has two versions."""
    [first] = versions(cluster.servers)
    async with client_of(cluster) as client:
        stop = asyncio.Event()

        async def load_with(texts: Sequence[str]) -> list[list[dict[str, Any]]]:
            batches = []
            while not stop.is_set():
                batch = {
                    "prompts": [{"text": text} for text in texts],
                    "group_size": 4,
                    "sampling": {"max_tokens": 64},
                }
                answer = await client.post("/darts/v1/rollouts", json=batch)
                assert answer.status_code == 200, answer.text
                batches.append(answer.json()["groups"])
            return batches

        texts = prompts(9)
        callers = [asyncio.create_task(load_with(texts[at : at + 3])) for at in (0, 3, 6)]
        for version in (first + 1, first + 2):
            pushed = await client.put("/darts/v1/weights", content=changed_weights())
            assert pushed.status_code == 200, pushed.text
            assert pushed.json()["version"] == version
        stop.set()
        answered = [groups for caller in callers for groups in await caller]
    for groups in answered:
        assert not any(group["mixed_versions"] for group in groups)
        trajectories = [each for group in groups for each in group["trajectories"]]
        ends = {each[f"weight_version_{end}"] for each in trajectories for end in ("start", "end")}
        assert len(ends) == 1, "a batch under the rule finish has one version"
    assert versions(cluster.servers) == {first + 2}


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
