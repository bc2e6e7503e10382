"""Rewards in the forms in which a caller may pass them, as requests for the server and as rows of a dataset."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._models import Group, Trajectory, WireModel
from ._prompts import as_token_ids

if TYPE_CHECKING:
    from datasets import Dataset

# The server accepts 100,000 rewards in 64 MiB. These limits stay well below, so that each answer comes quickly.
MAX_REWARDS = 10_000
MAX_TOKENS = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The reward of one trajectory.

    The trajectory is named by its `trajectory_id`, or by the tokens of its prompt and its completion; then the reward
    is that of every returned trajectory with these tokens. Without `correct` a trajectory is correct if its reward is
    above 0.

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
    def num_tokens(self) -> int:
        """Number of token ids that name the trajectory."""
        return len(self.prompt_token_ids or ()) + len(self.completion_token_ids or ())


class RewardCounts(WireModel):
    """How many rewards were matched to a trajectory, repeated an earlier one without effect, or match no trajectory.

    `unknown_indices`: indices of those that match none; the first 100 of each request.
    """

    matched: int = 0
    repeated: int = 0
    unknown: int = 0
    unknown_indices: tuple[int, ...] = ()

    def plus(self, later: "RewardCounts", offset: int) -> "RewardCounts":
        """Add the counts of a later request, whose indices begin at `offset`."""
        return RewardCounts(
            matched=self.matched + later.matched,
            repeated=self.repeated + later.repeated,
            unknown=self.unknown + later.unknown,
            unknown_indices=(*self.unknown_indices, *(offset + index for index in later.unknown_indices)),
        )


Rewarded = Group | Iterable[Group] | Iterable[Reward] | Mapping[Trajectory, float] | Mapping[str, float]
"""Reward objects; trajectories or their ids with the reward of each; or groups, which need `values`."""

Values = Sequence[float] | Sequence[Sequence[float]]
"""Rewards of a group's trajectories, in their order; for several groups, a list of such lists."""


def as_rewards(rewarded: Rewarded, values: Values | None = None) -> list[Reward]:
    """Convert to one Reward for each trajectory.

    Raises:
        ValueError: not one value for each trajectory, or a trajectory without a name.
        TypeError: `rewarded` has none of the forms.
    """
    if isinstance(rewarded, Group):
        return _rewards_of_groups([rewarded], None if values is None else [values])
    if not isinstance(rewarded, Mapping):
        items: list[Any] = list(rewarded)
        if items and all(isinstance(item, Group) for item in items):
            return _rewards_of_groups(items, values)
        if not all(isinstance(item, Reward) for item in items):
            raise TypeError("pass Reward objects, a mapping, or groups with values")
    if values is not None:
        raise ValueError("only groups take values")
    return [_reward_of_key(key, value) for key, value in rewarded.items()] if isinstance(rewarded, Mapping) else items


def values_by_group(groups: Sequence[Group], values: Any) -> list[list[float]]:
    """Convert the values to a list of floats for each group; raise ValueError unless there is one per trajectory."""
    if values is None or len(values) != len(groups):
        raise ValueError(f"{len(groups)} group(s) need as many lists of rewards, got {values and len(values)}")
    rows = [[float(value) for value in row] for row in values]
    for index, (group, row) in enumerate(zip(groups, rows, strict=True)):
        if len(row) != len(group.trajectories):
            raise ValueError(f"group {index} has {len(group.trajectories)} trajectories but {len(row)} rewards")
    return rows


def split_rewards(
    rewards: Sequence[Reward], max_rewards: int = MAX_REWARDS, max_tokens: int = MAX_TOKENS
) -> Iterator[tuple[int, Sequence[Reward]]]:
    """Split the rewards into requests, each with the index of its first reward."""
    start = tokens = 0
    for index, reward in enumerate(rewards):
        if index > start and (index - start >= max_rewards or tokens + reward.num_tokens > max_tokens):
            yield start, rewards[start:index]
            start, tokens = index, 0
        tokens += reward.num_tokens
    if start < len(rewards):
        yield start, rewards[start:]


def rewards_body(rewards: Iterable[Reward]) -> dict[str, Any]:
    """Build the body of a request."""
    return {"rewards": [_reward_body(reward) for reward in rewards]}


def to_rows(groups: Sequence[Group], rewards: Sequence[Sequence[float]] | None = None) -> list[dict[str, Any]]:
    """Return a dictionary for each trajectory, group after group; `rewards` holds a list for each group.

    Raises:
        ValueError: there is not one reward for each trajectory.
    """
    values: Sequence[Sequence[float | None]]
    values = [[None] * len(g.trajectories) for g in groups] if rewards is None else values_by_group(groups, rewards)
    return [
        {
            "group_id": group.group_id,
            "number": group.number,
            "prompt_key": group.prompt_key,
            "metadata": None if group.metadata is None else dict(group.metadata),
            "prompt_token_ids": None if group.prompt_token_ids is None else list(group.prompt_token_ids),
            "trajectory_id": trajectory.trajectory_id,
            "token_ids": list(trajectory.token_ids),
            "logprobs": None if trajectory.logprobs is None else list(trajectory.logprobs),
            "text": trajectory.text,
            "finish_reason": trajectory.finish_reason,
            "cut": trajectory.cut,
            "weight_version": trajectory.weight_version_end,
            "reward": value,
        }
        for group, row in zip(groups, values, strict=True)
        for trajectory, value in zip(group.trajectories, row, strict=True)
    ]


def to_dataset(groups: Sequence[Group], rewards: Sequence[Sequence[float]] | None = None) -> "Dataset":
    """Return the rows as a Dataset of the library `datasets`; raise ImportError if that is not installed."""
    try:
        from datasets import Dataset
    except ImportError as exc:
        raise ImportError("to_dataset needs datasets: pip install datasets; to_rows returns plain rows") from exc
    return Dataset.from_list(to_rows(groups, rewards))


def _reward_body(reward: Reward) -> dict[str, Any]:
    body: dict[str, Any] = {"reward": float(reward.reward)}
    if reward.trajectory_id is not None:
        body["trajectory_id"] = reward.trajectory_id
    else:
        body["prompt_token_ids"] = as_token_ids(reward.prompt_token_ids)
        body["completion_token_ids"] = as_token_ids(reward.completion_token_ids)
    return body if reward.correct is None else body | {"correct": bool(reward.correct)}


def _rewards_of_groups(groups: Sequence[Group], values: Any) -> list[Reward]:
    rows = values_by_group(groups, values)
    return [
        _reward_of(trajectory, value, group.prompt_token_ids)
        for group, row in zip(groups, rows, strict=True)
        for trajectory, value in zip(group.trajectories, row, strict=True)
    ]


def _reward_of_key(key: Trajectory | str, value: float) -> Reward:
    if isinstance(key, str):
        return Reward(trajectory_id=key, reward=float(value))
    return _reward_of(key, float(value), None)


def _reward_of(trajectory: Trajectory, value: float, prompt_token_ids: Sequence[int] | None) -> Reward:
    if trajectory.trajectory_id is not None:
        return Reward(trajectory_id=trajectory.trajectory_id, reward=value)
    if prompt_token_ids is None:
        raise ValueError("a trajectory without trajectory_id is named by its tokens: pass Reward objects")
    return Reward(prompt_token_ids=prompt_token_ids, completion_token_ids=trajectory.token_ids, reward=value)
