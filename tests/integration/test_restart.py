"""Learned statistics survive a server that is killed."""

import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from darts_server.demo.problems import sample_problem
from darts_server.demo.server import DARTS, Server
from darts_server.store import Store
from tests.integration.fork_server import Serve

pytestmark = pytest.mark.engine
LOSS_SECONDS = 3.0
"""A killed server loses at most the last second of lengths and the last three of engine steps, unless it has to wait
for the disk or for a processor."""


def complete(server: Server, prompts: list[str]) -> None:
    body = {"model": "tiny", "prompt": prompts, "n": 8, "max_tokens": 100}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200


def learned(state: Path) -> dict[str, dict[str, Any]]:
    with Store(state) as store:
        kinds = ("prompt", "dataset", "step", "profile", "deadline", "price", "latency")
        return {kind: dict(store.items(kind)) for kind in kinds}


def wait_written(state: Path, keys: int) -> None:
    """Wait until two groups of each prompt are on the disk."""

    began = time.monotonic()
    while len(prompts := learned(state)["prompt"]) < keys or any(stats["groups"] < 2 for stats in prompts.values()):
        assert time.monotonic() - began < 60, f"{[stats['groups'] for stats in prompts.values()]} groups"
        time.sleep(0.2)


def test_a_killed_server_has_its_statistics_again_after_a_restart(serve: Serve, tmp_path: Path) -> None:
    rng = Random(3)
    prompts = [sample_problem(rng).prompt for _ in range(16)]
    state = tmp_path / "state"
    flags = ("--policy", "darts_cut", "--budget", "utility", "--state-dir", str(state))
    with serve(DARTS, tmp_path / "first.log", *flags) as server:
        for few in (prompts, prompts, prompts[:3]):
            complete(server, few)
        saved = httpx.get(f"{server.url}/darts/v1/state").content
        time.sleep(LOSS_SECONDS)
        wait_written(state, len(set(prompts)))
        with httpx.Client() as client:  # in the middle of a run
            url = f"{server.url}/v1/completions"
            body = {"model": "tiny", "prompt": prompts, "n": 8, "max_tokens": 250, "ignore_eos": True, "stream": True}
            with client.stream("POST", url, json=body) as answer:
                assert answer.status_code == 200
                os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    before = learned(state)
    assert {kind for kind, stats in before.items() if stats} >= {"prompt", "step", "profile", "deadline", "latency"}
    assert all(stats["groups"] >= 2 for stats in before["prompt"].values())
    assert len(before["prompt"]) == len(set(prompts))

    with serve(DARTS, tmp_path / "second.log", *flags) as server:
        for key, stats in before["prompt"].items():
            restored = httpx.get(f"{server.url}/darts/v1/prompts/{key}").json()
            assert {name: restored[name] for name in stats} == stats
        assert server.metric("darts_step_seconds", sequences="64") > 0, "the latency curve is known from the start"
        complete(server, prompts)
        assert server.metric("darts_rollout_seconds_count", kind="predicted") == 1, "and so is what to expect"
        httpx.put(f"{server.url}/darts/v1/state", content=saved, timeout=60).raise_for_status()
        restored = httpx.get(f"{server.url}/darts/v1/prompts/{next(iter(before['prompt']))}").json()
        assert restored["groups"] <= 3, "as saved, without the last groups"
