"""What a caller gets: groups of trajectories."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One generated answer to a prompt.

    `token_ids` are the generated tokens, without the prompt. `logprobs` holds the natural log-probability of each of
    them, so it is as long as `token_ids`; it is None when none were asked for. `index` counts from 0 within the group.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one prompt: exactly as many as were asked for, in the order of their index.

    `prompt_token_ids` is None when the server did not return them. `group_id` is the server's name for the group; the
    groups of one request share it.
    """

    group_id: str | None
    prompt_token_ids: tuple[int, ...] | None
    trajectories: tuple[Trajectory, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Generated tokens of each trajectory."""
        return tuple(len(trajectory.token_ids) for trajectory in self.trajectories)
