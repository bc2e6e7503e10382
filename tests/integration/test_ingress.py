"""An ingress in front of two servers, on real vLLM. The last test kills one of them."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import httpx
import pytest

from darts_server.demo.problems import sample_problem
from darts_server.demo.server import DARTS, MODEL, Server
from tests.integration.fork_server import Serve
from tests.integration.test_single_requests import SIZE, check_selection
from tests.integration.waiting import wait_started

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
START_SECONDS = 60.0
GROUP = {"X-Darts-Group": f"size={SIZE}"}


@dataclass(frozen=True)
class Cluster:
    """An ingress, at ``url``, and the servers behind it."""

    url: str
    servers: tuple[Server, Server]


@pytest.fixture(scope="module")
def cluster(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    logs = tmp_path_factory.mktemp("ingress")
    with (
        serve(DARTS, logs / "a") as one,
        serve(DARTS, logs / "b") as two,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        port = free.getsockname()[1]
        free.close()
        flags = ["--server-list", f"{one.url},{two.url}", "--port", str(port), "--poll-interval", "0.5"]
        process = subprocess.Popen([sys.executable, "-m", "darts_server", "ingress", *flags])
        try:
            wait_healthy(f"http://127.0.0.1:{port}", process)
            yield Cluster(f"http://127.0.0.1:{port}", (one, two))
        finally:
            process.terminate()
            assert process.wait(60) == 0


def wait_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
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


async def test_groups_are_exact_and_on_both_servers(cluster: Cluster) -> None:
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


async def test_single_requests_of_a_group_meet(cluster: Cluster) -> None:
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


async def test_a_batch_is_divided_its_rewards_find_their_servers_and_weights_are_one_update(cluster: Cluster) -> None:
    before = [server.metric("darts_groups_total") for server in cluster.servers]
    batch = {
        "prompts": [{"text": prompt, "metadata": {"at": at}} for at, prompt in enumerate(prompts(6))],
        "group_size": 4,
        "sampling": {"max_tokens": 64},
    }
    async with client_of(cluster) as client:
        answer = (await client.post("/darts/v1/rollouts", json=batch)).json()
        assert [group["metadata"]["at"] for group in answer["groups"]] == list(range(6))
        trajectories = [each for group in answer["groups"] for each in group["trajectories"]]
        assert len(trajectories) == 24
        assert answer["usage"]["returned"] == sum(len(each["token_ids"]) for each in trajectories)
        assert answer["usage"]["generated"] >= answer["usage"]["returned"]
        assert all(
            server.metric("darts_groups_total") == count + 3
            for server, count in zip(cluster.servers, before, strict=True)
        )
        rewards = [{"trajectory_id": each["trajectory_id"], "reward": 1.0} for each in trajectories]
        counted = await client.post("/darts/v1/rewards", json={"rewards": rewards})
        assert counted.json() == {"matched": 24, "repeated": 0, "unknown": 0, "unknown_indices": []}
        pushed = await client.put("/darts/v1/weights", content=(MODEL / "model.safetensors").read_bytes())
        assert pushed.status_code == 200, pushed.text
    for server in cluster.servers:
        served = httpx.get(f"{server.url}/darts/v1/weights", verify=False).json()
        assert (served["version"], served["staged"]) == (1, None)


async def test_a_server_that_is_killed_in_the_middle_of_16_groups_is_not_noticed(cluster: Cluster) -> None:
    dying, other = cluster.servers
    started = [server.metric("darts_candidates_started_total") for server in cluster.servers]
    async with client_of(cluster) as client:
        calls = [
            asyncio.create_task(
                client.post("/v1/completions", json=body(prompt, n=SIZE, max_tokens=256, ignore_eos=True))
            )
            for prompt in prompts(16)
        ]
        for server, count in zip(cluster.servers, started, strict=True):
            await asyncio.to_thread(wait_started, server, count + 4 * 12)  # half of an even share
        os.kill(dying.process.pid, signal.SIGKILL)
        answers = await asyncio.gather(*calls)
        assert [answer.status_code for answer in answers] == [200] * 16
        assert all(len(answer.json()["choices"]) == SIZE for answer in answers)
        states = {each["name"]: each["state"] for each in (await client.get("/health")).json()["replicas"]}
        assert sorted(states.values()) == ["lost", "serving"]
        metrics = (await client.get("/metrics")).text
        name = other.url.removeprefix("http://")
        assert f'darts_candidates_started_total{{replica="{name}"' in metrics
