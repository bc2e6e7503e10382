"""AReaL's own trainer trains the tiny model on a CPU with the rollouts of a real server: see `areal/`."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from darts_server.offline.demo.server import DARTS, bind_port, serving
from tests.integration.weights import status
from tests.trainers.environments import ROOT, create_or_skip
from tests.trainers.runs import record

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]
SECONDS = 900
STEPS, PROMPTS, SIZE = 2, 4, 4
ROUNDING = 1e-4
"""Difference of log-probs between vLLM and the trainer in nats, both in float32: 5e-6 was measured."""
UPDATE = "ppo_actor/update"


@pytest.fixture(scope="module")
def python() -> Path:
    return create_or_skip("areal")


def test_two_steps_train_with_groups_and_with_weights_from_disk(python: Path, tmp_path: Path) -> None:
    flags = ("--policy", "uniform", "--group-size", str(SIZE), "--dialect", "areal", "--weights-root", str(tmp_path))
    with bind_port() as free:
        port = str(free.getsockname()[1])
    with serving(DARTS, tmp_path / "log", *flags, env={"TORCHDYNAMO_DISABLE": "1"}) as server:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "clients"))),
            "AREAL_LLM_SERVER_ADDRS": server.url.removeprefix("http://"),
            # One process without AReaL's scheduler, as its launcher would start it.
            "AREAL_SPMD_MODE": "1",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        command = [str(python), "-m", "tests.trainers.areal.train", str(tmp_path), str(STEPS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-4000:]
        groups = server.metric("darts_groups_total", outcome="completed")
        version = status(server)["version"]

    assert groups == STEPS * PROMPTS
    # AReaL sends the weights after each step.
    assert version == STEPS
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    assert len(steps) == STEPS
    for step in steps:
        assert step["rollout/reward"] > 0
        assert step[f"{UPDATE}/grad_norm"] > 0
        # The trainer computes the log-probs of the server's tokens with its own weights of this step.
        assert abs(step[f"{UPDATE}/compute_logp/kl_div_direct/max"]) < ROUNDING
        assert abs(step[f"{UPDATE}/compute_logp/kl_div_direct/min"]) < ROUNDING
    record("areal_training", "areal", python, {"requests", "groups", "weights", "training"})
