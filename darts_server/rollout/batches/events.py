"""What is told of a batch while it runs. Values only."""

from collections.abc import Sequence
from dataclasses import dataclass

from darts_server.rollout.batches.submission import GroupResult, Unfinished
from darts_server.types import DiscardReason, Sample


@dataclass(frozen=True, slots=True)
class BatchBegan:
    """``groups``: number of prompts."""

    batch_id: str
    policy: str
    groups: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens of a candidate from ``start`` on; all before them have been told. ``number``: of its prompt."""

    trajectory_id: str
    number: int
    start: int
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None


@dataclass(frozen=True, slots=True)
class Belongs:
    """A candidate belongs to its group, with the tokens of ``sample``: the first that were told of it."""

    trajectory_id: str
    number: int
    sample: Sample
    cut: bool


@dataclass(frozen=True, slots=True)
class Discarded:
    """A candidate does not belong to its group. ``length``: tokens it is known to have generated."""

    trajectory_id: str
    number: int
    length: int
    reason: DiscardReason


@dataclass(frozen=True, slots=True)
class GroupDecided:
    """All candidates of this group have come to their end."""

    result: GroupResult


@dataclass(frozen=True, slots=True)
class Done:
    """The batch has ended. ``results``: in the order in which they were decided."""

    batch_id: str
    results: Sequence[GroupResult]
    unfinished: Sequence[Unfinished]
    seconds: float


@dataclass(frozen=True, slots=True)
class Broken:
    """The batch was ended from outside, or by a fault."""

    error: Exception


Event = BatchBegan | Delta | Belongs | Discarded | GroupDecided | Done | Broken
EndOfBatch = Done | Broken
