"""What a caller gets: groups of trajectories."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ._errors import StatusError
from ._wire import Wire

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One generated answer to a prompt.

    `token_ids` are the generated tokens, without the prompt. `logprobs` holds the natural log-probability of each of
    them, so it is as long as `token_ids`; it is None when none were asked for. `index` counts from 0 within the group.

    What follows is known of rollouts alone. `trajectory_id` is its name for rewards. `rank` is its place in the group
    by length, 0 for the shortest; `end` says from which end of the length order it was selected (`short`, `long`,
    `fill`; `balanced` if it was for its quality). `cut`: it was cut at the group's `deadline`. `quality` is its chance
    to end correct as it was scored on the way; None if it was not. The versions are those of the weights it began and
    ended with.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason
    trajectory_id: str | None = None
    rank: int | None = None
    selected_as: str | None = None
    cut: bool = False
    quality: float | None = None
    weight_version_start: int | None = None
    weight_version_end: int | None = None


class Discarded(Wire):
    """A candidate that was not returned: its tokens as far as it came, and why."""

    trajectory_id: str
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one prompt: exactly as many as were asked for, in the order of their index.

    `prompt_token_ids` is None when the server did not return them, and for rollouts when they were not given.
    `group_id` is the server's name for the group; the groups of one OpenAI-style request share it. `number` is the
    prompt's place among those that were asked for.

    What follows is known of rollouts alone. `prompt_key` is the name that the prompt's lengths are remembered under,
    `metadata` what the caller sent with it. `candidates` were started; `deadline` is the length in tokens at which the
    tail was cut. `error`: why the group failed; then it has no trajectories.
    """

    group_id: str | None
    prompt_token_ids: tuple[int, ...] | None
    trajectories: tuple[Trajectory, ...]
    number: int = 0
    prompt_key: str | None = None
    metadata: Mapping[str, Any] | None = field(default=None, hash=False)
    candidates: int | None = None
    deadline: int | None = None
    mixed_versions: bool = False
    discarded: tuple[Discarded, ...] = ()
    seconds: float | None = None
    error: StatusError | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Generated tokens of each trajectory."""
        return tuple(len(trajectory.token_ids) for trajectory in self.trajectories)


class Usage(Wire):
    """Tokens of a batch, and the seconds it took."""

    generated: int
    returned: int
    wasted: int
    seconds: float


class Unfinished(Wire):
    """A prompt whose group was not among the first `num_groups`, for the next step."""

    number: int
    prompt_key: str | None
    metadata: dict[str, Any] | None
