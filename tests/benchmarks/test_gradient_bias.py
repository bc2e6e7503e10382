"""The table of `benchmarks.gradient_bias`, on the page of policies."""

import re
from pathlib import Path

import pytest

from benchmarks.gradient_bias import CASES, TOYS, compare

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


def printed(policy: str, kind: str) -> list[tuple[float, float]]:
    """The figures of the page: relative bias and cosine, for each toy policy."""
    [row] = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {policy} | {kind} |")]
    numbers = [float(number) for number in re.findall(r"\d\.\d\d", row)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_the_expected_gradient_is_off_by_what_the_page_says(case: tuple[str, str]) -> None:
    expected = printed(*case)
    assert len(expected) == len(TOYS)
    assert compare(TOYS["long ones are right"], *CASES[case]) == pytest.approx(expected[-1], abs=0.006)


def test_what_claims_to_be_exact_is_exact_and_plain_samples_are() -> None:
    for policy, kind in (("off", "group mean"), ("uniform", "exact"), ("arrol, all survivors", "exact")):
        assert compare(TOYS["long ones are wrong"], *CASES[policy, kind]) == pytest.approx((0, 1), abs=1e-9)
