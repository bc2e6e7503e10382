from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_client import Group, Reward, RewardCounts, Trajectory
from darts_client._rewards import listed_rewards, portions, reward_body


def member(index: int, name: str | None = "g") -> Trajectory:
    return Trajectory(index, "", (index,), None, "stop", None if name is None else f"{name}:{index}")


def pair(name: str | None = "g", prompt: tuple[int, ...] | None = None) -> Group:
    return Group(name, prompt, (member(0, name), member(1, name)))


def named(*pairs: tuple[str, float]) -> list[Reward]:
    return [Reward(trajectory_id=name, reward=value) for name, value in pairs]


def test_all_forms_mean_the_same() -> None:
    group = pair()
    first, second = group.trajectories
    expected = named(("g:0", 1.0), ("g:1", 0.0))
    assert listed_rewards(expected) == expected
    assert listed_rewards(iter(expected)) == expected
    assert listed_rewards({"g:0": 1, "g:1": 0}) == expected
    assert listed_rewards({first: 1.0, second: 0.0}) == expected
    assert listed_rewards(group, [1.0, 0.0]) == expected
    assert listed_rewards([group], [[1.0, 0.0]]) == expected
    assert listed_rewards([]) == []


def test_groups_of_the_openai_route_are_named_by_their_tokens() -> None:
    first, _ = listed_rewards(pair(None, (7, 8)), [1.0, 0.0])
    assert (first.trajectory_id, first.prompt_token_ids, first.completion_token_ids) == (None, (7, 8), (0,))
    body = reward_body([first])
    assert body == {"rewards": [{"prompt_token_ids": [7, 8], "completion_token_ids": [0], "reward": 1.0}]}


def test_correct_is_said_only_where_it_is_known() -> None:
    told = [Reward(trajectory_id="g:0", reward=-1.0, correct=True), Reward(trajectory_id="g:1", reward=2)]
    assert reward_body(told)["rewards"] == [
        {"trajectory_id": "g:0", "reward": -1.0, "correct": True},
        {"trajectory_id": "g:1", "reward": 2.0},
    ]


WRONG: list[Callable[[], Any]] = [
    lambda: Reward(reward=1.0),
    lambda: Reward(reward=1.0, trajectory_id="g:0", prompt_token_ids=[1], completion_token_ids=[2]),
    lambda: Reward(reward=1.0, trajectory_id="g:0", prompt_token_ids=[1]),
    lambda: Reward(reward=1.0, completion_token_ids=[2]),
    lambda: Reward(reward=float("nan"), trajectory_id="g:0"),
    lambda: listed_rewards(pair(), [1.0]),
    lambda: listed_rewards([pair(), pair()], [[1.0, 0.0]]),
    lambda: listed_rewards(pair()),
    lambda: listed_rewards(pair(None), [1.0, 0.0]),
    lambda: listed_rewards({member(0, None): 1.0}),
    lambda: listed_rewards({"g:0": 1.0}, [1.0]),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_would_reach_no_trajectory_is_refused(wrong: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"reward|trajector|values"):
        wrong()


def test_a_list_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="Reward objects"):
        listed_rewards([1.0, 2.0])  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 30), max_size=40))
def test_portions_are_all_rewards_in_order_each_within_the_bounds(sizes: Sequence[int]) -> None:
    given_rewards = [Reward(reward=1.0, prompt_token_ids=[], completion_token_ids=[0] * size) for size in sizes]
    cut = list(portions(given_rewards, most_rewards=5, most_tokens=40))
    assert [reward for _, some in cut for reward in some] == given_rewards
    assert all(given_rewards[offset] is some[0] for offset, some in cut)
    assert all(len(some) <= 5 and sum(r.tokens for r in some) <= 40 for _, some in cut)


def test_counts_add_up_and_indices_are_those_of_the_whole_list() -> None:
    first = RewardCounts(matched=3, repeated=1, unknown=1, unknown_indices=(2,))
    later = RewardCounts(matched=1, repeated=0, unknown=2, unknown_indices=(0, 4))
    both = first.plus(later, offset=5)
    assert (both.matched, both.repeated, both.unknown, both.unknown_indices) == (4, 1, 3, (2, 5, 9))
