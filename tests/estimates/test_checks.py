import math

import pytest

from darts_server.estimates.checks import LARGEST, check_count, check_length, check_number

HUGE = 10**400
"""Larger than any float: comparing it must raise no other error."""


@pytest.mark.parametrize("value", [0, 0.0, 1, 2.5, LARGEST, float(LARGEST)])
def test_numbers_in_range_are_accepted(value: float) -> None:
    check_number("x", value)


@pytest.mark.parametrize("value", [-1, -0.1, math.nan, math.inf, -math.inf, HUGE, -HUGE, True, None, "1", [1], {}])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^x must be a number in \[0, 4.5036e\+15\], got ") as error:
        check_number("x", value)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("value", [-1, 1.0, math.nan, HUGE, True, None, "1", [1]])
def test_counts_are_whole_numbers(value: object) -> None:
    check_count("x", 0)
    check_count("x", LARGEST)
    with pytest.raises(ValueError, match=r"^x must be a whole number in \[0, 4503599627370496\], got "):
        check_count("x", value)


def test_lists_have_a_limit() -> None:
    check_length("x", [1, 2], 2)
    with pytest.raises(ValueError, match="x must have at most 1 values, got 2"):
        check_length("x", [1, 2], 1)
