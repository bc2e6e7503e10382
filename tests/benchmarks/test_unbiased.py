"""Tables of `benchmarks.unbiased`."""

import pytest

from benchmarks.unbiased import BASE, QUANTITIES, Estimates, main, paired_difference, report


def test_differences_are_paired_by_group() -> None:
    difference, error = paired_difference([11.0, 21.0, 32.0, 40.0], [10.0, 20.0, 30.0, 40.0])
    assert difference == 1.0
    assert error == pytest.approx(0.408, abs=1e-3)


def test_weighted_estimates_are_compared_with_the_raw_model_and_left_out_where_a_group_has_none() -> None:
    off = Estimates([1.0, 3.0, 2.0], [1.0, 3.0, 2.0])
    shaped = Estimates([0.0, 0.0, 0.0], [2.0, 3.0, 2.0])
    saturated = Estimates([1.0, 1.0, 1.0], [2.0, None, 2.0])
    runs = {BASE: off, "uniform": shaped, "darts": saturated}
    plain, weighted = report({name: dict.fromkeys(QUANTITIES, run) for name, run in runs.items()}).split("Weighted")
    rows = [line.split(" | ")[:2] for part in (plain, weighted) for line in part.splitlines() if line.startswith("| ")]
    assert rows == [
        ["| policy", "length"], ["| MODEL:raw", "2.000"], ["| uniform", "0.000"], ["| darts", "1.000"],
        ["| policy", "length"], ["| MODEL:raw", "2.000"], ["| uniform", "2.333, +0.333 ± 0.333"],
    ]  # fmt: skip


def test_policies_without_the_raw_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--policies", "uniform"])
    assert "--policies must include MODEL:raw" in capsys.readouterr().err
