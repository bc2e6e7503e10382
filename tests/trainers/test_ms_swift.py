"""ms-swift trains the tiny model on a CPU with the rollouts of a real server: see `ms_swift/`."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from darts_server.offline.demo.server import DARTS, serving
from tests.integration.weights import status
from tests.trainers.environments import ROOT, create_or_skip
from tests.trainers.runs import record

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]
SECONDS = 900
STEPS, PROMPTS = 2, 8
ROUNDING = 1e-4
"""Difference of a trajectory's mean log-prob between vLLM and the trainer, both in float32: 1.2e-6 was measured."""
LARGEST = "rollout_correction/log_ppl_diff_max"


@pytest.fixture(scope="module")
def python() -> Path:
    return create_or_skip("ms_swift")


def test_two_steps_of_grpo_train_with_weights_that_arrive(python: Path, tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "clients"))),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "USE_HF": "1",
    }
    with serving(DARTS, tmp_path / "log", "--policy", "uniform", env={"TORCHDYNAMO_DISABLE": "1"}) as server:
        command = [str(python), "-m", "tests.trainers.ms_swift.train", server.url, str(tmp_path), str(STEPS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-4000:]
        groups = server.metric("darts_groups_total", outcome="completed")
        version = status(server)["version"]

    assert groups == STEPS * PROMPTS
    # ms-swift sends the weights before each step, the first one included.
    assert version == STEPS
    lines = [json.loads(line) for line in (tmp_path / "out" / "logging.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line]
    assert len(steps) == STEPS
    for step in steps:
        assert step["grad_norm"] > 0
        assert step["reward"] > 0
        # The trainer computes the log-probs of the server's tokens with its own weights of this step.
        assert abs(step[LARGEST]) < ROUNDING
    record("ms_swift", "ms-swift", python, {"requests", "groups", "weights", "training"})
