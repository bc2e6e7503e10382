"""Real Ray, with small servers in place of darts-servers."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.ray.running import running

pytest.importorskip("ray")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
SECONDS = 600.0
REPLICAS = 3


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("cluster") / "log"
    with running(lambda port: ["-m", "tests.ray.cluster", str(port), str(REPLICAS)], log) as address:
        until(lambda: len(replicas(address)) == REPLICAS)  # it is healthy once one of them serves
        yield address


def replicas(url: str) -> dict[str, str]:
    """Return the states of all replicas, by their names."""
    found: list[dict[str, Any]] = httpx.get(f"{url}/health", verify=False, timeout=30).json()["replicas"]
    return {each["name"]: each["state"] for each in found}


def answers(url: str, count: int) -> set[int]:
    """Send requests; return the process ids of the servers that answered."""
    body = {"prompt": "p", "n": 2}
    return {httpx.post(f"{url}/v1/completions", json=body, verify=False).json()["server"] for _ in range(count)}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_all_replicas_get_requests(url: str) -> None:
    until(lambda: list(replicas(url).values()) == ["serving"] * REPLICAS)
    assert len(answers(url, 2 * REPLICAS)) == REPLICAS


@pytest.mark.parametrize("what", ["server", "replica"])
def test_one_that_is_killed_is_replaced_and_leaves_nothing_behind(url: str, what: str) -> None:
    before = replicas(url)
    server = psutil.Process(min(answers(url, 2 * REPLICAS)))
    family = [server, *server.children(recursive=True)]
    os.kill(server.pid if what == "server" else server.ppid(), signal.SIGKILL)
    assert psutil.wait_procs([server], timeout=60)[1] == []
    assert len(answers(url, 2 * REPLICAS)) == REPLICAS - 1
    until(lambda: list(replicas(url).values()) == ["serving"] * REPLICAS and replicas(url).keys() != before.keys())
    assert len(replicas(url).keys() & before.keys()) == REPLICAS - 1
    assert len(answers(url, 2 * REPLICAS)) == REPLICAS
    if what == "server":
        assert psutil.wait_procs(family, timeout=60)[1] == []
    for process in family[1:]:  # the small server's child does not watch it, as an engine does
        if process.is_running():
            process.kill()
