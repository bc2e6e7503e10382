"""What a server's weights are doing, as a table of legal moves. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from darts_server.exceptions import IllegalMove


class State(StrEnum):
    """Where an update is."""

    SERVING = "serving"
    """No update is under way."""
    STAGING = "staging"
    """The new weights are fetched and checked; the engine serves."""
    ANNOUNCED = "announced"
    """Observers were told; groups are let out as the rule says."""
    PAUSED = "paused"
    """The engine stands still, with its old weights."""
    UPDATING = "updating"
    """The model is being written."""
    RESTORING = "restoring"
    """That failed: the old weights are written again."""
    LOST = "lost"
    """Nobody knows what the model holds, or the engine does not go on. Nothing leads out of it."""


class Move(StrEnum):
    """What happens to an update."""

    STAGE = "stage"
    ANNOUNCE = "announce"
    PAUSE = "pause"
    UPDATE = "update"
    SUCCEED = "succeed"
    FAIL = "fail"
    LOSE = "lose"


MOVES: dict[tuple[State, Move], State] = {
    (State.SERVING, Move.STAGE): State.STAGING,
    (State.STAGING, Move.ANNOUNCE): State.ANNOUNCED,
    (State.ANNOUNCED, Move.PAUSE): State.PAUSED,
    (State.PAUSED, Move.UPDATE): State.UPDATING,
    (State.UPDATING, Move.SUCCEED): State.SERVING,
    (State.STAGING, Move.FAIL): State.SERVING,
    (State.ANNOUNCED, Move.FAIL): State.SERVING,
    (State.PAUSED, Move.FAIL): State.SERVING,
    (State.UPDATING, Move.FAIL): State.RESTORING,
    (State.RESTORING, Move.SUCCEED): State.SERVING,
    (State.ANNOUNCED, Move.LOSE): State.LOST,
    (State.PAUSED, Move.LOSE): State.LOST,
    (State.UPDATING, Move.LOSE): State.LOST,
    (State.RESTORING, Move.LOSE): State.LOST,
}
"""Only an update that succeeds changes the version."""


@dataclass(slots=True)
class Machine:
    """The state and the version that is served, or was last."""

    version: int = 0
    state: State = State.SERVING
    target: int | None = None
    """The version that the update under way would bring."""

    def stage(self, target: int) -> None:
        """An update to version ``target`` begins.

        Raises:
            IllegalMove
        """
        self.move(Move.STAGE)
        self.target = target

    def move(self, move: Move) -> None:
        """
        Raises:
            IllegalMove
        """
        if (after := MOVES.get((self.state, move))) is None:
            raise IllegalMove(f"weights that are {self.state} cannot {move}")
        if self.state is State.UPDATING and move is Move.SUCCEED:
            assert self.target is not None
            self.version = self.target
        self.state = after
        if after is State.SERVING:
            self.target = None
