import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from statistics import mean, stdev
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from darts_client import Group, Trajectory
from darts_client.tensors import to_tensors

Row = tuple[list[int], list[float]]
rows = st.lists(st.tuples(st.integers(1, 99), st.floats(-9, 0, width=32)), max_size=6).map(
    lambda pairs: ([token for token, _ in pairs], [logprob for _, logprob in pairs])
)


def group(*members: Row, prompt: tuple[int, ...] | None = (1, 2)) -> Group:
    trajectories = tuple(
        Trajectory(index, "", tuple(tokens), tuple(logprobs), "stop")
        for index, (tokens, logprobs) in enumerate(members)
    )
    return Group("g", prompt, trajectories)


@given(st.lists(st.lists(rows, min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 3))
def test_tensors_hold_all_tokens_and_logprobs_between_the_padding(batch: list[list[Row]], pad_id: int) -> None:
    groups = [group(*members, prompt=tuple(range(1, index + 2))) for index, members in enumerate(batch)]
    tensors = to_tensors(groups, pad_id=pad_id)
    assert tensors.prompt_ids is not None
    assert tensors.prompt_mask is not None
    assert tensors.logprobs is not None
    assert tensors.completion_ids.dtype == tensors.prompt_ids.dtype == torch.int64
    assert (tensors.completion_mask.dtype, tensors.logprobs.dtype) == (torch.bool, torch.float32)
    expected = [(index, tokens, logprobs) for index, members in enumerate(batch) for tokens, logprobs in members]
    assert tensors.group.tolist() == [index for index, _, _ in expected]
    for n, (index, tokens, logprobs) in enumerate(expected):
        count = len(tokens)
        assert tensors.completion_ids[n, :count].tolist() == tokens
        assert tensors.logprobs[n, :count].tolist() == logprobs
        assert tensors.completion_mask[n].tolist() == [k < count for k in range(tensors.completion_ids.shape[1])]
        assert (tensors.completion_ids[n, count:] == pad_id).all()
        assert (tensors.logprobs[n, count:] == 0).all()
        prompt = list(range(1, index + 2))
        assert tensors.prompt_ids[n, -len(prompt) :].tolist() == prompt
        assert tensors.prompt_ids[n][tensors.prompt_mask[n]].tolist() == prompt
        assert (tensors.prompt_ids[n][~tensors.prompt_mask[n]] == pad_id).all()


def test_groups_that_ran_by_chance_count_more() -> None:
    members = ([1], [0.0]), ([2], [0.0])
    groups = [group(*members), replace(group(*members), run_probability=0.25)]
    tensors = to_tensors(groups, [[1.0, 0.0], [1.0, 0.0]], scale=False)
    assert tensors.advantages is not None
    assert tensors.advantages.tolist() == [0.5, -0.5, 2.0, -2.0]


@pytest.mark.parametrize(("kind", "rewarded"), [("unbiased", None), ("server", 2)])
def test_weighted_advantages_of_a_group_that_ran_by_chance_count_more(
    kind: Literal["unbiased", "server"], rewarded: int | None
) -> None:
    plain = group(([1], [0.0]), ([2], [0.0]))
    trajectories = tuple(replace(each, weight=1.5, advantage=0.5) for each in plain.trajectories)
    always = replace(plain, trajectories=trajectories, num_eligible=3, num_rewarded=rewarded)
    tensors = to_tensors([always, replace(always, run_probability=0.25)], [[1.0, 0.0]] * 2, advantages=kind)
    assert tensors.advantages is not None
    first, second = tensors.advantages.reshape(2, 2)
    assert first.abs().min() > 0
    assert torch.equal(second, 4 * first)


spans = st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 5)), max_size=4)


@given(st.lists(spans, min_size=1, max_size=5))
def test_each_token_has_the_version_of_the_weights_that_sampled_it(members: list[list[tuple[int, int]]]) -> None:
    expected = [[version for version, tokens in each for _ in range(tokens)] for each in members]
    trajectories = tuple(
        Trajectory(index, "", (1,) * len(row), None, "stop", version_spans=tuple(each))
        for index, (each, row) in enumerate(zip(members, expected, strict=True))
    )
    tensors = to_tensors([Group("g", None, trajectories)])
    assert tensors.weight_versions is not None
    assert tensors.weight_versions.dtype == torch.int64
    assert tensors.weight_versions.shape == tensors.completion_ids.shape
    for versions, mask, row in zip(tensors.weight_versions, tensors.completion_mask, expected, strict=True):
        assert versions[mask].tolist() == row
        assert (versions[~mask] == 0).all()


@given(st.lists(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=5), min_size=1, max_size=4))
def test_advantages_are_relative_to_their_group(rewards: list[list[float]]) -> None:
    groups = [group(*[([1], [0.0])] * len(row)) for row in rewards]
    scaled, plain = (to_tensors(groups, rewards, scale=scale, eps=1e-3).advantages for scale in (True, False))
    assert scaled is not None
    assert plain is not None
    expected = [value - mean(row) for row in rewards for value in row]
    torch.testing.assert_close(plain, torch.tensor(expected), atol=1e-5, rtol=1e-4)
    spread = [1 if len(row) < 2 else stdev(row) + 1e-3 for row in rewards for _ in row]
    by_hand = torch.tensor([e / s for e, s in zip(expected, spread, strict=True)])
    torch.testing.assert_close(scaled, by_hand, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("reward", [0.1, 0.9, 10.1, 100.1])
@pytest.mark.parametrize("size", [1, 3, 8, 12])
def test_equal_rewards_have_no_advantages_whatever_the_rounding(reward: float, size: int, scale: bool) -> None:
    advantages = to_tensors([group(*[([1], [0.0])] * size)], [[reward] * size], scale=scale).advantages
    assert advantages is not None
    assert advantages.tolist() == [0.0] * size


def test_a_group_without_trajectories_has_no_rows() -> None:
    failed = Group("g", None, ())
    tensors = to_tensors([group(([1], [0.0]), ([2], [0.0])), failed], [[1.0, 0.0], []], eps=0.0)
    assert tensors.advantages is not None
    assert tensors.advantages.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_fields_that_some_trajectories_lack_are_none() -> None:
    plain = Group("g", None, (Trajectory(0, "", (1,), None, "stop"),))
    tensors = to_tensors([group(([1, 2], [0.0, -1.0])), plain])
    assert (tensors.prompt_ids, tensors.prompt_mask, tensors.logprobs) == (None, None, None)
    assert tensors.weight_versions is None
    assert (tensors.rewards, tensors.advantages) == (None, None)
    assert tensors.completion_ids.tolist() == [[1, 2], [1, 0]]


@pytest.mark.parametrize("rewards", [[[1.0]], [[1.0, 2.0], [1.0]], []])
def test_one_reward_for_each_trajectory_is_required(rewards: Sequence[Sequence[float]]) -> None:
    with pytest.raises(ValueError, match="rewards"):
        to_tensors([group(([1], [0.0]), ([2], [0.0]))], rewards)


def test_groups_without_trajectories_are_rejected() -> None:
    with pytest.raises(ValueError, match="no trajectories"):
        to_tensors([Group("g", None, ())])


def test_the_client_itself_does_not_import_torch() -> None:
    code = "import sys, darts_client; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


@pytest.mark.parametrize(("module", "extra"), [("tensors", "torch"), ("overlap", "overlap")])
def test_without_torch_the_error_names_the_extra(module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, f"darts_client.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"darts-client\[{extra}\]"):
        import_module(f"darts_client.{module}")


def test_unknown_advantages_are_refused() -> None:
    with pytest.raises(ValueError, match="advantages must be 'grpo', 'unbiased' or 'server', got 'sever'"):
        to_tensors([group(([1], [0.0]))], advantages="sever")  # type: ignore[arg-type]  # a typo
