"""Two engines under Ray behind one server: groups and metrics, the loss of Ray's head, and what is left at the end."""

import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from darts_server.offline.demo.server import DARTS
from darts_server.vllm.fleet.ray_hosts import HEAD_SECONDS
from tests.integration.fleets import Marked, fleet, wait_up

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
SIZE = 4


def test_two_engines_serve_as_one_and_end_with_their_server(tmp_path: Path) -> None:
    marked = Marked()
    with fleet(2, DARTS, tmp_path / "log", env=marked.env) as server:
        prompts = [{"text": f"{number}a+4b*2>"} for number in range(1, 9)]
        body = {"prompts": prompts, "group_size": SIZE, "sampling": {"max_tokens": 60, "logprobs": True}}

        def check_groups() -> None:
            answer = httpx.post(f"{server.url}/darts/v1/rollouts", json=body, timeout=240)
            assert answer.status_code == 200, answer.text
            assert [len(group["trajectories"]) for group in answer.json()["groups"]] == [SIZE] * len(prompts)

        check_groups()
        assert server.metric("darts_engines_up") == 2
        scaled = httpx.post(f"{server.url}/scale_elastic_ep", json={"new_data_parallel_size": 3}, timeout=60)
        assert scaled.status_code == 501, scaled.text
        assert "--replicas" in scaled.json()["error"]["message"]
        assert all(server.metric("vllm:generation_tokens_total", engine=str(rank)) for rank in range(2))
        hosts = marked.hosts()
        assert len(hosts) == 2
        marked.process("gcs_server").kill()  # then no engine can be started again
        marked.process("engine").kill()
        wait_up(server, 1)
        time.sleep(HEAD_SECONDS + 5)
        check_groups()
        log = server.log.read_text()
        assert log.count("is not started again until the head of Ray's cluster answers") == 1
        assert "another host of engine" not in log
        marked.process("raylet").kill()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    _, left = psutil.wait_procs(hosts, 30)
    assert not left
