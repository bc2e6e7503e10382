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
    """Told the same way of trajectories that are scored."""

    def trajectory_scored(self, *, usable: bool) -> None:
        """A score was made, or could not be: the hidden state or the log-probs were no finite numbers."""
        ...

    def trajectory_drawn(self, *, kept: bool) -> None:
        """A score that is trusted has decided whether a trajectory is kept or pruned."""
        ...

    def trajectory_probed(self, *, told: bool) -> None:
        """A trajectory's hidden state was told, or never was though it went past its detection point."""
        ...

    def label_learned(self) -> None:
        """A reward came for a trajectory that was scored."""
        ...

    def flights_forgotten(self, count: int) -> None:
        """Scored trajectories were forgotten for want of memory: their rewards will teach nothing."""
        ...
