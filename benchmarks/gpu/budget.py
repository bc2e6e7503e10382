"""Split the available time."""

import time
from collections.abc import Callable, Iterator, Mapping

Clock = Callable[[], float]


class Budget:
    """An amount of time, counted from now."""

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + seconds

    @property
    def remaining(self) -> float:
        """The remaining seconds, at least 0."""
        return max(0.0, self._ends_at - self._clock())

    def fits(self, seconds: float) -> bool:
        """Return whether something that takes this long would end in time."""
        return seconds <= self.remaining

    def split(self, weights: Mapping[str, float]) -> Iterator[tuple[str, "Budget"]]:
        """Yield a budget for each name, in order; time that one does not use goes to those after it.

        Each is created when it is requested: its share of the remaining time is its weight against those of the rest.
        """
        rest = sum(weights.values())
        for name, weight in weights.items():
            yield name, Budget(self.remaining * weight / rest, self._clock)
            rest -= weight
