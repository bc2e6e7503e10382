"""What a batch gives: groups, the prompts that were not decided, and what an observer sees of the groups that run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from darts_server.records import GroupRecord, VersionSpans
from darts_server.rollout.batches.carried import Carry
from darts_server.rollout.run import GroupRun
from darts_server.types import Sample


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


class BatchObserver(Protocol):
    """Follow the groups of a batch while they run. Called synchronously: return fast and never raise."""

    def group_started(self, number: int, run: GroupRun[Any, Any]) -> None:
        """Called when the group of prompt ``number`` has started."""
        ...

    def trajectory_selected(self, number: int, index: int, sample: Sample) -> None:
        """Called when candidate ``index`` is known to belong to its group."""
        ...
