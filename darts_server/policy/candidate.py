"""One candidate of a group: its state, and the events that are legal in each state."""

from dataclasses import dataclass
from enum import Enum, auto

from darts_server.exceptions import IllegalMove
from darts_server.policy.events import Failed, Finished, Lost, Progress, Scored, Started
from darts_server.types import DiscardReason, FinishReason, SelectedAs


class State(Enum):
    REQUESTED = auto()
    """Sent to the engine, which has not confirmed it yet."""
    RUNNING = auto()
    FINISHED = auto()
    """Finished or cut; neither selected nor discarded yet."""
    SELECTED = auto()
    DISCARDED = auto()


CandidateEvent = Started | Progress | Scored | Finished | Failed | Lost

# The events that are legal in each state, and the state after each. Stopping a candidate is asynchronous: events that
# were on their way when it was discarded still arrive, and change nothing. So do scores and progress of a finished one.
MOVES: dict[tuple[State, type], State] = {
    (State.REQUESTED, Started): State.RUNNING,
    (State.RUNNING, Progress): State.RUNNING,
    (State.RUNNING, Scored): State.RUNNING,
    (State.RUNNING, Finished): State.FINISHED,
    **{(state, end): State.DISCARDED for state in (State.REQUESTED, State.RUNNING) for end in (Failed, Lost)},
    **{(state, late): state for state in (State.FINISHED, State.SELECTED) for late in (Progress, Scored)},
    **{(State.DISCARDED, late): State.DISCARDED for late in (Started, Progress, Scored, Finished, Failed, Lost)},
}


@dataclass(slots=True)
class Candidate:
    """State of one candidate.

    ``tail_draw``: random number in [0, 1), drawn before the candidate starts; the lowest ones of a group win the places
    of a sampled tail. ``tokens``: its length once it has finished, a lower bound of it before. ``quality``: probability
    to end correct by the latest score; ``None`` without one. ``survival_draw``: random number in [0, 1); the candidate
    is pruned as soon as ``survival`` is not above it. ``survival``: product of the probabilities with which it was
    kept.
    """

    index: int
    tail_draw: float
    state: State = State.REQUESTED
    tokens: int = 0
    finish_reason: FinishReason | None = None
    quality: float | None = None
    survival_draw: float = 0.0
    survival: float = 1.0
    cut: bool = False
    selected_as: SelectedAs | None = None
    reason: DiscardReason | None = None

    @property
    def running(self) -> bool:
        """Whether it may still generate tokens."""
        return self.state in (State.REQUESTED, State.RUNNING)

    @property
    def alive(self) -> bool:
        """Whether it is in the group or may still be."""
        return self.state is not State.DISCARDED

    @property
    def valid(self) -> bool:
        """Whether it finished at a stop token rather than at a length limit."""
        return self.finish_reason is FinishReason.STOP

    def apply(self, event: CandidateEvent) -> None:
        """Update the state after an event.

        Raises:
            IllegalMove: the event cannot happen in this state.
        """
        if self.cut:
            return  # stopped by the group: the tokens it was cut to stand, whatever the engine still reports
        following = MOVES.get((self.state, type(event)))
        if following is None:
            raise IllegalMove(f"candidate {self.index} is {self.state.name}, where {event} cannot happen")
        if self.state is State.RUNNING or (self.state is State.FINISHED and isinstance(event, Scored)):
            match event:
                case Progress(tokens=tokens):
                    self.tokens = max(self.tokens, tokens)
                case Finished(tokens=tokens, reason=reason):
                    self.tokens = tokens
                    self.finish_reason = reason
                case Scored(quality=quality):
                    self.quality = quality
        self.state = following
        if isinstance(event, Failed | Lost) and self.reason is None:
            by_caller = isinstance(event, Lost) and event.by_caller
            self.reason = DiscardReason.ABORTED if by_caller else DiscardReason.FAILED

    def select(self, selected_as: SelectedAs) -> None:
        self.state = State.SELECTED
        self.selected_as = selected_as

    def discard(self, reason: DiscardReason) -> None:
        self.state = State.DISCARDED
        self.reason = reason

    def cut_at(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens, as if that had been the length limit."""
        self.tokens = tokens
        self.finish_reason = FinishReason.LENGTH
        self.cut = True
        self.state = State.FINISHED
