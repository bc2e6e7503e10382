"""Check the numbers of a saved state, which a user may send back damaged or made up. Raise ``ValueError``."""

import reprlib
from collections.abc import Sized

LARGEST = 2**52
"""Largest accepted count or length: the sum of two is an exact float, and a square does not overflow."""
MIN_MEAN = 0.5
"""Smallest accepted mean length. Means are divided by."""
ROUNDING = 1e-9
"""Subtracted before rounding up: in floating point .55 * 100 is slightly more than 55."""


def check_number(
    name: str,
    value: object,
    low: float = 0.0,
    high: float = LARGEST,
) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be a number in [{low:g}, {high:g}], got {reprlib.repr(value)}")


def check_count(name: str, value: object, low: int = 0) -> None:
    if type(value) is not int or not low <= value <= LARGEST:
        raise ValueError(f"{name} must be a whole number in [{low}, {LARGEST}], got {reprlib.repr(value)}")


def check_length(name: str, values: Sized, most: int) -> None:
    if len(values) > most:
        raise ValueError(f"{name} must have at most {most} values, got {len(values)}")
