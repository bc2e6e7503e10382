"""An ingress in front of three servers, on real vLLM. The last test kills one of them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import load

from darts_server.demo.server import DARTS, MODEL, Server, bind
from tests.integration.clusters import (
    START_SECONDS,
    Cluster,
    check_killed,
    client_of,
    prompts,
    wait_healthy,
)
from tests.integration.fork_server import Serve

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.anyio]


@pytest.fixture(scope="module")
def cluster(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    logs = tmp_path_factory.mktemp("ingress")
    with (
        serve(DARTS, logs / "a") as one,
        serve(DARTS, logs / "b") as two,
        serve(DARTS, logs / "c") as three,
        bind() as free,
    ):
        port = free.getsockname()[1]
        free.close()
        flags = ["--server-list", f"{one.url},{two.url},{three.url}", "--port", str(port), "--poll-interval", "0.5"]
        process = subprocess.Popen([sys.executable, "-m", "darts_server", "ingress", *flags])
        try:
            wait_healthy(f"http://127.0.0.1:{port}", process)
            yield Cluster(f"http://127.0.0.1:{port}", (one, two, three))
        finally:
            process.terminate()
            assert process.wait(180) == 0


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
            server.metric("darts_groups_total") == count + 2
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


async def test_a_server_that_was_killed_gets_the_weights_when_it_is_back(
    cluster: Cluster, serve: Serve, tmp_path: Path, nightly: bool
) -> None:
    dying, other, _ = cluster.servers

    def kill() -> None:
        os.kill(dying.process.pid, signal.SIGKILL)

    if nightly:
        await check_killed(cluster, dying, kill)
    else:
        kill()
    await asyncio.to_thread(wait_for_states, cluster, ["lost", "serving", "serving"])
    async with client_of(cluster) as client:
        metrics = (await client.get("/metrics")).text
        name = other.url.removeprefix("http://")
        assert f'darts_candidates_started_total{{replica="{name}"' in metrics
    await asyncio.to_thread(check_restarted, cluster, dying, other, serve, tmp_path)


def wait_for_states(cluster: Cluster, states: list[str]) -> None:
    """Wait until the ingress says these of its servers, in alphabetical order."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        servers = httpx.get(f"{cluster.url}/health", verify=False).json()["replicas"]
        if sorted(each["state"] for each in servers) == states:
            return
        assert time.monotonic() < deadline, servers
        time.sleep(0.1)


def check_restarted(cluster: Cluster, dead: Server, other: Server, serve: Serve, folder: Path) -> None:
    """Check that a server that is started again serves when it has the weights of the other one, and not before."""
    version, tensors = weights_of(other)
    assert version > 0
    with serve(DARTS, folder / "again", port=int(dead.url.rpartition(":")[2])) as again:
        wait_for_states(cluster, ["serving"] * 3)
        assert weights_of(again) == (version, tensors)


def weights_of(server: Server) -> tuple[int, dict[str, bytes]]:
    """Return the version and the tensors that a server serves."""
    answer = httpx.get(f"{server.url}/darts/v1/weights/tensors", verify=False, timeout=240)
    served = {name: tensor.tobytes() for name, tensor in load(answer.content).items()}
    return int(answer.headers["X-Darts-Weight-Version"]), served
