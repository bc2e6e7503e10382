"""The latency curve."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from darts_server.policy.latency.curve import LatencyCurve

FLAT = LatencyCurve((1.0,), (0.02,))


PROPORTIONAL = LatencyCurve((1.0,), (0.004,), 0.004)


BENT = LatencyCurve((1.0, 4.0, 8.0), (0.02, 0.02, 0.04), 0.005)


def test_the_curve_is_linear_between_its_points_and_extrapolated_beyond_them() -> None:
    assert [BENT.step_seconds(b) for b in (0.3, 1, 2, 4, 6, 8, 10)] == pytest.approx(
        [0.02, 0.02, 0.02, 0.02, 0.03, 0.04, 0.05]
    )


def test_an_array_gives_the_values_of_its_elements() -> None:
    batches = np.asarray([[0.5, 3.0, 5.0], [7.5, 8.0, 900.0]])
    expected = [[BENT.step_seconds(b) for b in row] for row in batches.tolist()]
    assert BENT.step_seconds_array(batches).tolist() == expected


@pytest.mark.parametrize("curve", [FLAT, PROPORTIONAL, BENT])
@pytest.mark.parametrize("weight", [0.2, 1.0, 5.0])
def test_in_a_scale_model_each_sequence_stands_for_several(curve: LatencyCurve, weight: float) -> None:
    for batch in (0.3, 1, 3, 4, 7, 8, 30):
        assert curve.scaled(weight).step_seconds(batch / weight) == pytest.approx(curve.step_seconds(batch))


def test_a_curve_survives_json() -> None:
    assert LatencyCurve(**json.loads(json.dumps(asdict(BENT)))) == BENT


@pytest.mark.parametrize(
    ("batches", "seconds", "per_sequence", "message"),
    [
        ((), (), 0.0, "equally many, and at least one"),
        ((1.0, 2.0), (0.1,), 0.0, "equally many, and at least one"),
        ((0.0,), (0.1,), 0.0, "batches must be finite and above 0"),
        ((1.0,), (0.0,), 0.0, "seconds must be finite and above 0"),
        ((1.0,), (math.nan,), 0.0, "seconds must be finite and above 0"),
        ((2.0, 2.0), (0.1, 0.2), 0.0, "batches must increase"),
        ((1.0, 2.0), (0.2, 0.1), 0.0, "seconds must not decrease"),
        ((1.0,), (0.1,), -0.1, "per_sequence must be finite and at least 0"),
        ((1.0,), (0.1,), math.inf, "per_sequence must be finite and at least 0"),
    ],
)
def test_a_curve_out_of_range_is_refused(
    batches: tuple[float, ...], seconds: tuple[float, ...], per_sequence: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LatencyCurve(batches, seconds, per_sequence)
