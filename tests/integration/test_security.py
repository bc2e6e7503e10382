"""API keys, their rights, and limits on the running server."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.server import DARTS, Server
from tests.integration.fork_server import Serve
from tests.integration.waiting import wait_idle

pytestmark = pytest.mark.engine
GIVEN, FILED, ROTATED, ADMIN = "given-5f1d", "filed-77ab", "rotated-09c2", "admin-e31b"
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "7a-5b*4>", "n": 4, "max_tokens": 20}
LONG: dict[str, Any] = {**COMPLETION, "model": "tiny:raw", "n": 24, "max_tokens": 280, "ignore_eos": True}
"""Two of these fill the server, until they disconnect. They are not shaped: the second one would get fewer candidates,
as the queue is nearly full."""
ROLLOUT: dict[str, Any] = {"prompts": [{"text": "7a-5b*4>"}], "group_size": 4, "sampling": {"max_tokens": 20}}
MAX_WAITING, MAX_OF_A_KEY, LARGEST = 46, 30, 100_000
PATIENCE = 180.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "use").write_text(f"{FILED}\n")
    (folder / "admin").write_text(f"{ADMIN}\n")
    return folder


@pytest.fixture(scope="module")
def server(serve: Serve, keys: Path) -> Iterator[Server]:
    """A server with keys and with room for two candidates."""
    flags = (
        *("--api-key-file", str(keys / "use"), "--admin-api-key-file", str(keys / "admin"), "--max-num-seqs", "2"),
        *("--max-queued-candidates", str(MAX_WAITING), "--max-candidates-per-key", str(MAX_OF_A_KEY)),
        *(
            "--max-body-bytes",
            str(LARGEST),
        ),
    )
    environment = {"VLLM_API_KEY": GIVEN, "VLLM_SERVER_DEV_MODE": "1"}
    with serve(DARTS, keys / "log", *flags, env=environment) as running:
        yield running


def call(server: Server, method: str, path: str, key: str | None, **more: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.request(method, server.url + path, headers=headers, timeout=240, **more)


def test_routes_that_are_not_public_need_a_key_and_vllms_control_routes_an_admin_key(server: Server) -> None:
    """As tests/http/security has it for all routes."""
    for path in ("/health", "/ping", "/version", "/metrics", "/openapi.json", "/darts/"):
        assert call(server, "GET", path, None).status_code == 200, path
    keys = (None, "wrong", GIVEN, FILED, ADMIN)
    for path in ("/v1/completions", "/invocations"):
        answers = [call(server, "POST", path, key, json=COMPLETION).status_code for key in keys]
        assert answers == [401, 401, 200, 200, 200]
    for path in ("/generative_scoring", "/tokenize", "/darts/v1/rollouts", "/darts/v1/rewards"):
        assert call(server, "POST", path, None, json={}).status_code == 401
    for path in ("/pause", "/update_weights", "/scale_elastic_ep", "/reset_prefix_cache", "/sleep"):
        assert [call(server, "POST", path, key, json={}).status_code for key in (None, GIVEN)] == [401, 403]
    assert call(server, "POST", "/reset_prefix_cache", ADMIN).status_code == 200
    assert call(server, "GET", "/is_sleeping", ADMIN).status_code == 200
    assert call(server, "PATCH", "/darts/v1/policy", ADMIN, json={}).status_code == 200


def test_dangerous_routes_are_closed_to_admin_keys_too(server: Server) -> None:
    answer = call(server, "POST", "/collective_rpc", ADMIN, json={"method": "any"})
    assert answer.status_code == 403
    assert "--allow-dangerous-routes" in answer.json()["error"]["message"]


def test_a_large_body_is_rejected_on_every_route(server: Server) -> None:
    for path in ("/v1/completions", "/tokenize", "/darts/v1/rollouts"):
        answer = call(server, "POST", path, GIVEN, content=b" " * (LARGEST + 1))
        assert answer.status_code == 413, path
        assert f"at most {LARGEST} bytes" in answer.json()["error"]["message"]


def test_all_routes_answer_429_while_the_queue_is_full_and_serve_again_afterwards(server: Server) -> None:
    if server.metric("darts_engines_up") > 1:
        pytest.skip("each engine runs two candidates, so that fewer wait")
    with ExitStack() as long:
        for key in (GIVEN, ADMIN):
            connection = long.enter_context(closing(HTTPConnection(server.url.removeprefix("http://"))))
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(LONG), headers)
        deadline = time.monotonic() + PATIENCE
        while server.metric("vllm:num_requests_waiting") < MAX_WAITING:
            assert time.monotonic() < deadline
        # While the engine is paused none of them ends, however slow the machine is.
        assert call(server, "POST", "/pause?mode=keep", ADMIN).status_code == 200
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "7a>"}], "max_tokens": 5}
        refused = [("/v1/completions", COMPLETION), ("/v1/completions", COMPLETION | {"stream": True})]
        refused += [("/v1/chat/completions", chat), ("/v1/messages", chat), ("/darts/v1/rollouts", ROLLOUT)]
        for path, body in refused:
            answer = call(server, "POST", path, FILED, json=body)
            assert answer.status_code == 429, (path, answer.text)
            assert int(answer.headers["Retry-After"]) > 0
            assert answer.json()["error"]["type"] == "RateLimitError"
        assert server.metric("darts_requests_refused_total", reason="queue") == len(refused)
        assert call(server, "POST", "/resume", ADMIN).status_code == 200
    wait_idle(server)
    assert call(server, "POST", "/darts/v1/rollouts", FILED, json=ROLLOUT).status_code == 200
    wait_idle(server)


def test_a_key_cannot_exceed_its_candidates_by_sending_many_prompts(server: Server) -> None:
    body = COMPLETION | {"prompt": ["7a-5b*4>"] * 3, "n": 8}
    answer = call(server, "POST", "/v1/completions", GIVEN, json=body)
    assert answer.status_code == 400
    assert "needs 36 candidates" in answer.json()["error"]["message"]
    assert server.count_requests() == 0
    assert call(server, "POST", "/v1/completions", ADMIN, json=body).status_code == 200


def test_keys_are_reloaded_on_sighup(server: Server, keys: Path) -> None:
    (keys / "use").write_text(f"{ROTATED}\n")
    os.kill(server.process.pid, signal.SIGHUP)
    deadline = time.monotonic() + PATIENCE
    while call(server, "GET", "/v1/models", ROTATED).status_code != 200:
        assert time.monotonic() < deadline
    assert [call(server, "GET", "/v1/models", key).status_code for key in (FILED, GIVEN)] == [401, 200]


def test_no_key_was_ever_logged(server: Server) -> None:
    log = server.log.read_text()
    assert "API keys reloaded" in log
    assert not [key for key in (GIVEN, FILED, ROTATED, ADMIN) if key in log]


@pytest.mark.nightly
def test_without_a_key_it_does_not_start_on_an_address_that_other_machines_reach(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    log = tmp_path / "log"
    with pytest.raises(RuntimeError, match="exited with code 2"), serve(DARTS, log, "--host", "0.0.0.0"):
        pass
    assert "darts-server: --host 0.0.0.0 is reachable from other machines" in log.read_text()
