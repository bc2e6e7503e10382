"""The moves that a candidate may make, and the values that it keeps."""

import pytest

from darts_server.exceptions import IllegalMove
from darts_server.group.candidate import Candidate, CandidateEvent, State
from darts_server.group.events import Failed, Finished, Lost, Progress, Scored, Started
from darts_server.types import DiscardReason, FinishReason, SelectedAs

EVENTS: list[CandidateEvent] = [
    Started(0),
    Progress(0, 7),
    Scored(0, 0.5),
    Finished(0, 9, FinishReason.STOP),
    Failed(0, RuntimeError()),
    Lost(0),
]
LEGAL: dict[State, dict[type[CandidateEvent], State]] = {
    State.REQUESTED: {Started: State.RUNNING, Failed: State.DISCARDED, Lost: State.DISCARDED},
    State.RUNNING: {
        Progress: State.RUNNING,
        Scored: State.RUNNING,
        Finished: State.FINISHED,
        Failed: State.DISCARDED,
        Lost: State.DISCARDED,
    },
    State.FINISHED: {Progress: State.FINISHED, Scored: State.FINISHED},
    State.SELECTED: {Progress: State.SELECTED, Scored: State.SELECTED},
    State.DISCARDED: {type(event): State.DISCARDED for event in EVENTS},
}


def candidate(state: State = State.RUNNING, tokens: int = 3) -> Candidate:
    return Candidate(
        index=0,
        tail_draw=0.5,
        state=state,
        tokens=tokens,
        finish_reason=FinishReason.STOP if state in (State.FINISHED, State.SELECTED) else None,
        selected_as=SelectedAs.SHORT if state is State.SELECTED else None,
        reason=DiscardReason.MIDDLE if state is State.DISCARDED else None,
    )


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("state", State)
def test_a_move_follows_the_table_or_is_refused(state: State, event: CandidateEvent) -> None:
    c = candidate(state)
    before = repr(c)
    following = LEGAL[state].get(type(event))
    if following is None:
        with pytest.raises(IllegalMove, match=f"candidate 0 is {state.name}"):
            c.apply(event)
    else:
        c.apply(event)
        assert c.state is following
    has_ended = state not in (State.REQUESTED, State.RUNNING)
    is_recorded = state is State.FINISHED and isinstance(event, Scored)
    if following is None or (has_ended and not is_recorded):
        assert repr(c) == before


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("selected", [False, True])
def test_late_events_of_a_cut_candidate_change_nothing(selected: bool, event: CandidateEvent) -> None:
    c = candidate()
    c.cut_at(2)
    if selected:
        c.select(SelectedAs.LONG)
    before = repr(c)
    c.apply(event)
    assert repr(c) == before


def test_progress_never_goes_back_and_a_finish_sets_length_and_reason() -> None:
    c = candidate(tokens=3)
    c.apply(Progress(0, 7))
    c.apply(Progress(0, 5))
    assert c.tokens == 7
    c.apply(Finished(0, 9, FinishReason.LENGTH))
    assert (c.tokens, c.finish_reason, c.is_valid, c.is_alive, c.is_running) == (
        9,
        FinishReason.LENGTH,
        False,
        True,
        False,
    )


@pytest.mark.parametrize("state", [State.RUNNING, State.FINISHED])
def test_a_score_is_recorded_while_selection_is_open(state: State) -> None:
    c = candidate(state)
    c.apply(Scored(0, 0.25, survival=0.1))
    assert (c.state, c.quality, c.survival) == (state, 0.25, 1.0)


@pytest.mark.parametrize("state", [State.REQUESTED, State.RUNNING])
@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Failed(0, RuntimeError()), DiscardReason.FAILED),
        (Lost(0), DiscardReason.FAILED),
        (Lost(0, by_caller=True), DiscardReason.ABORTED),
    ],
)
def test_a_failed_candidate_is_discarded_as_failed_or_aborted(
    state: State, event: Failed | Lost, reason: DiscardReason
) -> None:
    c = candidate(state)
    c.apply(event)
    assert (c.state, c.reason, c.is_alive, c.is_running) == (State.DISCARDED, reason, False, False)


def test_a_cut_keeps_the_first_tokens_like_a_length_limit() -> None:
    c = candidate(tokens=8)
    c.cut_at(5)
    assert (c.state, c.tokens, c.finish_reason, c.cut) == (State.FINISHED, 5, FinishReason.LENGTH, True)
    assert not c.is_valid
