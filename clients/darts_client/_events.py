"""What happens to a batch, as typed events."""

from dataclasses import dataclass

from pydantic import FiniteFloat

from ._models import FinishReason, Group, Unfinished, Usage
from ._wire import Wire


class Delta(Wire):
    """Tokens `start` and on of a candidate that may still belong to its group. `number` is its prompt's.

    `logprobs` are those of these tokens, None if they were not asked for.
    """

    trajectory_id: str
    number: int
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[FiniteFloat, ...] | None


@dataclass(frozen=True, slots=True)
class TrajectoryEvent:
    """A candidate belongs to its group; all of its tokens. If it was `cut`, its deltas may have gone further."""

    trajectory_id: str
    number: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    text: str
    finish_reason: FinishReason
    cut: bool


class Discard(Wire):
    """A candidate does not belong to its group, and why; nothing more comes of it."""

    trajectory_id: str
    number: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """A group is decided: whole, or failed with its `error`."""

    group: Group


@dataclass(frozen=True, slots=True)
class Done:
    """The end of the batch."""

    usage: Usage
    unfinished: tuple[Unfinished, ...]


Event = Delta | TrajectoryEvent | Discard | GroupEvent | Done
