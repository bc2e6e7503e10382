"""Two engines under Ray behind one server: groups and metrics, and what is left when it ends."""

import signal
import time
from pathlib import Path

import httpx
import pytest

from darts_server.demo.server import DARTS
from tests.integration.fleets import Marked, fleet

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
SIZE = 4


def test_two_engines_serve_as_one_and_end_with_their_server(tmp_path: Path) -> None:
    marked = Marked()
    with fleet(2, DARTS, tmp_path / "log", env=marked.env) as server:
        prompts = [{"text": f"{number}a+4b*2>"} for number in range(1, 9)]
        body = {"prompts": prompts, "group_size": SIZE, "sampling": {"max_tokens": 60, "logprobs": True}}
        answer = httpx.post(f"{server.url}/darts/v1/rollouts", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        assert [len(group["trajectories"]) for group in answer.json()["groups"]] == [SIZE] * len(prompts)
        assert server.metric("darts_engines_up") == 2
        scaled = httpx.post(f"{server.url}/scale_elastic_ep", json={"new_data_parallel_size": 3}, timeout=60)
        assert scaled.status_code == 501, scaled.text
        assert "--replicas" in scaled.json()["error"]["message"]
        assert all(server.metric("vllm:generation_tokens_total", engine=str(rank)) for rank in range(2))
        hosts = marked.hosts()
        assert len(hosts) == 2
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    deadline = time.monotonic() + 30
    while left := [each for each in hosts if each.is_running()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
