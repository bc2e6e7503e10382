"""What was learned outlives a server that is killed."""

import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from darts_server.demo.problems import sample_problem
from darts_server.demo.server import DARTS, Server, serving
from darts_server.store import Store
from tests.integration.fork_server import Serve

pytestmark = pytest.mark.engine
LOSS_SECONDS = 3.0
"""What a killed server may have learned last, and lost: a second of lengths, and three of the engine's steps."""


def ask(server: Server, prompts: list[str]) -> None:
    body = {"model": "tiny", "prompt": prompts, "n": 8, "max_tokens": 100}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200


def learned(state: Path) -> dict[str, dict[str, Any]]:
    with Store(state) as store:
        kinds = ("prompt", "dataset", "step", "profile", "deadline", "price", "latency")
        return {kind: dict(store.items(kind)) for kind in kinds}


def test_a_killed_server_knows_after_its_restart_what_it_knew_before(serve: Serve, tmp_path: Path) -> None:
    rng = Random(3)
    prompts = [sample_problem(rng).prompt for _ in range(16)]
    state = tmp_path / "state"
    flags = ("--policy", "darts_cut", "--budget", "utility", "--state-dir", str(state))
    with serving(DARTS, tmp_path / "first.log", *flags) as server:
        for few in (prompts, prompts, prompts[:3]):
            ask(server, few)
        saved = httpx.get(f"{server.url}/darts/v1/state").content
        time.sleep(LOSS_SECONDS)
        with httpx.Client() as client:  # in the middle of a run
            url = f"{server.url}/v1/completions"
            body = {"model": "tiny", "prompt": prompts, "n": 8, "max_tokens": 250, "ignore_eos": True, "stream": True}
            with client.stream("POST", url, json=body) as answer:
                assert answer.status_code == 200
                os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    before = learned(state)
    assert {kind for kind, known in before.items() if known} >= {"prompt", "step", "profile", "deadline", "latency"}
    assert all(known["groups"] >= 2 for known in before["prompt"].values())
    assert len(before["prompt"]) == len(set(prompts))

    with serve(DARTS, tmp_path / "second.log", *flags) as server:
        for key, known in before["prompt"].items():
            told = httpx.get(f"{server.url}/darts/v1/prompts/{key}").json()
            assert {name: told[name] for name in known} == known
        assert server.metric("darts_step_seconds", sequences="64") > 0, "the latency curve is known from the start"
        ask(server, prompts)
        assert server.metric("darts_rollout_seconds_count", kind="predicted") == 1, "and so is what to expect"
        httpx.put(f"{server.url}/darts/v1/state", content=saved, timeout=60).raise_for_status()
        told = httpx.get(f"{server.url}/darts/v1/prompts/{next(iter(before['prompt']))}").json()
        assert told["groups"] <= 3, "as saved, without the last groups"
