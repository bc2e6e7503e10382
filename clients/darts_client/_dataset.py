"""Groups as a table: a row for each trajectory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._models import Group
from ._rewards import by_group

if TYPE_CHECKING:
    from datasets import Dataset


def to_rows(groups: Sequence[Group], rewards: Sequence[Sequence[float]] | None = None) -> list[dict[str, Any]]:
    """Plain dictionaries, group after group; `rewards` holds a list for each group.

    Raises:
        ValueError: there is not one reward for each trajectory.
    """
    values: Sequence[Sequence[float | None]]
    values = [[None] * len(g.trajectories) for g in groups] if rewards is None else by_group(groups, rewards)
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
    """The rows as a Dataset of the library `datasets`; ImportError, with the remedy, where that is not installed."""
    try:
        from datasets import Dataset
    except ImportError as exc:
        raise ImportError("to_dataset needs datasets: pip install datasets; to_rows gives plain rows") from exc
    return Dataset.from_list(to_rows(groups, rewards))
