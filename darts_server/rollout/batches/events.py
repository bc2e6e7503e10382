"""What a batch gives: groups, the prompts that were not decided, and the events of its stream. Values only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from darts_server.records import GroupRecord, VersionSpans
from darts_server.rollout.batches.carried import Carry
from darts_server.types import DiscardReason, Sample


@dataclass(frozen=True, slots=True)
class AbortedSample:
    """What a candidate had generated when its group was aborted; all of it, if it has a finish reason.

    ``version_spans``: of its tokens.
    """

    sample: Sample
    version_spans: VersionSpans


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The outcome of the group of prompt ``number``.

    ``samples``: returned trajectories by candidate index; empty with an ``error``, which ends this group alone.
    ``aborted``: of a group that was aborted, all candidates by index that were not discarded. They are no group: some
    are not whole, and none was selected. ``None`` if it was not aborted.
    """

    number: int
    group_id: str
    prompt_key: str
    samples: Mapping[int, Sample]
    record: GroupRecord | None
    error: Exception | None = None
    metadata: bytes | None = None
    aborted: Mapping[int, AbortedSample] | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether its caller gets anything that was generated."""
        return bool(self.samples) or any(aborted.sample.token_ids for aborted in (self.aborted or {}).values())


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A prompt whose group was not decided.

    ``carry``: how it is kept. ``error``: why it was aborted; ``None`` if it was stopped because enough others were
    decided. ``group``: its group, with what its candidates had generated, if that is not kept; else ``None``.
    """

    number: int
    prompt_key: str
    metadata: bytes | None
    carry: Carry = Carry.DROP
    error: Exception | None = None
    group: GroupResult | None = None


@dataclass(frozen=True, slots=True)
class BatchStarted:
    """``groups``: number of prompts. ``survivors``: whether a group has all trajectories that were not pruned.

    ``sampling``: the sampling parameters in force.
    """

    batch_id: str
    policy: str
    groups: int
    survivors: bool
    sampling: Mapping[str, object]


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


Event = BatchStarted | TokenDelta | TrajectorySelected | CandidateDiscarded | GroupEnded | BatchDone | BatchFailed
BatchEnd = BatchDone | BatchFailed
