"""Candidates on real vLLM are pruned by the score of their hidden states: all survivors are returned, or n of them."""

import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.problems import Problem, reward, sample_problem
from darts_server.offline.demo.server import DARTS, Server
from tests.integration.fork_server import Serve
from tests.integration.weights import ORIGINAL, put

pytestmark = pytest.mark.engine
SIZE = 8
GROUPS = 16
FLAGS = ("--policy", "arrol", "--detect-at", "10")
NORM = "model.norm.weight"
COLD_STEPS = 20
"""Steps before the first pruning: changes of the weights with a rewarded group after each."""
PATIENCE = 180.0


def rollouts(server: Server, problems: list[Problem], **policy: object) -> list[dict[str, Any]]:
    answer = batch(server, problems, policy=policy, survivors=False)
    groups: list[dict[str, Any]] = answer["groups"]
    assert [len(group["trajectories"]) for group in groups] == [SIZE] * len(problems)
    assert not answer["survivors"]
    return groups


def batch(server: Server, problems: list[Problem], **more: object) -> dict[str, Any]:
    prompts = [{"text": problem.prompt} for problem in problems]
    body = {"prompts": prompts, "group_size": SIZE, "sampling": {"max_tokens": 200}, **more}
    answer = httpx.post(f"{server.url}/darts/v1/rollouts", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def train_step(server: Server, rng: Random, count: int = GROUPS, **policy: object) -> list[dict[str, Any]]:
    """Request groups and reward all their trajectories."""
    problems = [sample_problem(rng) for _ in range(count)]
    groups = rollouts(server, problems, **policy)
    rewards = [
        {"trajectory_id": trajectory["trajectory_id"], "reward": reward(problem, trajectory["text"])}
        for problem, group in zip(problems, groups, strict=True)
        for trajectory in group["trajectories"]
    ]
    report = httpx.post(f"{server.url}/darts/v1/rewards", json={"rewards": rewards}, timeout=240).json()
    assert report["matched"] == len(rewards)
    return groups


def end_cold_start(server: Server, rng: Random) -> None:
    """Make the rest of the first steps: in each, the same weights are loaded again, and one group is rewarded."""
    weights = {NORM: ORIGINAL[NORM]}
    for _ in range(COLD_STEPS):
        put(server, weights, partial=True).raise_for_status()
        assert not pruned(train_step(server, rng, count=1))


def pruned(groups: list[dict[str, Any]]) -> int:
    return sum(each["reason"] == "pruned" for group in groups for each in group["discarded"])


def wait_for_status(server: Server, status: str) -> None:
    end = time.monotonic() + PATIENCE
    while server.metric("darts_quality_status", status=status) != 1:
        assert time.monotonic() < end, f"the status is not {status}:\n{server.log_tail()}"
        time.sleep(0.2)


@pytest.mark.nightly
def test_groups_are_pruned_once_the_head_is_trained_also_after_a_restart(serve: Serve, tmp_path: Path) -> None:
    rng, flags = Random(7), (*FLAGS, "--state-dir", str(tmp_path / "state"))
    with serve(DARTS, tmp_path / "first.log", *flags) as server:
        assert server.metric("darts_quality_status", status="no_labels") == 1
        assert not pruned(train_step(server, rng)), "at first all are kept"
        learned = server.metric("darts_quality_labels_total")
        assert learned > GROUPS * SIZE / 2, "most go past their tenth token"
        wait_for_status(server, "few_labels")
        for _ in range(3):
            assert not pruned(train_step(server, rng))
        wait_for_status(server, "cold")
        end_cold_start(server, rng)
        wait_for_status(server, "ready")

        groups = train_step(server, rng)
        assert pruned(groups) > GROUPS
        assert all(0 <= t["quality"] <= 1 for group in groups for t in group["trajectories"] if t["length"] > 80)
        decided = {fate: server.metric("darts_pruning_decisions_total", outcome=fate) for fate in ("kept", "pruned")}
        assert decided["pruned"] == pruned(groups)
        assert 0.3 < decided["kept"] / sum(decided.values()) < 0.8
        assert server.metric("darts_probe_states_total", received="true") > 3 * GROUPS * SIZE / 2
        assert server.metric("darts_probe_states_total", received="false") == 0
        for name in ("auc", "brier"):
            assert 0 < server.metric(f"darts_quality_{name}", prediction="score") < 1
        assert server.metric("darts_quality_loss") > 0
        assert server.metric("darts_quality_training_steps_total") > 0
        assert not pruned(rollouts(server, [sample_problem(rng)], name="uniform"))

        survived = batch(server, [sample_problem(rng) for _ in range(GROUPS // 2)])
        assert survived["survivors"], "the policy's default"
        for group in survived["groups"]:
            assert len(group["trajectories"]) == group["candidates"] - pruned([group]) >= 1
            assert all(t["weight"] >= 1 for t in group["trajectories"])
        assert len({len(group["trajectories"]) for group in survived["groups"]}) > 1

    with serve(DARTS, tmp_path / "second.log", *flags) as server:
        assert server.metric("darts_quality_status", status="ready") == 1, server.log_tail()
        assert pruned(train_step(server, rng)) > GROUPS
        assert pruned(train_step(server, rng, name="darts+arrol")) > 0


def test_where_n_is_fixed_arrol_returns_a_sample_of_the_survivors_with_weights(server: Server) -> None:
    """Whatever was learned before: weights fit what was pruned."""
    body = {"model": "tiny", "prompt": sample_problem(Random(7)).prompt, "n": SIZE, "max_tokens": 200}
    sampled = httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Darts-Policy": "arrol"}, timeout=240)
    assert len(sampled.json()["choices"]) == SIZE
    record = httpx.get(f"{server.url}/darts/v1/groups/{sampled.headers['x-darts-group-id']}").json()["groups"][0]
    survivors = sum(c["reason"] != "pruned" for c in record["candidates"])
    assert record["sampled_from"] == survivors >= SIZE
    for one in (c for c in record["candidates"] if c["weight"] is not None):
        assert one["weight"] == pytest.approx(survivors / SIZE / one["survival"])
