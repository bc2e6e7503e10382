"""Rewards for trajectories, named by id and by tokens, on real vLLM."""

from collections.abc import Sequence
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest

from darts_server.demo.problems import Problem, reward, sample_problem
from darts_server.demo.server import Server

pytestmark = pytest.mark.engine
SIZE = 8
Named = dict[str, Any]


def problems(count: int, seed: int) -> list[Problem]:
    rng = Random(seed)
    return [sample_problem(rng) for _ in range(count)]


def completion(prompt: str | list[str], **more: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 200, "return_token_ids": True, **more}


def by_tokens(choice: dict[str, Any], value: float) -> Named:
    return {
        "prompt_token_ids": choice["prompt_token_ids"],
        "completion_token_ids": choice["token_ids"],
        "reward": value,
    }


def report(server: Server, rewards: Sequence[Named]) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/darts/v1/rewards", json={"rewards": rewards}, timeout=240)
    assert answer.status_code == 200, answer.text
    counts: dict[str, Any] = answer.json()
    return counts


def groups_of(server: Server, name: str) -> list[dict[str, Any]]:
    """The records of a request."""
    answer = httpx.get(f"{server.url}/darts/v1/groups/{name}")
    assert answer.status_code == 200, answer.text
    groups: list[dict[str, Any]] = answer.json()["groups"]
    return groups


def rewards_of(server: Server, key: str) -> dict[str, Any]:
    rewards: dict[str, Any] = httpx.get(f"{server.url}/darts/v1/prompts/{key}").json()["rewards"]
    return rewards


def selected(group: dict[str, Any]) -> list[dict[str, Any]]:
    return [candidate for candidate in group["candidates"] if candidate["selected_as"]]


def check_statistics(server: Server, group: dict[str, Any]) -> None:
    """Check the statistics of a prompt against those of its only group, whose trajectories count with their weights."""
    statistics = rewards_of(server, group["prompt_key"])
    trajectories = [(c["length"], c["weight"], c["reward"]) for c in selected(group)]
    right = [(length, weight) for length, weight, value in trajectories if value > 0]
    wrong = [(length, weight) for length, weight, value in trajectories if value <= 0]
    total = sum(weight for _, weight, _ in trajectories)
    assert total == (SIZE if group["policy"] == "off" else len(group["candidates"]))
    assert (statistics["rewarded"], statistics["right"]) == (SIZE, len(right))
    assert statistics["pass_rate"] == pytest.approx(sum(w for _, w in right) / total)
    for mean, of in ((statistics["length_right"], right), (statistics["length_wrong"], wrong)):
        assert (mean is None) == (not of)
        if of:
            expected = np.average([length for length, _ in of], weights=[weight for _, weight in of])
            assert (mean["count"], mean["mean"]) == (len(of), pytest.approx(float(expected)))
    assert (statistics["pattern"] is None) == (not right or not wrong)


def test_choices_are_rewarded_by_their_tokens_and_by_their_trajectory_ids(server: Server) -> None:
    posed = problems(2, seed=21)
    seen, whole = (server.metric(f"darts_{name}_total") for name in ("rewards", "rewarded_groups"))
    answer = httpx.post(f"{server.url}/v1/completions", json=completion([p.prompt for p in posed], n=SIZE), timeout=240)
    choices = answer.json()["choices"]
    values = [reward(posed[i // SIZE], choice["text"]) for i, choice in enumerate(choices)]
    groups = groups_of(server, answer.headers["X-Darts-Group-Id"])
    ids = [candidate["trajectory_id"] for group in groups for candidate in selected(group)]

    tokens = [by_tokens(choice, value) for choice, value in zip(choices, values, strict=True)]
    named = [{"trajectory_id": name, "reward": value} for name, value in zip(ids, values, strict=True)]
    first = report(server, tokens[:SIZE] + named[SIZE:])
    assert (first["matched"] + first["repeated"], first["unknown"]) == (2 * SIZE, 0), "equal ones are named at once"
    assert report(server, named + tokens) == {"matched": 0, "repeated": 4 * SIZE, "unknown": 0, "unknown_indices": []}

    for number, group in enumerate(groups_of(server, answer.headers["X-Darts-Group-Id"])):
        own = values[number * SIZE : (number + 1) * SIZE]
        assert [candidate["reward"] for candidate in selected(group)] == own
        assert group["zero_variance"] is (len(set(own)) == 1)
        lengths = [len(choice["token_ids"]) for choice in choices[number * SIZE : (number + 1) * SIZE]]
        assert [candidate["length"] for candidate in selected(group)] == lengths
        statistics = rewards_of(server, group["prompt_key"])
        check_statistics(server, group)
        assert (statistics["rewarded_groups"], statistics["zero_variance_groups"]) == (1, int(len(set(own)) == 1))
    assert server.metric("darts_rewards_total") == seen + first["matched"]
    assert server.metric("darts_rewarded_groups_total") == whole + 2
    assert 0 <= server.metric("darts_pass_rate") <= 1


def test_rewards_of_unshaped_trajectories_are_unknown(server: Server) -> None:
    unknown = server.metric("darts_rewards_total", matched="false")
    body = completion("7a-5b*4c-8d+7e-1f*3>", n=2, seed=77) | {
        "model": "tiny:raw",
        "temperature": 2.0,
        "min_tokens": 30,
    }
    choices = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240).json()["choices"]
    counts = report(server, [by_tokens(choice, 1.0) for choice in choices])
    assert counts == {"matched": 0, "repeated": 0, "unknown": 2, "unknown_indices": [0, 1]}
    assert server.metric("darts_rewards_total", matched="false") == unknown + 2
