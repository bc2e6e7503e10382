"""Rewards: in whatever form the caller has them, to requests that the server takes."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._models import Group, Trajectory
from ._requests import as_token_ids
from ._wire import Wire

# A request takes 100,000 rewards in 256 MiB. These bounds keep each well below, and its answer quick.
MOST_REWARDS = 10_000
MOST_TOKENS = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What one trajectory earned.

    It is named by its `trajectory_id`, or by the tokens of its prompt and its completion; then all returned
    trajectories with just these tokens earn it. Without `correct` a trajectory is right if its reward is above 0.

    Raises:
        ValueError: it is not named in exactly one way, or the reward is not finite.
    """

    reward: float
    trajectory_id: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    completion_token_ids: Sequence[int] | None = None
    correct: bool | None = None

    def __post_init__(self) -> None:
        tokens = (self.prompt_token_ids is not None, self.completion_token_ids is not None)
        if (self.trajectory_id is not None) + all(tokens) != 1 or (any(tokens) and not all(tokens)):
            raise ValueError("name a trajectory by trajectory_id, or by prompt_token_ids and completion_token_ids")
        if not math.isfinite(self.reward):
            raise ValueError(f"a reward must be finite, got {self.reward}")

    @property
    def tokens(self) -> int:
        """Token ids that it is named by."""
        return len(self.prompt_token_ids or ()) + len(self.completion_token_ids or ())


class RewardCounts(Wire):
    """What became of rewards: found their trajectory, came again and changed nothing, or are for none that is known.

    `unknown_indices`: where among the rewards the unknown ones stand; the first 100 of each request.
    """

    matched: int = 0
    repeated: int = 0
    unknown: int = 0
    unknown_indices: tuple[int, ...] = ()

    def plus(self, later: "RewardCounts", offset: int) -> "RewardCounts":
        """Both together, where `later` counted its indices from `offset`."""
        return RewardCounts(
            matched=self.matched + later.matched,
            repeated=self.repeated + later.repeated,
            unknown=self.unknown + later.unknown,
            unknown_indices=(*self.unknown_indices, *(offset + index for index in later.unknown_indices)),
        )


Rewarded = Group | Iterable[Group] | Iterable[Reward] | Mapping[Trajectory, float] | Mapping[str, float]
"""What earned rewards: Reward objects, or trajectories or their ids with what each earned, or groups with `values`."""

Values = Sequence[float] | Sequence[Sequence[float]]
"""What a group's trajectories earned, in their order; of several groups, one such list each."""


def listed_rewards(of: Rewarded, values: Values | None = None) -> list[Reward]:
    """One Reward for each trajectory.

    Raises:
        ValueError: not one value for each trajectory, or a trajectory that cannot be named.
        TypeError: `of` is none of the forms.
    """
    if isinstance(of, Group):
        return _of_groups([of], None if values is None else [values])
    if not isinstance(of, Mapping):
        listed: list[Any] = list(of)
        if listed and all(isinstance(item, Group) for item in listed):
            return _of_groups(listed, values)
        if not all(isinstance(item, Reward) for item in listed):
            raise TypeError("rewards are given as Reward objects, as a mapping, or as values of groups")
    if values is not None:
        raise ValueError("values go with groups alone")
    return [_of_key(key, value) for key, value in of.items()] if isinstance(of, Mapping) else listed


def by_group(groups: Sequence[Group], values: Any) -> list[list[float]]:
    """The values as floats, a list for each group; ValueError unless there is one for each trajectory."""
    if values is None or len(values) != len(groups):
        raise ValueError(f"{len(groups)} group(s) need as many lists of rewards, got {values and len(values)}")
    rows = [[float(value) for value in row] for row in values]
    for place, (group, row) in enumerate(zip(groups, rows, strict=True)):
        if len(row) != len(group.trajectories):
            raise ValueError(f"group {place} has {len(group.trajectories)} trajectories but {len(row)} rewards")
    return rows


def portions(
    rewards: Sequence[Reward], most_rewards: int = MOST_REWARDS, most_tokens: int = MOST_TOKENS
) -> Iterator[tuple[int, Sequence[Reward]]]:
    """Pieces that one request takes each, with the place of their first reward."""
    start = tokens = 0
    for place, reward in enumerate(rewards):
        if place > start and (place - start >= most_rewards or tokens + reward.tokens > most_tokens):
            yield start, rewards[start:place]
            start, tokens = place, 0
        tokens += reward.tokens
    if start < len(rewards):
        yield start, rewards[start:]


def reward_body(rewards: Iterable[Reward]) -> dict[str, Any]:
    """The body of a request."""
    return {"rewards": [_wire(reward) for reward in rewards]}


def _wire(reward: Reward) -> dict[str, Any]:
    body: dict[str, Any] = {"reward": float(reward.reward)}
    if reward.trajectory_id is not None:
        body["trajectory_id"] = reward.trajectory_id
    else:
        body["prompt_token_ids"] = as_token_ids(reward.prompt_token_ids)
        body["completion_token_ids"] = as_token_ids(reward.completion_token_ids)
    return body if reward.correct is None else body | {"correct": bool(reward.correct)}


def _of_groups(groups: Sequence[Group], values: Any) -> list[Reward]:
    rows = by_group(groups, values)
    return [
        _of(trajectory, value, group.prompt_token_ids)
        for group, row in zip(groups, rows, strict=True)
        for trajectory, value in zip(group.trajectories, row, strict=True)
    ]


def _of_key(key: Trajectory | str, value: float) -> Reward:
    return Reward(trajectory_id=key, reward=float(value)) if isinstance(key, str) else _of(key, float(value), None)


def _of(trajectory: Trajectory, value: float, prompt: Sequence[int] | None) -> Reward:
    if trajectory.trajectory_id is not None:
        return Reward(trajectory_id=trajectory.trajectory_id, reward=value)
    if prompt is None:
        raise ValueError("a trajectory without trajectory_id is named by its tokens: give Reward objects")
    return Reward(prompt_token_ids=prompt, completion_token_ids=trajectory.token_ids, reward=value)
