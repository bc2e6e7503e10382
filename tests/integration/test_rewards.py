"""Rewards for trajectories, named by id and by tokens, on real vLLM."""

from collections.abc import Sequence
from random import Random
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.problems import reward, sample_problem
from darts_server.offline.demo.server import Server

pytestmark = pytest.mark.engine
SIZE = 8


def report(server: Server, rewards: Sequence[dict[str, Any]]) -> Any:
    answer = httpx.post(f"{server.url}/darts/v1/rewards", json={"rewards": rewards}, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()


def selected(group: dict[str, Any]) -> list[dict[str, Any]]:
    return [candidate for candidate in group["candidates"] if candidate["selected_as"]]


def test_choices_are_rewarded_by_their_tokens_and_by_their_trajectory_ids(server: Server) -> None:
    rng = Random(21)
    posed = [sample_problem(rng) for _ in range(2)]
    seen, whole = (server.metric(f"darts_{name}_total") for name in ("rewards", "rewarded_groups"))
    prompts = [problem.prompt for problem in posed]
    body = {"model": "tiny", "prompt": prompts, "n": SIZE, "max_tokens": 200, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240)
    choices = answer.json()["choices"]
    values = [reward(posed[i // SIZE], choice["text"]) for i, choice in enumerate(choices)]
    url = f"{server.url}/darts/v1/groups/{answer.headers['X-Darts-Group-Id']}"
    ids = [each["trajectory_id"] for group in httpx.get(url).json()["groups"] for each in selected(group)]

    tokens = [
        {"prompt_token_ids": choice["prompt_token_ids"], "completion_token_ids": choice["token_ids"], "reward": value}
        for choice, value in zip(choices, values, strict=True)
    ]
    named = [{"trajectory_id": name, "reward": value} for name, value in zip(ids, values, strict=True)]
    first = report(server, tokens[:SIZE] + named[SIZE:])
    assert (first["matched"] + first["repeated"], first["unknown"]) == (2 * SIZE, 0), "equal ones are named at once"
    assert report(server, named + tokens) == {"matched": 0, "repeated": 4 * SIZE, "unknown": 0, "unknown_indices": []}

    for number, group in enumerate(httpx.get(url).json()["groups"]):
        own = values[number * SIZE : (number + 1) * SIZE]
        assert [candidate["reward"] for candidate in selected(group)] == own
        assert group["zero_variance"] is (len(set(own)) == 1)
        lengths = [len(choice["token_ids"]) for choice in choices[number * SIZE : (number + 1) * SIZE]]
        assert [candidate["length"] for candidate in selected(group)] == lengths
        statistics = httpx.get(f"{server.url}/darts/v1/prompts/{group['prompt_key']}").json()["rewards"]
        assert (statistics["rewarded"], statistics["right"]) == (SIZE, sum(value > 0 for value in own))
        assert (statistics["rewarded_groups"], statistics["zero_variance_groups"]) == (1, int(len(set(own)) == 1))
    assert server.metric("darts_rewards_total") == seen + first["matched"]
    assert server.metric("darts_rewarded_groups_total") == whole + 2
    assert 0 <= server.metric("darts_pass_rate") <= 1
