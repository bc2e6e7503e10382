"""What is expected of forecasts, after errors of known kinds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.auto.errors import LEVEL, Errors
from darts_server.policy.checks import LARGEST

BATCHES = st.integers(0, LARGEST)
NAMES = ("off", "uniform 1.5", "uniform 2.0", "darts 1.5")


Row = tuple[int, str, float]


def of(name: str, values: list[float], first: int = 1) -> list[Row]:
    return [(batch, name, value) for batch, value in enumerate(values, first)]


def errors(*parts: list[Row]) -> Errors:
    rows = [row for part in parts for row in part]
    return Errors([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


def test_nothing_is_expected_of_what_was_never_measured() -> None:
    nothing = Errors([], [], [])
    assert nothing.expect("off", 5) == 0.0
    assert LEVEL < nothing.spread("off", 5) < 2 * LEVEL


def test_what_all_options_have_in_common_is_expected_of_one_that_was_never_measured() -> None:
    found = errors(of("off", [0.4, 0.4, 0.4]), of("uniform 1.5", [0.4, 0.4, 0.4], 4))
    assert found.expect("darts 1.5", 7) == pytest.approx(0.4, abs=0.05)
    assert found.spread("darts 1.5", 7) > found.spread("uniform 1.5", 7)


def test_options_of_a_rule_are_alike_and_those_of_others_less_so() -> None:
    found = errors(of("off", [0.0] * 6), of("uniform 1.5", [0.2] * 6, 7))
    assert found.expect("uniform 1.5", 13) == pytest.approx(0.2, abs=0.03)
    assert 0.1 < found.expect("uniform 2.0", 13) < found.expect("uniform 1.5", 13)
    assert -0.05 < found.expect("off", 13) < 0.08  # it was steady before, so that this is uniform's own
    assert found.expect("off", 13) < found.expect("darts 1.5", 13) < found.expect("uniform 2.0", 13)


def test_half_of_what_differs_between_options_fades() -> None:
    found = errors(of("off", [0.0] * 6), of("uniform 1.5", [0.2] * 6, 7))
    soon, late = (found.expect("uniform 1.5", batch) - found.expect("off", batch) for batch in (13, 400))
    assert soon > 0.12
    assert late == pytest.approx(soon / 2, rel=0.1)


def test_a_level_that_drifts_is_seen_also_long_after_off_was_measured() -> None:
    for first in (10, 5000):
        falling = [-0.02 * batch for batch in range(60)]
        found = errors(of("off", [0.0] * 4), of("uniform 1.5", falling, first))
        assert found.expect("uniform 1.5", first + 60) == pytest.approx(-1.2, abs=0.05)
        assert found.expect("off", first + 60) < -0.8


def test_off_is_not_taken_for_slower_since_the_only_option_that_runs_is() -> None:
    found = errors(of("off", [0.0] * 4), of("uniform 1.5", [0.2] * 60, 200))
    assert found.expect("uniform 1.5", 261) == pytest.approx(0.2, abs=0.02)
    assert found.expect("off", 261) < 0.07


def test_what_two_options_differ_by_is_known_once_both_were_measured() -> None:
    nothing, apart = Errors([], [], []), np.sqrt(0.9 + 0.1 * 6**2)
    assert nothing.differ("off", "uniform 1.5", 1) == pytest.approx(apart * np.sqrt(2 * (0.1**2 + 0.05**2)))
    assert nothing.differ("uniform 2.0", "uniform 1.5", 1) == pytest.approx(apart * np.sqrt(2) * 0.05)
    found = errors(of("off", [0.3, 0.31, 0.29, 0.3]), of("uniform 1.5", [0.1, 0.09, 0.11, 0.1], 5))
    assert found.differ("off", "uniform 1.5", 9) < 0.08 < found.differ("off", "darts 1.5", 9)
    assert found.differ("off", "off", 9) == 0.0


def test_a_rule_of_which_the_model_is_wrong_by_far_is_told_from_a_level_that_changes() -> None:
    found = errors(of("off", [0.0, 0.02, -0.02]), of("uniform 1.5", [1.5, 1.5], 4))
    assert found.expect("uniform 1.5", 6) == pytest.approx(1.5, abs=0.1)
    assert found.expect("uniform 2.0", 6) > 1.0
    assert found.expect("off", 6) < 0.3
    noisy = errors(of("off", [0.0, 0.3, -0.3]), of("uniform 1.5", [0.3, 0.3], 4))
    assert noisy.expect("off", 6) > noisy.expect("uniform 1.5", 6) / 3, "the level, for a part"


def test_noise_is_told_from_what_is_measured() -> None:
    rng = np.random.default_rng(0)
    spreads = [errors(of("off", rng.normal(0.0, noise, 40).tolist())).spread("off", 41) for noise in (0.03, 0.12, 0.25)]
    assert spreads == pytest.approx([0.03, 0.12, 0.25], rel=0.5)
    noisy = errors(of("off", rng.normal(0.0, 0.25, 20).tolist()), of("uniform 1.5", [0.3], 21))
    assert noisy.expect("uniform 1.5", 22) < 0.15  # one batch may be chance


@given(
    st.lists(st.tuples(st.integers(0, 1000) | BATCHES, st.sampled_from(NAMES), st.floats(-5, 5)), max_size=64),
    st.integers(0, 1100) | BATCHES,
)
def test_whatever_was_measured_expectations_are_finite_and_within_it(rows: list[Row], batch: int) -> None:
    found = errors(rows)
    most = max((abs(row[2]) for row in rows), default=0.0)
    for name in NAMES:
        assert abs(found.expect(name, batch)) <= 4 * most + 1e-9
        assert 0 < found.spread(name, batch) < 10
        assert 0 <= found.differ(name, NAMES[0], batch) < 10
