"""veRL's own code with servers that it starts itself, in the environment of `environments`: see `verl/`."""

import time
from pathlib import Path

import pytest

from tests.trainers.environments import create_or_skip
from tests.trainers.runs import record
from tests.trainers.verl.launch import run, train

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(3600)]
GUARD_SECONDS = 60.0
"""A guard waits for its server (`GRACE_SECONDS` of `darts_client.verl.process`), and then removes the folder."""
ROUNDING = 1e-4
"""Difference of probabilities between vLLM and the trainer's forward pass, both in float32: 5.5e-6 was measured in 40
steps. One step of such a training changes some probabilities by .08."""
PARTS = [
    "check_settings",
    "check_groups_and_versions",
    "check_weights",
    "check_abort_and_resume",
    "check_clients_that_do_not_resume",
    "check_rejected_requests",
    "check_lost_server",
]


@pytest.fixture(scope="module")
def python() -> Path:
    return create_or_skip("verl")


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
    record("verl", "verl", python, {"requests", "groups", "weights"})


def test_main_ppo_trains_two_steps_with_weights_that_arrive_by_themselves(python: Path, tmp_path: Path) -> None:
    first, *steps = train(python, tmp_path, 2, "uniform")
    assert set(first) == {"step", "held_out"}
    assert [step["step"] for step in steps] == [1, 2]
    assert "held_out" in steps[-1]
    for step in steps:
        assert step["gradient"] > 0
        # The trainer computes the log-probs of the server's tokens again, with its own weights of this step.
        assert step["gap"] < ROUNDING
    record("verl_training", "verl", python, {"requests", "weights", "training"})
