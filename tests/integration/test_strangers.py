"""Requests of strangers to a server without keys, signals that must not end it, and its sudden end.

One server, started as users start it: its processes are looked at. The last test kills it.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from darts_server.offline.demo.server import DARTS, Server, serving
from tests.integration.fork_server import EAGER
from tests.integration.waiting import engine_processes

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
PAGE = {"Origin": "https://example.com"}
REBOUND = {"Host": "rebound.example.com:8000"}
COMPLETION = {"model": "tiny", "prompt": "7a-5b*4>", "n": 2, "max_tokens": 5}
SECONDS = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """TRL's way: without keys, with vLLM's development routes. And as behind a proxy: any is believed."""
    environment = EAGER | {"VLLM_SERVER_DEV_MODE": "1", "FORWARDED_ALLOW_IPS": "*"}
    log = tmp_path_factory.mktemp("strangers") / "log"
    with serving(DARTS, log, "--allowed-hosts", "rollouts.example.com", env=environment) as running:
        yield running


@pytest.fixture
def caller(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=240) as client:
        yield client


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_serves(caller: httpx.Client) -> None:
    assert caller.post("/v1/completions", json=COMPLETION).status_code == 200


def test_web_pages_of_strangers_read_nothing(caller: httpx.Client) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/darts/v1/live"):
        with caller.stream("GET", path, headers=PAGE) as answer:
            assert "access-control-allow-origin" not in answer.headers
    preflight = PAGE | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    answer = caller.options("/v1/completions", headers=preflight)
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("headers", [PAGE, REBOUND, REBOUND | {"Origin": "http://rebound.example.com:8000"}])
def test_web_pages_of_strangers_make_no_work_and_teach_nothing(caller: httpx.Client, headers: dict[str, str]) -> None:
    rollouts = {"prompts": [{"text": "7a-5b*4>"}], "group_size": 2, "sampling": {"max_tokens": 5}}
    rewards = {"rewards": [{"trajectory": "a", "reward": 1.0}]}
    bodies = {"/v1/completions": COMPLETION, "/darts/v1/rollouts": rollouts, "/darts/v1/rewards": rewards}
    for path, body in bodies.items():
        answer = caller.post(path, json=body, headers=headers)
        assert answer.status_code == 403, path
        assert answer.json()["error"]["type"] == "PermissionDeniedError"
    assert caller.post("/reset_prefix_cache", headers=headers).status_code == 403


@pytest.mark.parametrize("path", ["/server_info", "/v1/models", "/darts/v1/policy", "/darts/v1/live", "/nowhere"])
def test_a_name_that_points_here_by_dns_rebinding_reads_nothing(caller: httpx.Client, path: str) -> None:
    answer = caller.get(path, headers=REBOUND)
    assert answer.status_code == 403
    assert "--allowed-hosts" in answer.json()["error"]["message"]


def test_callers_of_this_machine_probes_and_allowed_names_are_served(caller: httpx.Client) -> None:
    assert caller.get("/is_sleeping").status_code == 200
    assert caller.post("/reset_prefix_cache").status_code == 200
    for host in ("10.1.2.3:8000", "[2001:db8::1]:8000", "localhost", "rollouts.example.com"):
        assert caller.get("/v1/models", headers={"Host": host}).status_code == 200
    for path in ("/health", "/metrics"):  # also by a service's name
        assert caller.get(path, headers=REBOUND).status_code == 200
    own_page = {"Origin": str(caller.base_url).rstrip("/")}
    assert caller.post("/v1/completions", json=COMPLETION, headers=own_page).status_code == 200


# Without an id of its own the third would be on a server of its own: pytest-xdist takes "::" for the end of the module.
@pytest.mark.parametrize("forged", ["127.0.0.1", "127.0.0.1, 10.1.1.1", pytest.param("::1", id="IPv6"), "10.1.1.1"])
def test_a_forwarded_address_is_never_this_machine(caller: httpx.Client, forged: str) -> None:
    headers = {"X-Forwarded-For": forged}
    assert caller.get("/server_info", headers=headers).status_code == 403
    assert caller.patch("/darts/v1/policy", json={}, headers=headers).status_code == 403
    assert caller.get("/v1/models", headers=headers).status_code == 200


def test_sighup_without_key_files_is_survived(server: Server, caller: httpx.Client) -> None:
    for process in engine_processes(server, with_workers=True):
        process.send_signal(signal.SIGHUP)
    os.kill(server.process.pid, signal.SIGHUP)
    wait_until(lambda: "SIGHUP: ignored" in server.log.read_text())
    assert_serves(caller)


def test_sigusr1_writes_the_stacks_of_all_threads_and_is_survived(server: Server, caller: httpx.Client) -> None:
    os.kill(server.process.pid, signal.SIGUSR1)
    wait_until(lambda: "Current thread" in server.log.read_text())
    assert_serves(caller)


def test_all_processes_end_when_the_server_is_killed(server: Server, caller: httpx.Client) -> None:
    vote = {"prompt": "7a-5b*4>", "n": 2, "sampling": {"max_tokens": 5}, "pattern": "([0-9])"}
    assert caller.post("/darts/v1/vote", json=vote).status_code == 200
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert len(engine_processes(server, with_workers=True)) >= 2, "an engine core and a worker"
    os.kill(server.process.pid, signal.SIGKILL)
    assert psutil.wait_procs(processes, timeout=SECONDS)[1] == []
