"""vLLM's priority scheduling: the order in which requests start that wait for the engine."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.server import DARTS, Server
from tests.integration.fork_server import Serve
from tests.integration.waiting import wait_counted, wait_idle

pytestmark = pytest.mark.engine
CANDIDATES = 3
TOKENS = {"short": 50, "long": 150}


def post(server: Server, key: str, **more: Any) -> float:
    """Request a group of two under a prompt key; return when it was answered."""
    body = {"model": "tiny", "prompt": "7a-5b*4>", "n": 2, "max_tokens": TOKENS[key], "ignore_eos": True, **more}
    headers = {"X-Darts-Policy": "uniform", "X-Darts-Prompt-Key": key}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=240)
    assert answer.status_code == 200, answer.text
    assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["length"] * 2
    return time.monotonic()


def answered_first(server: Server, *requests: dict[str, Any]) -> str:
    """Send requests one after the other while the engine is full; return the key of the one that is answered first."""
    generated = server.metric("vllm:generation_tokens_total")
    with ThreadPoolExecutor(4) as pool:
        busy = pool.submit(post, server, "long", priority=-9)
        wait_counted(server, "vllm:generation_tokens_total", generated + 2)
        waiting: dict[str, Future[float]] = {}
        for place, request in enumerate(requests, start=1):
            waiting[request["key"]] = pool.submit(post, server, **request)
            wait_counted(server, "vllm:num_requests_waiting", CANDIDATES * place)
        assert not busy.done()
        times = {key: answer.result() for key, answer in waiting.items()}
    wait_idle(server)
    return min(times, key=lambda key: times[key])


@pytest.mark.nightly
def test_the_longest_expected_start_first_unless_their_callers_say_otherwise(serve: Serve, tmp_path: Path) -> None:
    flags = ("--scheduling-policy", "priority", "--max-num-seqs", str(CANDIDATES), "--redundancy", "1.5")
    with serve(DARTS, tmp_path / "log", *flags) as server:
        for key in TOKENS:
            post(server, key)
        assert answered_first(server, {"key": "short"}, {"key": "long"}) == "long"
        assert answered_first(server, {"key": "short", "priority": 1}, {"key": "long", "priority": 2}) == "short"
