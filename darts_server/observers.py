"""What rooms report while they work, for metrics, logs, traces and statistics.

All methods are called synchronously in the event loop: they must return fast. One that raises misses that call, and
nothing else: see `Observers`.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from darts_server.records import CohortRecord, GroupRecord, TrajectoryRecord
from darts_server.types import TurnKind, VoteOutcome

logger = logging.getLogger(__name__)

ObserverT = TypeVar("ObserverT")


class Observers(Generic[ObserverT]):
    """Notify several observers, in order. An error of one is logged and counted; the others are notified all the same.

    ``failures``: calls that raised.
    """

    def __init__(self, observers: Iterable[ObserverT] = ()) -> None:
        self.failures = 0
        self._observers = list(observers)
        self._failed: set[type[ObserverT]] = set()

    def add(self, *observers: ObserverT) -> None:
        self._observers += observers

    def notify(self, call: Callable[[ObserverT], None]) -> None:
        for observer in self._observers:
            try:
                call(observer)
            except Exception:
                self.failures += 1
                if type(observer) not in self._failed:  # not at every group, if it fails at every group
                    self._failed.add(type(observer))
                    logger.exception("%s failed; its further errors are only counted", type(observer).__name__)


class GroupObserver:
    """Ignore everything that happens to groups; subclasses override the methods that they need."""

    def single_request_classified(self, kind: TurnKind) -> None:
        """Called for each request for one trajectory that may be joined to a group."""

    def group_sealed(self, *, full: bool) -> None:
        """Called when a group of single requests takes no more; not ``full``: it waited for more in vain."""

    def candidates_started(self, count: int) -> None:
        """Called when ``count`` candidates of one group were started."""

    def trajectory_returned(self, returned: TrajectoryRecord) -> None:
        """Called once per trajectory when its caller gets it, before its group has ended or after."""

    def group_ended(self, record: GroupRecord) -> None:
        """Called once per group when it has ended, with any outcome."""

    def cohort_ended(self, record: CohortRecord) -> None:
        """Called when the last group of a cohort has ended."""


class GroupObservers(Observers[GroupObserver], GroupObserver):
    """Pass every call on to each of several observers."""

    def single_request_classified(self, kind: TurnKind) -> None:
        self.notify(lambda observer: observer.single_request_classified(kind))

    def group_sealed(self, *, full: bool) -> None:
        self.notify(lambda observer: observer.group_sealed(full=full))

    def candidates_started(self, count: int) -> None:
        self.notify(lambda observer: observer.candidates_started(count))

    def trajectory_returned(self, returned: TrajectoryRecord) -> None:
        self.notify(lambda observer: observer.trajectory_returned(returned))

    def group_ended(self, record: GroupRecord) -> None:
        self.notify(lambda observer: observer.group_ended(record))

    def cohort_ended(self, record: CohortRecord) -> None:
        self.notify(lambda observer: observer.cohort_ended(record))


class RewardObserver:
    """Ignore reported rewards; subclasses override the methods that they need."""

    def rewards_reported(self, matched: int, unknown: int) -> None:
        """Called for each report: ``matched`` rewards of known trajectories, ``unknown`` of unknown ones."""

    def group_rewarded(self, zero_variance: bool) -> None:
        """Called once per group when all of its returned trajectories have rewards."""


class VoteObserver:
    """Ignore votes; subclasses override the methods that they need."""

    def vote_ended(self, outcome: VoteOutcome, stopped: int) -> None:
        """Called when a vote has ended; ``stopped`` candidates were stopped early."""


class PruningObserver:
    """Ignore scores and pruning; subclasses override the methods that they need."""

    def trajectory_scored(self, *, usable: bool) -> None:
        """Called for each score; not ``usable``: the hidden state or the log-probs were not finite."""

    def pruning_decided(self, *, kept: bool) -> None:
        """Called when a trajectory with a calibrated score was kept or pruned."""

    def hidden_state_expected(self, *, received: bool) -> None:
        """Called when a hidden state arrived, or did not arrive although its trajectory passed the detection point."""

    def label_learned(self) -> None:
        """Called when a scored trajectory got its reward, and is now a label."""

    def pending_labels_dropped(self, count: int) -> None:
        """Called when ``count`` scored trajectories were dropped because memory is full, before they got a reward."""
