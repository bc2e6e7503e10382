"""States of a weight update, and the legal transitions between them. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from darts_server.exceptions import IllegalMove


class State(StrEnum):
    """State of the served weights."""

    SERVING = "serving"
    """No update is in progress."""
    STAGING = "staging"
    """The new weights are fetched and checked; the engine serves the old ones."""
    ANNOUNCED = "announced"
    """Observers are notified, and the update's rule is applied to running groups."""
    PAUSED = "paused"
    """The engine is paused and still has its old weights."""
    UPDATING = "updating"
    """The model is being written."""
    RESTORING = "restoring"
    """Writing failed; the old weights are loaded again."""
    LOST = "lost"
    """The model's weights are undefined, or the engine does not resume. Final."""


class Transition(StrEnum):
    """An event that changes the state."""

    STAGE = "stage"
    SET_ASIDE = "set aside"
    """The new weights are kept, and not served for now."""
    ANNOUNCE = "announce"
    PAUSE = "pause"
    UPDATE = "update"
    SUCCEED = "succeed"
    FAIL = "fail"
    LOSE = "lose"


TRANSITIONS: dict[tuple[State, Transition], State] = {
    (State.SERVING, Transition.STAGE): State.STAGING,
    (State.STAGING, Transition.ANNOUNCE): State.ANNOUNCED,
    (State.ANNOUNCED, Transition.PAUSE): State.PAUSED,
    (State.PAUSED, Transition.UPDATE): State.UPDATING,
    (State.UPDATING, Transition.SUCCEED): State.SERVING,
    (State.STAGING, Transition.SET_ASIDE): State.SERVING,
    (State.STAGING, Transition.FAIL): State.SERVING,
    (State.ANNOUNCED, Transition.FAIL): State.SERVING,
    (State.PAUSED, Transition.FAIL): State.SERVING,
    (State.UPDATING, Transition.FAIL): State.RESTORING,
    (State.RESTORING, Transition.SUCCEED): State.SERVING,
    (State.ANNOUNCED, Transition.LOSE): State.LOST,
    (State.PAUSED, Transition.LOSE): State.LOST,
    (State.UPDATING, Transition.LOSE): State.LOST,
    (State.RESTORING, Transition.LOSE): State.LOST,
}
"""Only an update that succeeds changes the version."""


@dataclass(slots=True)
class StateMachine:
    """The state, the served version and the version of the update in progress."""

    version: int = 0
    """In the state LOST: the version that was served last."""
    state: State = State.SERVING
    target: int | None = None
    """Version of the update in progress."""

    def begin(self, target: int) -> None:
        """Begin an update to version ``target``.

        Raises:
            IllegalMove
        """
        self.apply(Transition.STAGE)
        self.target = target

    def apply(self, transition: Transition) -> None:
        """Change the state.

        Raises:
            IllegalMove
        """
        if (after := TRANSITIONS.get((self.state, transition))) is None:
            raise IllegalMove(f"weights in state {self.state} cannot {transition}")
        if self.state is State.UPDATING and transition is Transition.SUCCEED:
            assert self.target is not None
            self.version = self.target
        self.state = after
        if after is State.SERVING:
            self.target = None
