"""What others may hear of running groups."""

from typing import Protocol

from darts_server.types import BatchRecord, GroupRecord


class GroupObserver(Protocol):
    """Told synchronously, in the event loop: return fast and never raise."""

    def candidates_started(self, count: int) -> None:
        """``count`` candidates were started."""
        ...

    def group_ended(self, record: GroupRecord) -> None:
        """A group ended, whichever way. Said once per group."""
        ...

    def batch_ended(self, record: BatchRecord) -> None:
        """All groups of a batch have ended."""
        ...


class RewardObserver(Protocol):
    """Told the same way what trainers report."""

    def rewards_reported(self, matched: int, unknown: int) -> None:
        """Rewards came: ``matched`` for trajectories that had none, ``unknown`` for ones that are not kept."""
        ...

    def group_rewarded(self, zero_variance: bool) -> None:
        """All returned trajectories of a group have rewards. Said once per group."""
        ...
