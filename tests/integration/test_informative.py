"""Groups that are sampled by the rewards of a verifier, on real vLLM."""

from random import Random
from typing import Any

import httpx
import pytest

from darts_client import Client, PromptSpec
from darts_client.advantages import server_advantages
from darts_server.offline.demo.problems import Problem, reward, sample_problem
from darts_server.offline.demo.server import DARTS
from tests.integration.fork_server import Serve

pytest.importorskip("darts_server.verify.verifiers", reason="this server has no verifiers")
pytestmark = pytest.mark.engine
SIZE = 4
SAMPLING: dict[str, Any] = {"group_size": SIZE, "max_tokens": 200, "seed": 3}


def specs_of(problems: list[Problem]) -> list[PromptSpec]:
    return [PromptSpec(problem.prompt, metadata={"answer": str(problem.answer)}) for problem in problems]


def test_groups_carry_the_signal_of_all_their_candidates(serve_one: Serve, tmp_path: Any) -> None:
    rng = Random(5)
    problems = [sample_problem(rng) for _ in range(12)]
    with serve_one(DARTS, tmp_path / "log", "--verifier", "regex:#([0-9])$") as server, Client(server.url) as client:
        batch = client.batch(specs_of(problems), policy="informative", **SAMPLING)
        assert len(batch.groups) == len(problems)
        for group, problem in zip(batch.groups, problems, strict=True):
            assert group.num_rewarded == 2 * SIZE
            rewards = [reward(problem, trajectory.text) for trajectory in group.trajectories]
            assert [trajectory.reward for trajectory in group.trajectories] == rewards
            assert [trajectory.correct for trajectory in group.trajectories] == [value > 0 for value in rewards]
            everyone = rewards + [discarded.reward or 0.0 for discarded in group.discarded]
            mean = sum(everyone) / len(everyone)
            assert group.zero_variance is (len(set(everyone)) == 1)
            for trajectory, value in zip(group.trajectories, rewards, strict=True):
                assert trajectory.advantage == pytest.approx(value - mean)
            right = sum(map(bool, everyone))
            if 0 < right < len(everyone):
                assert sum(map(bool, rewards)) == min(right, max(SIZE // 2, SIZE - (len(everyone) - right)))
                assert sum(t.weight or 0 for t in group.trajectories) == pytest.approx(2 * SIZE)
                # Right and wrong answers have the same weight in the gradient.
                assert sum(server_advantages(group)) == pytest.approx(0, abs=1e-9)
            statistics = httpx.get(f"{server.url}/darts/v1/prompts/{group.prompt_key}").json()["rewards"]
            assert (statistics["rewarded"], statistics["right"]) == (2 * SIZE, right)
        assert any(group.zero_variance is False for group in batch.groups), "nothing to compare"

        whole = client.batch(specs_of(problems), policy="off", **SAMPLING)
        informative = sum(group.zero_variance is False for group in whole.groups)
        with client.rollouts(
            specs_of(problems), policy="off", only="informative", num_groups=len(problems), **SAMPLING
        ) as rollouts:
            assert len(list(rollouts)) == informative
        assert rollouts.shortfall == len(rollouts.uninformative) == len(problems) - informative

        decided = client.batch(specs_of(problems), policy="informative", stop_when="decided", **SAMPLING)
        assert any(group.decided_early for group in decided.groups)
        assert decided.usage.generated < batch.usage.generated
