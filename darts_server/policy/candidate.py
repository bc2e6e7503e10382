"""One candidate of a group: its state and the moves that are legal."""

from dataclasses import dataclass
from enum import Enum, auto

from darts_server.exceptions import IllegalMove
from darts_server.policy.events import Failed, Finished, Lost, Progress, Scored, Started
from darts_server.types import DiscardReason, FinishReason, SelectedAs


class State(Enum):
    REQUESTED = auto()
    """Asked for; the engine has not confirmed it."""
    RUNNING = auto()
    FINISHED = auto()
    """Ended by itself or cut; its fate is open."""
    SELECTED = auto()
    DISCARDED = auto()


CandidateEvent = Started | Progress | Scored | Finished | Failed | Lost

# What a candidate may hear in each state, and the state it is in afterwards. One that was discarded was stopped from
# here, so the engine's last words about it may still arrive: they change nothing.
MOVES: dict[tuple[State, type], State] = {
    (State.REQUESTED, Started): State.RUNNING,
    (State.REQUESTED, Failed): State.DISCARDED,
    (State.REQUESTED, Lost): State.DISCARDED,
    (State.RUNNING, Progress): State.RUNNING,
    (State.RUNNING, Scored): State.RUNNING,
    (State.RUNNING, Finished): State.FINISHED,
    (State.RUNNING, Failed): State.DISCARDED,
    (State.RUNNING, Lost): State.DISCARDED,
    **{(state, late): state for state in (State.FINISHED, State.SELECTED) for late in (Progress, Scored)},
    **{(State.DISCARDED, late): State.DISCARDED for late in (Started, Progress, Scored, Finished, Failed, Lost)},
}


@dataclass(slots=True)
class Candidate:
    """State of one candidate.

    ``tokens``: a lower bound of its length while it runs, its length once it has finished. ``tail_draw``: random
    number in [0, 1) that is drawn before it starts; the lowest ones of the group win the places in a sampled tail.
    ``finish_position``: 1 for the first candidate of the group that finished; 0 for one that has not. ``quality``:
    probability to end correct by its latest score; ``None`` without a score. ``survival_draw``: random number in
    [0, 1); the candidate is pruned as soon as ``survival`` is not above it. ``survival``: product of the probabilities
    with which it was to be kept, over all its scores.
    """

    index: int
    tail_draw: float
    state: State = State.REQUESTED
    tokens: int = 0
    finish_reason: FinishReason | None = None
    finish_position: int = 0
    quality: float | None = None
    survival_draw: float = 0.0
    survival: float = 1.0
    cut: bool = False
    selected_as: SelectedAs | None = None
    reason: DiscardReason | None = None

    @property
    def running(self) -> bool:
        return self.state in (State.REQUESTED, State.RUNNING)

    @property
    def alive(self) -> bool:
        """Whether it may still be, or is, in the group."""
        return self.state is not State.DISCARDED

    @property
    def valid(self) -> bool:
        """Whether it ended by itself, before any length limit."""
        return self.finish_reason is FinishReason.STOP

    @property
    def sort_key(self) -> tuple[int, int]:
        """Place in the length order, earliest possible one while it runs: ties go to the earlier index.

        A candidate seen running with t tokens will have at least t + 1.
        """
        return (self.tokens + 1 if self.running else self.tokens, self.index)

    def hear(self, event: CandidateEvent) -> None:
        """Take one event in.

        Raises:
            IllegalMove: the event cannot happen in this state.
        """
        if self.cut:
            return  # stopped from here as well: what it was cut to stands, whatever the engine still says
        following = MOVES.get((self.state, type(event)))
        if following is None:
            raise IllegalMove(f"candidate {self.index} is {self.state.name} and cannot hear {event}")
        if self.state is State.RUNNING or (self.state is State.FINISHED and isinstance(event, Scored)):
            self._note(event)
        self.state = following
        if isinstance(event, Failed | Lost) and self.reason is None:
            self.reason = DiscardReason.FAILED

    def _note(self, event: CandidateEvent) -> None:
        match event:
            case Progress(tokens=tokens):
                self.tokens = max(self.tokens, tokens)
            case Finished(tokens=tokens, reason=reason):
                self.tokens = tokens
                self.finish_reason = reason
            case Scored(quality=quality):
                self.quality = quality

    def draw_for(self, survival: float) -> bool:
        """Whether it is kept, with this probability given that it was before.

        One lot does for several draws: below what it was kept with before, it is as uniform as it was at first.
        """
        self.survival *= survival
        return self.survival_draw < self.survival

    def select(self, selected_as: SelectedAs) -> None:
        self.state = State.SELECTED
        self.selected_as = selected_as

    def discard(self, reason: DiscardReason) -> None:
        self.state = State.DISCARDED
        self.reason = reason

    def cut_at(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens, as if they had been the length limit."""
        self.tokens = tokens
        self.finish_reason = FinishReason.LENGTH
        self.cut = True
        self.state = State.FINISHED
