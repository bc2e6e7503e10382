"""veRL's own code with servers that it starts itself, in the environment of `environments`: see `verl/`."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.trainers.environments import ROOT, NotInstalled, create

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(3600)]
SECONDS = 1800
GUARD_SECONDS = 60.0
"""A guard waits for its server (`GRACE_SECONDS` of `darts_client.verl.process`), and then removes the folder."""
STEP = re.compile(r"step:(\d+) - ")
METRIC = re.compile(r"([\w/@-]+):(?:np\.\w+\()?(-?[\d.]+(?:e-?\d+)?)")
ROUNDING = 1e-5
"""Difference of probabilities between vLLM and the trainer's forward pass, both in float32: 9e-7 was measured."""
PARTS = [
    "check_settings",
    "check_groups_and_versions",
    "check_weights",
    "check_abort_and_resume",
    "check_clients_that_do_not_resume",
    "check_rejected_requests",
    "check_lost_server",
]
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "clients"))),
    "VERL_USE_EXTERNAL_MODULES": "tests.trainers.verl.cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray and the servers listen on loopback alone. Ray replaces `_node_ip_address=127.0.0.1` by another address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # The tests of a busy machine are not to be killed for the memory of others.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_raylet_start_wait_time_s": "300",
}


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return create("verl")
    except NotInstalled as error:
        pytest.skip(f"veRL cannot be installed here: {error}")


def run(python: Path, program: str, *arguments: str) -> list[str]:
    """Run a program of `verl/`; return its lines."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [str(python), "-m", f"tests.trainers.verl.{program}", *arguments]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        env=environment | ENVIRONMENT,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout.splitlines()


def wait_until_removed(folder: Path) -> None:
    """Wait for the guards of the servers, which outlive the program."""
    deadline = time.monotonic() + GUARD_SECONDS
    while folder.exists():
        assert time.monotonic() < deadline, f"{folder} is left"
        time.sleep(0.5)


def test_verls_managers_clients_and_agent_loops_work_with_two_replicas(python: Path) -> None:
    lines = [line.split() for line in run(python, "rollouts")]
    passed = [line[1] for line in lines if line[:1] == ["passed"]]
    assert passed == PARTS
    [folder] = [Path(line[1]) for line in lines if line[:1] == ["folder"]]
    wait_until_removed(folder)


def test_main_ppo_trains_two_steps_with_weights_that_arrive_by_themselves(python: Path, tmp_path: Path) -> None:
    steps = {}
    for line in run(python, "train", str(tmp_path), "2"):
        if (found := STEP.search(line)) is not None:
            steps[int(found[1])] = {name: float(value) for name, value in METRIC.findall(line)}
    # Step 0 is the validation before the training.
    assert sorted(steps) == [0, 1, 2]
    assert steps[1]["actor/grad_norm"] > 0
    # Shorter answers have higher rewards, and step 1 changes the weights much.
    assert steps[2]["response_length/mean"] < steps[1]["response_length/mean"]
    for step in (1, 2):
        # The trainer computes the log-probs of the server's tokens again, with its own weights of this step.
        assert steps[step]["training/rollout_probs_diff_max"] < ROUNDING
