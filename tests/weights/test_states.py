import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.exceptions import IllegalMove
from darts_server.weights.states import TRANSITIONS, State, StateMachine, Transition

PATH = [Transition.ANNOUNCE, Transition.PAUSE, Transition.UPDATE, Transition.SUCCEED]


def begun(*transitions: Transition) -> StateMachine:
    machine = StateMachine(3)
    machine.begin(4)
    for transition in transitions:
        machine.apply(transition)
    return machine


def test_lost_is_final() -> None:
    machine = begun(*PATH[:3], Transition.FAIL, Transition.LOSE)
    assert machine.state is State.LOST
    for transition in Transition:
        with pytest.raises(IllegalMove, match="lost"):
            machine.apply(transition)


@given(st.lists(st.sampled_from(Transition), max_size=40))
def test_the_version_changes_only_when_an_update_succeeds(transitions: list[Transition]) -> None:
    machine, served = StateMachine(0), 0
    for number, transition in enumerate(transitions, 1):
        before = machine.state
        try:
            if transition is Transition.STAGE:
                machine.begin(number)
                target = number
            else:
                machine.apply(transition)
        except IllegalMove:
            assert machine.state is before
            assert (before, transition) not in TRANSITIONS
            continue
        if before is State.UPDATING and transition is Transition.SUCCEED:
            served = target
        assert machine.version == served
        assert machine.state is TRANSITIONS[before, transition]
        assert (machine.target is None) == (machine.state is State.SERVING)


def test_from_every_state_but_lost_there_is_a_way_back_to_serving() -> None:
    reached = {State.SERVING}
    for _ in State:
        reached |= {before for (before, _), after in TRANSITIONS.items() if after in reached}
    assert reached == set(State) - {State.LOST}


def test_no_update_begins_while_another_is_in_progress() -> None:
    begins = {before for before, transition in TRANSITIONS if transition is Transition.STAGE}
    assert begins == {State.SERVING}
