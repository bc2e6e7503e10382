"""Servers that Ray keeps, on real vLLM. The last test kills one of them.

In a push they are forked from a process that has imported vLLM, nightly they are started as users start them.
"""

import asyncio
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from safetensors.numpy import load, save

from darts_server.demo.server import FLAGS, MODEL, Server
from tests.integration.clusters import Cluster, body, check_killed, client_of, prompts, versions
from tests.integration.test_single_requests import GROUP, SIZE, check_selection
from tests.ray.running import running

pytest.importorskip("ray")
REPLACE_SECONDS = 900.0
pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.anyio, pytest.mark.timeout(1800)]
# A quarter of the gigabyte that engines of tests have: three of them beside other tests' servers filled 24 gigabytes to
# 95 %, where Ray kills them.
LITTLE_CACHE = ("--num-gpu-blocks-override", "512")
FORKED, STARTED = ["tests.ray.forked_replicas"], ["darts_server", "serve"]
NIGHTLY = pytest.mark.nightly


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((FORKED, 3), id="3"),
        pytest.param((STARTED, 2), id="2 as started", marks=NIGHTLY),
        pytest.param((STARTED, 3), id="3 as started", marks=NIGHTLY),
    ],
)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    program, count = request.param
    flags = [str(MODEL), *FLAGS, *LITTLE_CACHE, "--replicas", str(count), "--cpus-per-replica", "0"]
    log = tmp_path_factory.mktemp("replicas") / "log"
    with running(lambda port: ["-m", *program, *flags, "--port", str(port)], log) as url:
        wait_serving(url, count)
        yield Cluster(url, servers_of(url))


def replicas(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/health", verify=False, timeout=30).json()["replicas"]
    return found


def wait_serving(url: str, count: int) -> None:
    """Wait until so many replicas serve: the address is healthy once one of them does."""
    deadline = time.monotonic() + REPLACE_SECONDS
    while [each["state"] for each in replicas(url)] != ["serving"] * count:
        assert time.monotonic() < deadline, replicas(url)
        time.sleep(0.5)


def servers_of(url: str) -> list[Server]:
    """Return the servers behind an ingress, whose processes are others' children."""
    return [Server(None, int(each["name"].rpartition(":")[2]), Path()) for each in replicas(url)]  # type: ignore[arg-type]  # no process


def process_of(server: Server) -> psutil.Process:
    """Return the process that listens at a server's address, not those of its engine, which inherit the socket."""
    port = int(server.url.rpartition(":")[2])
    listening = {each.pid: each for each in psutil.process_iter() if port in ports_of(each)}
    [found] = [each for each in listening.values() if each.ppid() not in listening]
    return found


def ports_of(process: psutil.Process) -> set[int]:
    try:
        connections = process.net_connections("tcp")
    except psutil.Error:  # it has ended
        return set()
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


async def test_groups_are_exact_and_on_all_replicas(cluster: Cluster) -> None:
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


async def test_single_requests_of_a_group_meet(cluster: Cluster) -> None:
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


async def test_a_divided_batch_is_cut_at_one_deadline(cluster: Cluster) -> None:
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


async def test_weights_switch_together_under_load(cluster: Cluster) -> None:
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


@pytest.mark.parametrize(
    "what", ["server", pytest.param("engine", marks=NIGHTLY), pytest.param("worker", marks=NIGHTLY)]
)
async def test_a_replica_that_is_killed_in_the_middle_of_64_groups_is_replaced_and_gets_the_weights(
    cluster: Cluster, what: str
) -> None:
    before = Cluster(cluster.url, servers_of(cluster.url))  # the last test may have replaced one
    served, dying = versions(before.servers), before.servers[0]
    server = process_of(dying)
    family = [server, *server.children(recursive=True)]
    [engine] = engine_processes(server)
    killed = {"server": [server], "engine": [engine], "worker": engine_processes(engine)}[what]
    await check_killed(before, dying, lambda: killed[0].send_signal(signal.SIGKILL))
    assert psutil.wait_procs(family, timeout=240)[1] == []
    await asyncio.to_thread(check_replaced, cluster, dying, served)


def engine_processes(process: psutil.Process) -> list[psutil.Process]:
    """Return the children of a server, or of its engine core, without Python's resource trackers."""
    return [child for child in process.children() if "resource_tracker" not in " ".join(child.cmdline())]


def check_replaced(cluster: Cluster, dead: Server, served: set[int]) -> None:
    """Check that there are as many replicas again, with the weights of the others when they serve."""
    deadline = time.monotonic() + REPLACE_SECONDS
    while True:
        now = {each["name"]: each["state"] for each in replicas(cluster.url)}
        if len(now) == len(cluster.servers) and set(now.values()) == {"serving"}:
            break
        assert time.monotonic() < deadline, now
        time.sleep(0.5)
    assert dead.url.removeprefix("http://") not in now
    assert versions(servers_of(cluster.url)) == served
