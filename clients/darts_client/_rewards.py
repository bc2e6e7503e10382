"""Rewards: the forms that a caller may pass, requests for the server, and rows of a data set."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ._models import Group, Trajectory, WireModel
from ._prompts import as_token_ids

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")

# The server accepts 100,000 rewards in 64 MiB. These limits stay well below, so that the server answers quickly.
MAX_REWARDS = 10_000
MAX_TOKENS = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The reward of a trajectory, named by its id, or of all returned trajectories with the given tokens.

    Raises:
        ValueError: the trajectory is not named in exactly one way, or the reward is not finite.
    """

    reward: float
    trajectory_id: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    completion_token_ids: Sequence[int] | None = None
    correct: bool | None = None
    """Whether the answer is correct. None means that a reward above 0 is correct."""

    def __post_init__(self) -> None:
        has_id = self.trajectory_id is not None
        has_prompt = self.prompt_token_ids is not None
        has_completion = self.completion_token_ids is not None
        if has_prompt != has_completion or has_prompt == has_id:
            raise ValueError("name a trajectory by trajectory_id, or by prompt_token_ids and completion_token_ids")
        if not math.isfinite(self.reward):
            raise ValueError(f"a reward must be finite, got {self.reward}")

    @property
    def num_tokens(self) -> int:
        """Number of token ids that name the trajectory."""
        return len(self.prompt_token_ids or ()) + len(self.completion_token_ids or ())


class RewardCounts(WireModel):
    """Number of rewards by their effect."""

    matched: int = 0
    """Rewards that were matched to a trajectory."""
    repeated: int = 0
    """Rewards without effect, because the trajectory has a reward already."""
    unknown: int = 0
    """Rewards that match no trajectory."""
    unknown_indices: tuple[int, ...] = ()
    """Indices of unknown rewards, at most 100 for each request."""

    def plus(self, later: "RewardCounts", offset: int) -> "RewardCounts":
        """Add the counts of a later request, whose first reward has the index `offset`."""
        later_indices = tuple(offset + index for index in later.unknown_indices)
        return RewardCounts(
            matched=self.matched + later.matched,
            repeated=self.repeated + later.repeated,
            unknown=self.unknown + later.unknown,
            unknown_indices=self.unknown_indices + later_indices,
        )


Rewarded = Group | Iterable[Group] | Iterable[Reward] | Mapping[Trajectory, float] | Mapping[str, float]
"""Reward objects, or a mapping from trajectories or their ids to rewards, or groups, which need `values`."""

Values = Sequence[float] | Sequence[Sequence[float]]
"""Rewards of a group's trajectories in their order, or a list of such lists for several groups."""


def as_rewards(rewarded: Rewarded, values: Values | None = None) -> list[Reward]:
    """Convert to one Reward for each trajectory.

    Raises:
        ValueError: there is not one value for each trajectory, or a trajectory has no name.
        TypeError: `rewarded` has none of the forms.
    """
    if isinstance(rewarded, Group):
        return _rewards_of_groups([rewarded], None if values is None else [values])
    if isinstance(rewarded, Mapping):
        rewards = [_reward_by_name(name, float(value)) for name, value in rewarded.items()]
    else:
        items: list[Any] = list(rewarded)
        if items and all(isinstance(item, Group) for item in items):
            return _rewards_of_groups(items, values)
        if not all(isinstance(item, Reward) for item in items):
            raise TypeError("pass Reward objects, a mapping, or groups with values")
        rewards = items
    if values is not None:
        raise ValueError("only groups take values")
    return rewards


def values_by_group(groups: Sequence[Group], values: Any) -> list[list[float]]:
    """Return a list of floats for each group. Raise ValueError unless each trajectory has a finite value."""
    if values is None or len(values) != len(groups):
        count = None if values is None else len(values)
        raise ValueError(f"{len(groups)} group(s) need as many lists of rewards, got {count}")
    checked = [[float(value) for value in group_values] for group_values in values]
    for index, (group, group_values) in enumerate(zip(groups, checked, strict=True)):
        if len(group_values) != len(group.trajectories):
            raise ValueError(
                f"group {index} has {len(group.trajectories)} trajectories but {len(group_values)} rewards"
            )
        for place, value in enumerate(group_values):
            # One NaN would make the loss of the whole batch NaN.
            if not math.isfinite(value):
                raise ValueError(f"trajectory {place} of group {index} has the reward {value}; leave the group out")
    return checked


def split_rewards(
    rewards: Sequence[Reward],
    max_rewards: int = MAX_REWARDS,
    max_tokens: int = MAX_TOKENS,
) -> Iterator[tuple[int, Sequence[Reward]]]:
    """Split the rewards into requests, and yield each with the index of its first reward."""
    start = 0
    tokens = 0
    for index, reward in enumerate(rewards):
        is_full = index - start >= max_rewards or tokens + reward.num_tokens > max_tokens
        if index > start and is_full:
            yield start, rewards[start:index]
            start = index
            tokens = 0
        tokens += reward.num_tokens
    if start < len(rewards):
        yield start, rewards[start:]


def rewards_body(rewards: Iterable[Reward]) -> dict[str, Any]:
    return {"rewards": [_reward_body(reward) for reward in rewards]}


def to_rows(groups: Sequence[Group], rewards: Sequence[Sequence[float]] | None = None) -> list[dict[str, Any]]:
    """Return a dictionary for each trajectory, group after group.

    `rewards` holds a list for each group. Default: the verifier's rewards.
    """
    values: Sequence[Sequence[float | None]]
    if rewards is None:
        values = [[trajectory.reward for trajectory in group.trajectories] for group in groups]
    else:
        values = values_by_group(groups, rewards)
    return [
        {
            "group_id": group.group_id,
            "number": group.number,
            "prompt_key": group.prompt_key,
            "metadata": _convert_or_none(dict[str, Any], group.metadata),
            "prompt_token_ids": _convert_or_none(list[int], group.prompt_token_ids),
            "trajectory_id": trajectory.trajectory_id,
            "token_ids": list(trajectory.token_ids),
            "logprobs": _convert_or_none(list[float], trajectory.logprobs),
            "text": trajectory.text,
            "finish_reason": trajectory.finish_reason,
            "cut": trajectory.cut,
            "weight_version": trajectory.weight_version_end,
            "reward": value,
        }
        for group, group_values in zip(groups, values, strict=True)
        for trajectory, value in zip(group.trajectories, group_values, strict=True)
    ]


def to_dataset(groups: Sequence[Group], rewards: Sequence[Sequence[float]] | None = None) -> "Dataset":
    """Return the rows of `to_rows` as a Dataset of the library `datasets`. Raise ImportError without the library."""
    try:
        from datasets import Dataset
    except ImportError as exc:
        raise ImportError("to_dataset needs datasets: pip install datasets; to_rows returns plain rows") from exc
    return Dataset.from_list(to_rows(groups, rewards))


def _convert_or_none(convert: Callable[[Any], T], value: object) -> T | None:
    return None if value is None else convert(value)


def _reward_body(reward: Reward) -> dict[str, Any]:
    body: dict[str, Any] = {"reward": float(reward.reward)}
    if reward.trajectory_id is not None:
        body["trajectory_id"] = reward.trajectory_id
    else:
        body["prompt_token_ids"] = as_token_ids(reward.prompt_token_ids)
        body["completion_token_ids"] = as_token_ids(reward.completion_token_ids)
    if reward.correct is not None:
        body["correct"] = bool(reward.correct)
    return body


def _rewards_of_groups(groups: Sequence[Group], values: Any) -> list[Reward]:
    return [
        _reward_of_trajectory(trajectory, value, group.prompt_token_ids)
        for group, group_values in zip(groups, values_by_group(groups, values), strict=True)
        for trajectory, value in zip(group.trajectories, group_values, strict=True)
    ]


def _reward_by_name(name: Trajectory | str, value: float) -> Reward:
    if isinstance(name, str):
        return Reward(trajectory_id=name, reward=value)
    return _reward_of_trajectory(name, value, None)


def _reward_of_trajectory(trajectory: Trajectory, value: float, prompt_token_ids: Sequence[int] | None) -> Reward:
    # Plain vLLM's trajectories have no id, and the server finds its own by their tokens.
    if trajectory.trajectory_id is not None:
        return Reward(trajectory_id=trajectory.trajectory_id, reward=value)
    if prompt_token_ids is None:
        raise ValueError("a trajectory without trajectory_id is named by its tokens: pass Reward objects")
    return Reward(prompt_token_ids=prompt_token_ids, completion_token_ids=trajectory.token_ids, reward=value)
