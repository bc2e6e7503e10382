"""Lists of functions for each event that rooms report."""

import logging
from collections.abc import Callable
from typing import Generic, ParamSpec

from darts_server.records import CohortRecord, GroupKey, GroupRecord, TrajectoryRecord, UpdateRecord
from darts_server.types import SessionEnd, TurnKind

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class Event(Generic[P]):
    """Calls functions in order, in the event loop."""

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
                # The other functions are called all the same. A function that fails for every group is logged once.
                self.failures += 1
                if function not in self._failed:
                    self._failed.add(function)
                    name = getattr(function, "__qualname__", repr(function))
                    logger.exception("%s failed; its further errors are only counted", name)


class GroupEvents:
    def __init__(self) -> None:
        self.single_request_classified = Event[[TurnKind]]()
        self.group_closed = Event[[bool]]()
        """No further request may join a group of single requests: whether the group is full."""
        self.prompts_skipped = Event[[int]]()
        """Prompts that a batch does not run, because they are almost surely without signal."""
        self.candidates_started = Event[[int]]()
        self.trajectory_returned = Event[[TrajectoryRecord]]()
        """A caller gets a trajectory, before or after its group has ended."""
        self.trajectory_verified = Event[[GroupKey, int, float, bool]]()
        """Follows ``trajectory_returned``: the candidate's index, the verifier's reward, and whether it is correct."""
        self.group_ended = Event[[GroupRecord]]()
        self.scored_group_ended = Event[[GroupRecord]]()
        """Follows ``group_ended`` if candidates were scored."""
        self.cohort_ended = Event[[CohortRecord]]()
        self.session_ended = Event[[SessionEnd, int, float]]()
        """How the session ended, its answered turns, and its tool time in seconds."""
        self.session_event = Event[[str, str | None, str, str | None]]()
        """Ids of the group and of the session, the kind of the event (see `SessionEvent`), and a reason."""
        self.session_request_refused = Event[[]]()
        """The request came after its session's end."""
        self.weights_changing = Event[[]]()
        """The paused model is about to get new weights."""

    @property
    def failures(self) -> int:
        return sum(event.failures for event in vars(self).values())


class UpdateEvents:
    def __init__(self) -> None:
        self.announced = Event[[int]]()
        """The engine will be paused, and then serve this version."""
        self.ended = Event[[UpdateRecord]]()


class PruningObserver:
    """Ignores scores and pruning. Subclasses override the methods that they need."""

    def trajectory_scored(self, *, usable: bool) -> None:
        """Infinite hidden states or log-probs are not ``usable``."""

    def pruning_decided(self, *, kept: bool) -> None:
        """A trajectory was kept or pruned by a calibrated score."""

    def hidden_state_expected(self, *, received: bool) -> None:
        """A trajectory passed the detection point, with its hidden state or without."""

    def label_learned(self) -> None:
        """A scored trajectory got its reward."""

    def pending_labels_dropped(self, count: int) -> None:
        """Scored trajectories without rewards were dropped because memory is full."""
