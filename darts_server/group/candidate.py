"""One candidate of a group, and the events that are legal in each of its states."""

from dataclasses import dataclass
from enum import Enum, auto

from darts_server.exceptions import IllegalMove
from darts_server.group.events import Failed, Finished, Lost, Progress, Rewarded, Scored, Started
from darts_server.types import DiscardReason, FinishReason, SelectedAs


class State(Enum):
    REQUESTED = auto()
    """The engine has not confirmed the candidate yet."""
    RUNNING = auto()
    FINISHED = auto()
    """Finished or cut, and neither selected nor discarded yet."""
    SELECTED = auto()
    DISCARDED = auto()


CandidateEvent = Started | Progress | Scored | Finished | Rewarded | Failed | Lost

# The state after each legal event. An engine stops a candidate asynchronously, so events that were sent before the stop
# arrive later, and change nothing. So do progress after the end, and scores and rewards after the selection.
MOVES: dict[tuple[State, type], State] = {
    (State.REQUESTED, Started): State.RUNNING,
    (State.RUNNING, Progress): State.RUNNING,
    (State.RUNNING, Scored): State.RUNNING,
    (State.RUNNING, Finished): State.FINISHED,
    **{(state, end): State.DISCARDED for state in (State.REQUESTED, State.RUNNING) for end in (Failed, Lost)},
    **{(state, late): state for state in (State.FINISHED, State.SELECTED) for late in (Progress, Scored, Rewarded)},
    **{
        (State.DISCARDED, late): State.DISCARDED
        for late in (Started, Progress, Scored, Finished, Rewarded, Failed, Lost)
    },
}


@dataclass(slots=True)
class Candidate:
    """One candidate.

    ``tail_draw``: random number in [0, 1). The lowest draws of a group win the places of a sampled tail.
    ``tokens``: reported tokens while the candidate runs.
    ``survival_draw``: random number in [0, 1). The candidate is pruned as soon as ``survival`` is at or below it.
    ``survival``: product of the probabilities with which the group kept the candidate.
    ``has_verdict``: whether the verifier has answered, with a ``reward`` or without.
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
    has_verdict: bool = False
    reward: float | None = None
    selected_as: SelectedAs | None = None
    reason: DiscardReason | None = None

    @property
    def is_running(self) -> bool:
        return self.state in (State.REQUESTED, State.RUNNING)

    @property
    def is_alive(self) -> bool:
        return self.state is not State.DISCARDED

    @property
    def is_valid(self) -> bool:
        """Whether the candidate finished at a stop token, not at a length limit."""
        return self.finish_reason is FinishReason.STOP

    def apply(self, event: CandidateEvent) -> None:
        """Raises `IllegalMove` if the event cannot happen in this state."""
        if self.cut and not isinstance(event, Rewarded):
            # The tokens of a cut candidate are final, whatever the engine still reports.
            return
        next_state = MOVES.get((self.state, type(event)))
        if next_state is None:
            raise IllegalMove(f"candidate {self.index} is {self.state.name}, where {event} cannot happen")

        # A finished candidate may still get a score or a verdict.
        is_in_time = self.state is State.RUNNING
        if isinstance(event, Scored | Rewarded):
            is_in_time = self.state in (State.RUNNING, State.FINISHED)
        if is_in_time:
            match event:
                case Progress(tokens=tokens):
                    self.tokens = max(self.tokens, tokens)
                case Finished(tokens=tokens, reason=reason):
                    self.tokens = tokens
                    self.finish_reason = reason
                case Scored(quality=quality):
                    self.quality = quality
                case Rewarded(reward=reward):
                    self.has_verdict = True
                    self.reward = reward
        self.state = next_state

        # A reason that the group has given stays.
        if isinstance(event, Failed | Lost) and self.reason is None:
            if isinstance(event, Lost) and event.by_caller:
                self.reason = DiscardReason.ABORTED
            else:
                self.reason = DiscardReason.FAILED

    def select(self, selected_as: SelectedAs) -> None:
        self.state = State.SELECTED
        self.selected_as = selected_as

    def discard(self, reason: DiscardReason) -> None:
        self.state = State.DISCARDED
        self.reason = reason

    def cut_at(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens, as if that number had been the length limit."""
        self.tokens = tokens
        self.finish_reason = FinishReason.LENGTH
        self.cut = True
        self.state = State.FINISHED
        self.forget_verdict()

    def forget_verdict(self) -> None:
        """Wait for a new verdict, because the earlier verdict is about other tokens."""
        self.has_verdict = False
        self.reward = None
