"""Lists of functions for each event that rooms report, for metrics, logs, traces and statistics."""

import logging
from collections.abc import Callable
from typing import Generic, ParamSpec

from darts_server.records import CohortRecord, GroupRecord, TrajectoryRecord, UpdateRecord
from darts_server.types import TurnKind

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class Event(Generic[P]):
    """Calls functions in order, in the event loop, so they must return fast.

    An error of one function is logged and counted, and the other functions are called all the same.
    """

    def __init__(self) -> None:
        self.failures = 0
        """Number of calls that raised."""
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
                # A function that fails for every group is logged once.
                if function not in self._failed:
                    self._failed.add(function)
                    name = getattr(function, "__qualname__", repr(function))
                    logger.exception("%s failed; its further errors are only counted", name)


class GroupEvents:
    """Events of groups."""

    def __init__(self) -> None:
        self.single_request_classified = Event[[TurnKind]]()
        """A single request arrived that may be joined to a group."""
        self.group_sealed = Event[[bool]]()
        """A group of single requests takes no further request. The argument is whether it is full."""
        self.candidates_started = Event[[int]]()
        """A number of candidates of one group were started."""
        self.trajectory_returned = Event[[TrajectoryRecord]]()
        """A caller gets a trajectory, before or after its group has ended."""
        self.group_ended = Event[[GroupRecord]]()
        """A group has ended, with any outcome."""
        self.scored_group_ended = Event[[GroupRecord]]()
        """A group with scored candidates has ended; after ``group_ended``."""
        self.cohort_ended = Event[[CohortRecord]]()
        """The last group of a cohort has ended."""

    @property
    def failures(self) -> int:
        """Number of calls that raised."""
        return sum(event.failures for event in vars(self).values())


class UpdateEvents:
    """Events of weight updates."""

    def __init__(self) -> None:
        self.announced = Event[[int]]()
        """The engine will be paused, and serve this version afterwards."""
        self.ended = Event[[UpdateRecord]]()
        """An update has ended, with any outcome."""


class PruningObserver:
    """Ignores scores and pruning. Subclasses override the methods that they need."""

    def trajectory_scored(self, *, usable: bool) -> None:
        """Called for each score. It is not ``usable`` if the hidden state or the log-probs were not finite."""

    def pruning_decided(self, *, kept: bool) -> None:
        """Called when a trajectory with a calibrated score was kept or pruned."""

    def hidden_state_expected(self, *, received: bool) -> None:
        """Called when a hidden state arrived, or when its trajectory passed the detection point without it."""

    def label_learned(self) -> None:
        """Called when a scored trajectory got its reward, and became a label."""

    def pending_labels_dropped(self, count: int) -> None:
        """Called when scored trajectories were dropped before they got rewards, because memory is full."""
