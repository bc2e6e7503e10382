import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from darts_server.policy.auto.state import MEASURED, AutoState, MeasuredErrors

STATE = AutoState(
    batches=7,
    explored=1,
    chosen="cap at 0.9",
    training=((1000.0, 2.0), (800.0, 1.5)),
    means=(10.0, 20.0),
    max_tokens=256,
    truncated=0.1,
    measured=(MeasuredErrors(6, "off", 0.1, -0.2, more_truncated=0.1), MeasuredErrors(7, "cap at 0.9", 0.2, 0.3, 0.01)),
    spare_bias=0.05,
    spare_lost=-0.1,
    ending_last=0.5,
)


def rows(*names: str, error: float = 0.0) -> list[MeasuredErrors]:
    return [MeasuredErrors(batch, name, error, 0.0, None) for batch, name in enumerate(names, 1)]


def test_state_is_the_same_after_a_restart() -> None:
    assert AutoState(**json.loads(json.dumps(asdict(STATE)))) == STATE
    assert AutoState(**json.loads(json.dumps(asdict(AutoState())))) == AutoState()


def test_what_was_measured_is_found_by_option() -> None:
    state = AutoState(batches=4, measured=rows("off", "cut 1.5 at 0.8", "cut 2.0 at 0.9", "cut 1.5 at 0.8"))
    assert [state.count(name) for name in ("off", "cut 1.5 at 0.8", "cut 2.0 at 0.8")] == [1, 2, 0]
    assert [state.last(name) for name in ("off", "cut 1.5 at 0.8", "cut 2.0 at 0.9", "cut 2.0 at 0.8")] == [1, 4, 3, 0]


def test_each_kind_of_error_is_expected_of_the_next_batch() -> None:
    rows = [MeasuredErrors(batch, "off", 0.5, -0.4, 0.2, -0.3) for batch in range(1, 9)]
    state = AutoState(batches=8, measured=rows)
    assert state.expect("error", "off") == pytest.approx(0.5, abs=0.05)
    assert state.expect("length_error", "off") == pytest.approx(-0.4, abs=0.05)
    assert state.expect("more_cut", "off") == pytest.approx(0.2, abs=0.05)
    assert state.expect("more_truncated", "off") == pytest.approx(-0.3, abs=0.05)
    assert AutoState().expect("error", "off") == 0.0


def test_an_outlier_counts_as_the_most_that_is_usual() -> None:
    steady = [MeasuredErrors(batch, "off", 0.02 * (-1) ** batch, 0.3, 0.0) for batch in range(1, 20)]
    state = AutoState(batches=20, measured=steady)
    usual = MeasuredErrors(20, "off", 0.03, 0.31, -0.01)
    assert state.with_measured(usual).measured[-1] == usual
    kept = state.with_measured(replace(usual, error=4.0, more_cut=-0.9)).measured[-1]
    assert kept.more_cut is not None
    assert 0.05 < kept.error < 0.5
    assert -0.5 < kept.more_cut < -0.05
    assert kept.length_error == usual.length_error
    assert AutoState(batches=20).with_measured(replace(usual, error=4.0)).measured[0].error == 4.0


def test_what_is_measured_stays_in_range_whatever_was_expected() -> None:
    state = AutoState(batches=90)
    for batch in range(1, 90):
        state = state.with_measured(MeasuredErrors(batch, "off" if batch % 2 else "uniform 1.5", 5.0, -5.0, None))
    other = state.with_measured(MeasuredErrors(90, "off", -5.0, 5.0, None)).measured[-1]
    assert -5 <= other.error < 5
    assert -5 < other.length_error <= 5


def test_options_that_cut_nothing_say_nothing_about_what_others_cut() -> None:
    state = AutoState(batches=20, measured=rows(*["uniform 1.5"] * 18))
    assert state.expect("more_cut", "cap at 0.8") == 0.0
    cut = state.with_measured(MeasuredErrors(19, "cap at 0.8", 0.0, 0.0, 0.2))
    assert cut.expect("more_cut", "cap at 0.8") > 0.1


def test_the_last_batches_of_off_are_kept_however_old() -> None:
    state = AutoState(batches=400, measured=rows(*["off"] * 6, error=0.2))
    for batch in range(7, 80):
        state = state.with_measured(MeasuredErrors(batch, "uniform 1.5", 0.0, 0.0, None))
    assert len(state.measured) == MEASURED
    assert [one.batch for one in state.measured if one.name == "off"] == [3, 4, 5, 6]
    assert [one.batch for one in state.measured][-2:] == [78, 79]
    assert (state.last("off"), state.last("darts 1.5")) == (6, 20), "what is left out may have been measured until then"


def test_how_an_option_differs_from_off_is_less_certain_the_longer_ago_off_was_measured() -> None:
    state = AutoState(batches=9, measured=rows(*["off"] * 4, *["uniform 1.5"] * 4))
    soon, late = (replace(state, batches=batches).uncertainty("uniform 1.5") for batches in (9, 90))
    assert 0 < soon < late < AutoState().uncertainty("uniform 1.5") < 0.4
    assert state.uncertainty("off") == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"batches": -1},
        {"chosen": None},
        {"training": [(-1.0, 1.0)]},
        {"training": [(1.0, 1.0)] * 33},
        {"means": [0.0]},
        {"means": [1.0] * 257},
        {"max_tokens": 0},
        {"truncated": 1.1},
        {"measured": [{"batch": 0, "name": "off", "error": 0.0, "length_error": 0.0, "more_truncated": 1.1}]},
        {"measured": [{"batch": 1, "name": 7, "error": 0.0, "length_error": 0.0, "more_cut": 0.0}]},
        {"measured": [{"batch": 1, "name": "off", "error": 9.0, "length_error": 0.0, "more_cut": 0.0}]},
        {"measured": [MeasuredErrors(0, "off", 0.0, 0.0, 0.0)] * 65},
        {"measured": [MeasuredErrors(8, "off", 0.0, 0.0, 0.0)], "batches": 7},
        {"spare_bias": float("inf")},
    ],
)
def test_a_damaged_state_is_refused(wrong: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        AutoState(**wrong)


@pytest.mark.parametrize(
    ("training", "tokens", "seconds", "tolerance"),
    [
        ([(1000.0, 2.0), (2000.0, 3.0), (4000.0, 5.0)], 3000, 4.0, 0.2),  # a line
        ([(1000.0, 2.0), (1001.0, 2.4), (999.0, 1.6)], 500, 2.0, 0.1),  # a constant while tokens hardly differ
        ([(1000.0, 2.0), (2000.0, 1.0)], 5000, 1.5, 0.0),  # not shorter for more tokens
        ([(1000.0, 0.0), (2000.0, 2.0), (2000.0, 2.0)], 0, 0.0, 0.0),  # nor negative
        ([(1000.0, 2.0)] * 5 + [(1000.0, 3600.0)], 1000, 2.0, 0.0),  # a long pause is no training
        ([], 1000, 0.0, 0.0),
        ([(0.0, 2.0)], 1000, 2.0, 0.0),
        ([(5e-324, 2.0)], 1000, 2.0, 0.0),
    ],
)
def test_training_is_a_line_through_what_was_measured(
    training: list[tuple[float, float]], tokens: float, seconds: float, tolerance: float
) -> None:
    assert AutoState(training=training).training_seconds(tokens) == pytest.approx(seconds, abs=tolerance)


@pytest.mark.parametrize("constant", [0.0, 10.0, 40.0])
def test_a_few_per_cent_more_or_fewer_tokens_show_what_training_takes_if_it_is_regular(constant: float) -> None:
    """Half as many tokens were never measured, and those that were differ by some per cent."""
    rng = np.random.default_rng(0)
    tokens = 250_000 * (1 + 0.05 * rng.standard_normal(24))
    regular = [(float(x), float(constant + (40 - constant) * x / 250_000)) for x in tokens]
    expected = constant + (40 - constant) / 2
    assert AutoState(training=regular).training_seconds(125_000) == pytest.approx(expected, abs=2.0)
    noisy = [(x, y * float(1 + 0.3 * rng.standard_normal())) for x, y in regular]
    assert AutoState(training=noisy).training_seconds(125_000) > 34
