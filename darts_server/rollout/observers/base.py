"""What others may hear of running groups."""

from typing import Protocol

from darts_server.types import CohortRecord, GroupRecord, VoteOutcome


class GroupObserver(Protocol):
    """Told synchronously, in the event loop: return fast and never raise."""

    def candidates_started(self, count: int) -> None:
        """``count`` candidates were started."""
        ...

    def group_ended(self, record: GroupRecord) -> None:
        """A group ended, whichever way. Said once per group."""
        ...

    def cohort_ended(self, record: CohortRecord) -> None:
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


class VoteObserver(Protocol):
    """Told the same way of votes."""

    def vote_ended(self, outcome: VoteOutcome, stopped: int) -> None:
        """A vote came to its end; ``stopped`` candidates were not waited for."""
        ...


class PruningObserver(Protocol):
    """Receives events of trajectories that are scored, under the same rules."""

    def trajectory_scored(self, *, usable: bool) -> None:
        """A trajectory was scored; not ``usable``: its hidden state or log-probs were not finite numbers."""
        ...

    def pruning_decided(self, *, kept: bool) -> None:
        """A trajectory with a calibrated score was kept or pruned."""
        ...

    def hidden_state_expected(self, *, received: bool) -> None:
        """A trajectory's hidden state came, or did not come although it passed the detection point."""
        ...

    def label_learned(self) -> None:
        """A scored trajectory got its reward, and is now a label."""
        ...

    def pending_labels_dropped(self, count: int) -> None:
        """``count`` scored trajectories were dropped because memory is full: their rewards cannot be learned from."""
        ...
