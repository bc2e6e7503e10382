"""Check the numbers of a saved state. It comes back from outside, and may have been damaged or made up."""

import reprlib
from collections.abc import Sized

LARGEST = 2**52
"""Largest count or length in tokens that is accepted: sums of two are still exact floats, and no square overflows."""
MIN_MEAN = 0.5
"""Smallest mean length that is accepted: no trajectory has less than one token. Means are divided by."""
ROUNDING = 1e-9
"""Subtracted before rounding up: in floating point .55 * 100 is slightly more than 55."""


def check_number(name: str, value: object, low: float = 0.0, high: float = LARGEST) -> None:
    """Raise ``ValueError`` if ``value`` is not a number in [``low``, ``high``]."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be a number in [{low:g}, {high:g}], got {reprlib.repr(value)}")


def check_count(name: str, value: object, low: int = 0) -> None:
    """Raise ``ValueError`` if ``value`` is not a whole number in [``low``, `LARGEST`]."""
    if type(value) is not int or not low <= value <= LARGEST:
        raise ValueError(f"{name} must be a whole number in [{low}, {LARGEST}], got {reprlib.repr(value)}")


def check_length(name: str, values: Sized, most: int) -> None:
    """Raise ``ValueError`` if there are more than ``most`` values."""
    if len(values) > most:
        raise ValueError(f"{name} must have at most {most} values, got {len(values)}")
