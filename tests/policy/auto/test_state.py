import json
from collections.abc import Mapping
from dataclasses import asdict

import pytest

from darts_server.policy.auto.state import AutoState, OptionState

STATE = AutoState(
    batches=7,
    explored=1,
    options={"off": OptionState(tries=3, error=0.1), "cap at 0.9": OptionState(1, -0.2, 0.01, 0.05, 1, 23)},
    training=((1000.0, 2.0), (800.0, 1.5)),
    means=(10.0, 20.0),
    max_tokens=256,
)


def test_state_is_the_same_after_a_restart() -> None:
    assert AutoState(**json.loads(json.dumps(asdict(STATE)))) == STATE
    assert AutoState(**json.loads(json.dumps(asdict(AutoState())))) == AutoState()


def test_an_option_that_was_not_tried_has_the_default() -> None:
    assert STATE.of("off").tries == 3
    assert STATE.of("uniform 1.5") == OptionState()


def test_errors_of_an_option_are_its_own_or_those_of_its_rule_or_of_off() -> None:
    off, cut = OptionState(5, error=1.0, length_error=0.5), OptionState(3, error=-1.0, length_error=-0.5)
    state = AutoState(options={"off": off, "cut 1.5 at 0.8": cut})
    assert state.errors("off") == (1.0, 0.5)
    assert state.errors("uniform 1.5") == (1.0, 0.5)
    assert state.errors("cut 1.5 at 0.9") == (-1.0, -0.5)
    own = state.errors("cut 1.5 at 0.8")
    assert -1.0 < own[0] < -0.6
    assert -0.5 < own[1] < -0.3


@pytest.mark.parametrize(
    "wrong",
    [
        {"batches": -1},
        {"explored": 0.5},
        {"options": {"off": {"tries": -1}}},
        {"options": {"off": {"error": 100.0}}},
        {"options": {str(i): {} for i in range(300)}},
        {"training": [(-1.0, 1.0)]},
        {"training": [(1.0, "x")]},
        {"training": [(1.0, 1.0)] * 33},
        {"means": [0.0]},
        {"means": [1.0] * 257},
        {"max_tokens": 0},
    ],
)
def test_a_damaged_state_is_refused(wrong: Mapping[str, object]) -> None:
    with pytest.raises(ValueError, match="must"):
        AutoState(**wrong)  # type: ignore[arg-type]


def test_training_is_a_line_through_what_was_measured() -> None:
    tokens = (1000.0, 2000.0, 4000.0)
    state = AutoState(training=tuple((t, 1.0 + t / 1000) for t in tokens))
    assert state.training_seconds(3000) == pytest.approx(4.0, rel=0.05)
    assert state.training_seconds(500) < state.training_seconds(4000)


def test_training_is_a_constant_while_tokens_hardly_differ() -> None:
    state = AutoState(training=((1000.0, 2.0), (1001.0, 2.4), (999.0, 1.6)))
    assert state.training_seconds(500) == pytest.approx(2.0, abs=0.1)


def test_training_is_neither_negative_nor_shorter_for_more_tokens() -> None:
    falling = AutoState(training=((1000.0, 2.0), (2000.0, 1.0)))
    assert falling.training_seconds(5000) == pytest.approx(1.5)
    steep = AutoState(training=((1000.0, 0.0), (2000.0, 2.0), (2000.0, 2.0)))
    assert steep.training_seconds(0) == 0.0
    assert AutoState().training_seconds(1000) == 0.0
    assert AutoState(training=((0.0, 2.0),)).training_seconds(1000) == 2.0


def test_a_long_pause_is_no_training() -> None:
    pairs = (*((1000.0, 2.0),) * 5, (1000.0, 3600.0))
    assert AutoState(training=pairs).training_seconds(1000) == pytest.approx(2.0)
