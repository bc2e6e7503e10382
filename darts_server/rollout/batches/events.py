"""Events of a running batch. Values only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from darts_server.rollout.allocation.cohort import CohortTerms
from darts_server.rollout.batches.results import GroupResult, Unfinished
from darts_server.types import DiscardReason, Sample


@dataclass(frozen=True, slots=True)
class BatchStarted:
    """``groups``: number of prompts. ``survivors``: whether a group has all trajectories that were not pruned.

    ``sampling``: the sampling parameters in force. ``cohort``: how it was allocated, if it is a part of a cohort whose
    deadline comes from outside.
    """

    batch_id: str
    policy: str
    groups: int
    survivors: bool
    sampling: Mapping[str, object]
    cohort: CohortTerms | None = None


@dataclass(frozen=True, slots=True)
class NeedsReported:
    """What groups have reported to the cohort of which the batch is a part, by the numbers of their prompts.

    ``needs``: tokens that they need. ``minimums``: of others the least that they can need, ``None`` if they cannot be
    complete any more.
    """

    needs: Mapping[int, int]
    minimums: Mapping[int, int | None]


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Tokens of a candidate from position ``start`` on, which follow those of the previous delta.

    ``number``: of its prompt in the batch.
    """

    trajectory_id: str
    number: int
    start: int
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None


@dataclass(frozen=True, slots=True)
class TrajectorySelected:
    """A candidate belongs to its group.

    ``sample`` has the tokens of its deltas. If it is ``cut``, more deltas may have been sent than it has tokens.
    """

    trajectory_id: str
    number: int
    sample: Sample
    cut: bool


@dataclass(frozen=True, slots=True)
class CandidateDiscarded:
    """A candidate does not belong to its group. ``length``: tokens that it has generated, as far as recorded."""

    trajectory_id: str
    number: int
    length: int
    reason: DiscardReason


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """A group has ended, after the last event of each of its candidates."""

    result: GroupResult


@dataclass(frozen=True, slots=True)
class BatchDone:
    """The batch is complete.

    ``results``: in the order in which groups ended. ``seconds``: since it started. ``generated``: tokens, also of
    groups that failed or were stopped. ``carried``: number of prompts that are kept for later batches of its caller.
    """

    batch_id: str
    results: Sequence[GroupResult]
    unfinished: Sequence[Unfinished]
    seconds: float
    generated: int
    carried: int = 0


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The batch was cancelled, or failed as a whole."""

    error: Exception


Event = (
    BatchStarted
    | NeedsReported
    | TokenDelta
    | TrajectorySelected
    | CandidateDiscarded
    | GroupEnded
    | BatchDone
    | BatchFailed
)
BatchEnd = BatchDone | BatchFailed
