from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.exceptions import IllegalMove
from darts_server.weights.states import MOVES, Machine, Move, State

PATH = [Move.ANNOUNCE, Move.PAUSE, Move.UPDATE, Move.SUCCEED]


def begun(*moves: Move) -> Machine:
    machine = Machine(3)
    machine.stage(4)
    for move in moves:
        machine.move(move)
    return machine


def test_an_update_that_succeeds_serves_its_version() -> None:
    machine = begun(*PATH)
    assert (machine.state, machine.version, machine.target) == (State.SERVING, 4, None)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_update_that_fails_anywhere_serves_the_version_before(steps: int) -> None:
    machine = begun(*PATH[:steps], Move.FAIL)
    if machine.state is State.RESTORING:
        machine.move(Move.SUCCEED)
    assert (machine.state, machine.version, machine.target) == (State.SERVING, 3, None)


def test_what_is_lost_stays_lost() -> None:
    machine = begun(*PATH[:3], Move.FAIL, Move.LOSE)
    assert machine.state is State.LOST
    for move in Move:
        with pytest.raises(IllegalMove, match="lost"):
            machine.move(move)


@given(st.lists(st.sampled_from(Move), max_size=40))
def test_whatever_happens_the_version_changes_only_when_an_update_succeeds(moves: list[Move]) -> None:
    machine, served = Machine(0), 0
    for number, move in enumerate(moves, 1):
        before = machine.state
        try:
            if move is Move.STAGE:
                machine.stage(number)
                target = number
            else:
                machine.move(move)
        except IllegalMove:
            assert machine.state is before
            assert (before, move) not in MOVES
            continue
        if before is State.UPDATING and move is Move.SUCCEED:
            served = target
        assert machine.version == served
        assert machine.state is MOVES[before, move]
        assert (machine.target is None) == (machine.state is State.SERVING)


def test_from_every_state_but_lost_there_is_a_way_back_to_serving() -> None:
    reached = {State.SERVING}
    for _ in State:
        reached |= {before for (before, _), after in MOVES.items() if after in reached}
    assert reached == set(State) - {State.LOST}


def test_no_update_begins_while_another_is_under_way() -> None:
    begins = {before for before, move in product(State, Move) if move is Move.STAGE and (before, move) in MOVES}
    assert begins == {State.SERVING}
