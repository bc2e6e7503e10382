"""What rooms report while they work, for metrics, logs, traces and statistics: lists of functions for each event."""

import logging
from collections.abc import Callable
from typing import Generic, ParamSpec

from darts_server.records import CohortRecord, GroupRecord, TrajectoryRecord, UpdateRecord
from darts_server.types import TurnKind

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class Event(Generic[P]):
    """Call functions, in order, in the event loop: they must return fast.

    An error of one is logged and counted; the others are called all the same.

    ``failures``: calls that raised.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._functions: list[Callable[P, object]] = []
        self._failed: set[Callable[P, object]] = set()

    def add(self, *functions: Callable[P, object]) -> None:
        self._functions += functions

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for function in self._functions:
            try:
                function(*args, **kwargs)
            except Exception:
                self.failures += 1
                if function not in self._failed:  # not at every group, if it fails at every group
                    self._failed.add(function)
                    name = getattr(function, "__qualname__", repr(function))
                    logger.exception("%s failed; its further errors are only counted", name)


class GroupEvents:
    """What happens to groups."""

    def __init__(self) -> None:
        self.single_request_classified = Event[[TurnKind]]()
        """A request for one trajectory arrived that may be joined to a group."""
        self.group_sealed = Event[[bool]]()
        """A group of single requests takes no more. Whether it is full; otherwise it waited for more in vain."""
        self.candidates_started = Event[[int]]()
        """So many candidates of one group were started."""
        self.trajectory_returned = Event[[TrajectoryRecord]]()
        """Once per trajectory when its caller gets it, before its group has ended or after."""
        self.group_ended = Event[[GroupRecord]]()
        """Once per group, with any outcome."""
        self.scored_group_ended = Event[[GroupRecord]]()
        """After that, once per group whose candidates were scored."""
        self.cohort_ended = Event[[CohortRecord]]()
        """The last group of a cohort has ended."""

    @property
    def failures(self) -> int:
        """Calls that raised."""
        return sum(event.failures for event in vars(self).values())


class UpdateEvents:
    """What happens to the weights."""

    def __init__(self) -> None:
        self.announced = Event[[int]]()
        """The engine will be paused, to serve this version afterwards."""
        self.ended = Event[[UpdateRecord]]()
        """Once per update, with any outcome."""


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
