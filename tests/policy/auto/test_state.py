import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from darts_server.policy.auto.state import AutoState, OptionState

STATE = AutoState(
    batches=7,
    explored=1,
    options={"off": OptionState(tries=3, error=0.1), "cap at 0.9": OptionState(1, -0.2, 0.01, 0.05, 1, 23)},
    training=((1000.0, 2.0), (800.0, 1.5)),
    means=(10.0, 20.0),
    max_tokens=256,
    repeated=2,
    noise=0.02,
    length_noise=0.003,
    spare_bias=0.05,
    spare_lost=-0.1,
)


def test_state_is_the_same_after_a_restart() -> None:
    assert AutoState(**json.loads(json.dumps(asdict(STATE)))) == STATE
    assert AutoState(**json.loads(json.dumps(asdict(AutoState())))) == AutoState()


def test_an_option_that_was_not_tried_has_the_default() -> None:
    assert STATE.of("off").tries == 3
    assert STATE.of("uniform 1.5") == OptionState()


def test_tries_count_by_rule() -> None:
    state = AutoState(
        options={"cut 1.5 at 0.8": OptionState(2), "cut 2.0 at 0.9": OptionState(1), "cap": OptionState(4)}
    )
    assert state.tries("cut 1.25 at 0.8") == 3
    assert state.tries("uniform 1.5") == 0


def test_errors_of_an_option_are_drawn_towards_its_rule_and_that_towards_all() -> None:
    off, cut = OptionState(5, error=1.0, length_error=0.5), OptionState(5, error=-1.0, length_error=-0.5)
    exact = AutoState(options={"off": off, "cut 1.5 at 0.8": cut}, noise=0.0, length_noise=0.0)
    assert (exact.error("off"), exact.length_error("off")) == (1.0, 0.5)
    assert (exact.error("cut 1.5 at 0.8"), exact.length_error("cut 1.5 at 0.8")) == (-1.0, -0.5)
    assert (exact.error("cut 1.5 at 0.9"), exact.length_error("cut 1.5 at 0.9")) == (-1.0, -0.5)
    assert (exact.error("uniform 1.5"), exact.length_error("uniform 1.5")) == pytest.approx((0.0, 0.0))
    noisy = replace(exact, noise=0.04, length_noise=0.01)
    assert 0.3 < noisy.error("off") < 0.9
    assert 0.48 < noisy.length_error("off") < 0.5
    assert noisy.error("cut 1.5 at 0.8") < noisy.error("cut 1.5 at 0.9") < -0.3
    many = {f"cut {number}": cut for number in range(9)}
    assert -1.0 < replace(noisy, options={"off": off, **many}).error("uniform 1.5") < -0.5
    assert (AutoState().error("off"), AutoState().length_error("off")) == (0.0, 0.0)


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
        {"truncated": 1.1},
        {"repeated": -1},
        {"noise": -0.1},
        {"length_noise": 26.0},
        {"cut_noise": -1.0},
        {"options": {"off": {"last": -1}}},
        {"spare_bias": float("inf")},
        {"spare_lost": "x"},
    ],
)
def test_a_damaged_state_is_refused(wrong: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        AutoState(**wrong)


def test_what_was_measured_long_ago_counts_less_except_of_off() -> None:
    options = {"off": OptionState(5, length_error=0.3), "cut": OptionState(20, length_error=-0.3, more_cut=0.2)}
    state = AutoState(options=options)
    assert state.length_error("cut") < -0.2
    assert state.more_cut("cut") > 0.15
    later = replace(state, batches=500)
    assert abs(later.more_cut("cut")) < 0.01
    assert later.length_error("off") == state.length_error("off")


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
