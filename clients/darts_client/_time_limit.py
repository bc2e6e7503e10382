"""The total time that a stream may take, beside how long it may be silent."""

import time
from collections.abc import Callable

from ._errors import TimedOut


class TimeLimit:
    """`seconds` counted from now, or no limit."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds

    def at_most(self, seconds: float) -> float:
        """So many seconds, or those that are left; never so few that nothing could succeed in them."""
        return seconds if self._end is None else min(seconds, max(self._end - self._clock(), 0.001))

    def check(self) -> None:
        """TimedOut if the time is over."""
        if self._end is not None and self._clock() >= self._end:
            raise TimedOut(f"the batch was not complete after {self._seconds:g} s")
