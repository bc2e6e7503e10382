from dataclasses import FrozenInstanceError

import pytest

from darts_client import Group, Trajectory


def test_lengths_are_the_numbers_of_generated_tokens() -> None:
    trajectories = tuple(Trajectory(k, "", tuple(range(size)), None, "stop") for k, size in enumerate((3, 0, 5)))
    assert Group("g", (1, 2), trajectories).lengths == (3, 0, 5)


def test_a_group_is_immutable() -> None:
    group = Group(None, None, ())
    with pytest.raises(FrozenInstanceError):
        group.group_id = "other"  # type: ignore[misc]  # what must not work
