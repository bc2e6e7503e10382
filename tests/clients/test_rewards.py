import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_client import Group, Reward, Trajectory, to_dataset, to_rows
from darts_client._rewards import as_rewards, rewards_body, split_rewards


def member(index: int, name: str | None = "g") -> Trajectory:
    return Trajectory(index, "", (index,), None, "stop", None if name is None else f"{name}:{index}")


def pair(name: str | None = "g", prompt: tuple[int, ...] | None = None) -> Group:
    return Group(name, prompt, (member(0, name), member(1, name)))


def test_all_forms_of_rewards_are_equivalent() -> None:
    group = pair()
    first, second = group.trajectories
    expected = [Reward(trajectory_id="g:0", reward=1.0), Reward(trajectory_id="g:1", reward=0.0)]
    assert as_rewards(expected) == expected
    assert as_rewards(iter(expected)) == expected
    assert as_rewards({"g:0": 1, "g:1": 0}) == expected
    assert as_rewards({first: 1.0, second: 0.0}) == expected
    assert as_rewards(group, [1.0, 0.0]) == expected
    assert as_rewards([group], [[1.0, 0.0]]) == expected
    assert as_rewards([]) == []


def test_trajectories_without_an_id_are_named_by_their_tokens() -> None:
    first, _ = as_rewards(pair(None, (7, 8)), [1.0, 0.0])
    assert (first.trajectory_id, first.prompt_token_ids, first.completion_token_ids) == (None, (7, 8), (0,))
    body = rewards_body([first])
    assert body == {"rewards": [{"prompt_token_ids": [7, 8], "completion_token_ids": [0], "reward": 1.0}]}


def test_correct_is_sent_only_if_given() -> None:
    rewards = [Reward(trajectory_id="g:0", reward=-1.0, correct=True), Reward(trajectory_id="g:1", reward=2)]
    assert rewards_body(rewards)["rewards"] == [
        {"trajectory_id": "g:0", "reward": -1.0, "correct": True},
        {"trajectory_id": "g:1", "reward": 2.0},
    ]


WRONG: list[Callable[[], Any]] = [
    lambda: Reward(reward=1.0),
    lambda: Reward(reward=1.0, trajectory_id="g:0", prompt_token_ids=[1], completion_token_ids=[2]),
    lambda: Reward(reward=1.0, trajectory_id="g:0", prompt_token_ids=[1]),
    lambda: Reward(reward=1.0, completion_token_ids=[2]),
    lambda: Reward(reward=float("nan"), trajectory_id="g:0"),
    lambda: as_rewards(pair(), [1.0]),
    lambda: as_rewards([pair(), pair()], [[1.0, 0.0]]),
    lambda: as_rewards(pair()),
    lambda: as_rewards(pair(None), [1.0, 0.0]),
    lambda: as_rewards({member(0, None): 1.0}),
    lambda: as_rewards({"g:0": 1.0}, [1.0]),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_rewards_that_match_no_trajectory_are_rejected(wrong: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"reward|trajector|values"):
        wrong()
    with pytest.raises(TypeError, match="Reward objects"):
        as_rewards([1.0, 2.0])  # type: ignore[arg-type]  # what must not work


@given(st.lists(st.integers(0, 30), max_size=40))
def test_rewards_are_split_in_order_within_the_limits(sizes: Sequence[int]) -> None:
    given_rewards = [Reward(reward=1.0, prompt_token_ids=[], completion_token_ids=[0] * size) for size in sizes]
    requests = list(split_rewards(given_rewards, max_rewards=5, max_tokens=40))
    assert [reward for _, part in requests for reward in part] == given_rewards
    assert all(given_rewards[offset] is part[0] for offset, part in requests)
    assert all(len(part) <= 5 and sum(r.num_tokens for r in part) <= 40 for _, part in requests)


def group(**fields: Any) -> Group:
    members = tuple(
        Trajectory(k, f"answer {k}", tuple(range(k)), tuple(-0.5 for _ in range(k)), "stop", f"g:{k}") for k in (1, 2)
    )
    return Group("g", (5, 6), members, number=0, metadata={"answer": 8}, **fields)


def test_each_trajectory_is_a_row() -> None:
    first, second = to_rows([group(prompt_key="key")], [[1.0, 0.0]])
    assert first == {
        "group_id": "g",
        "number": 0,
        "prompt_key": "key",
        "metadata": {"answer": 8},
        "prompt_token_ids": [5, 6],
        "trajectory_id": "g:1",
        "token_ids": [0],
        "logprobs": [-0.5],
        "text": "answer 1",
        "finish_reason": "stop",
        "cut": False,
        "weight_version": None,
        "reward": 1.0,
    }
    assert (second["trajectory_id"], second["reward"]) == ("g:2", 0.0)
    [row] = to_rows([Group(None, None, (Trajectory(0, "", (1,), None, "length"),))])
    missing = ("group_id", "prompt_key", "metadata", "prompt_token_ids", "trajectory_id", "logprobs", "reward")
    assert [row[name] for name in missing] == [None] * len(missing)
    with pytest.raises(ValueError, match="2 trajectories but 1 rewards"):
        to_rows([group()], [[1.0]])
    with pytest.raises(ValueError, match="trajectory 1 of group 0 has the reward nan"):
        to_rows([group()], [[1.0, float("nan")]])


def test_a_dataset_has_the_rows() -> None:
    pytest.importorskip("datasets")
    dataset = to_dataset([group()], [[1.0, 0.0]])
    assert dataset.to_list() == to_rows([group()], [[1.0, 0.0]])


def test_the_error_without_datasets_names_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="to_rows"):
        to_dataset([group()])
