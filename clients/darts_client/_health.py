"""Waiting for a server that is coming up: how long a probe may take, when to try again, when to give up."""

import time
from collections.abc import Callable

from ._errors import ConnectionFailed, DartsError, Overloaded, ServerFault, TimedOut

# The route only looks at the engine's state, so an answer later than this means that the server is not well.
HEALTH_SECONDS = 10.0
# Loading a model takes a minute or more; asking twice a second costs nothing beside it.
POLL_SECONDS = 0.5
# What a server that is still starting, or a proxy before it, gives; anything else will not pass by waiting.
NOT_YET = (ConnectionFailed, TimedOut, Overloaded, ServerFault)


class Deadline:
    """The time left of `seconds`, counted from now."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def probe_seconds(self) -> float:
        """How long the next probe may take; never so short that it cannot succeed."""
        return min(HEALTH_SECONDS, max(self._left(), POLL_SECONDS))

    def delay_after(self, error: DartsError) -> float:
        """Seconds to sleep before the next probe; TimedOut when there is to be none."""
        left = self._left()
        if left <= 0:
            raise TimedOut(f"not healthy after {self._seconds:g} s, last answer: {error}") from error
        return min(POLL_SECONDS, left)

    def _left(self) -> float:
        return self._end - self._clock()
