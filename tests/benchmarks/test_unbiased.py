"""Tables of `benchmarks.unbiased`."""

import pytest

from benchmarks.unbiased import Estimates, paired_difference, report


def test_differences_are_paired_by_group() -> None:
    difference, error = paired_difference([11.0, 21.0, 32.0, 40.0], [10.0, 20.0, 30.0, 40.0])
    assert difference == 1.0
    assert error == pytest.approx(0.408, abs=1e-3)


def test_the_table_compares_weighted_estimates_with_off() -> None:
    off = Estimates([1.0, 3.0, 2.0], [1.0, 3.0, 2.0])
    shaped = Estimates([0.0, 0.0, 0.0], [2.0, 3.0, 2.0])
    lines = report(
        {"off": {"length": off, "reward": off}, "uniform": {"length": shaped, "reward": shaped}}
    ).splitlines()
    assert lines[2].startswith("| off | 3 | 2.000 | 2.000 |  |  |")
    assert lines[3].startswith("| uniform | 3 | 0.000 | 2.333 | +0.333 ± 0.333 | +1.0 |")
