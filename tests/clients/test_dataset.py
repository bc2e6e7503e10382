import sys
from typing import Any

import pytest

from darts_client import Group, Trajectory, to_dataset, to_rows


def group(**known: Any) -> Group:
    members = tuple(
        Trajectory(k, f"answer {k}", tuple(range(k)), tuple(-0.5 for _ in range(k)), "stop", f"g:{k}") for k in (1, 2)
    )
    return Group("g", (5, 6), members, number=0, metadata={"answer": 8}, **known)


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


def test_what_is_not_known_is_none() -> None:
    bare = Group(None, None, (Trajectory(0, "", (1,), None, "length"),))
    [row] = to_rows([bare])
    unknown = ("group_id", "prompt_key", "metadata", "prompt_token_ids", "trajectory_id", "logprobs", "reward")
    assert [row[name] for name in unknown] == [None] * len(unknown)


def test_rewards_must_be_one_for_each() -> None:
    with pytest.raises(ValueError, match="2 trajectories but 1 rewards"):
        to_rows([group()], [[1.0]])


def test_a_dataset_has_the_rows() -> None:
    pytest.importorskip("datasets")
    dataset = to_dataset([group()], [[1.0, 0.0]])
    assert dataset.to_list() == to_rows([group()], [[1.0, 0.0]])


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="to_rows"):
        to_dataset([group()])
