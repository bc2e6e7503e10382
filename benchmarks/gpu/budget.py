"""Time that may be spent, and who gets how much of it."""

import time
from collections.abc import Callable, Iterator, Mapping

Clock = Callable[[], float]


class Budget:
    """Seconds from now on that may be spent."""

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds, never less than 0."""
        return max(0.0, self._ends_at - self._clock())

    def fits(self, seconds: float) -> bool:
        """Whether something that takes so long would still end in time."""
        return seconds <= self.left

    def shared(self, weights: Mapping[str, float]) -> Iterator[tuple[str, "Budget"]]:
        """One budget for each name, in order; what one leaves over goes to those after it.

        Each is made when it is asked for: its share of what is left then is its weight against those of the rest.
        """
        rest = sum(weights.values())
        for name, weight in weights.items():
            yield name, Budget(self.left * weight / rest, self._clock)
            rest -= weight
