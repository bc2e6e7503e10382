"""Nothing waits by the wall clock."""

from faults.clock import find_wall_clock_uses


def test_no_code_uses_the_wall_clock() -> None:
    assert list(find_wall_clock_uses()) == []
