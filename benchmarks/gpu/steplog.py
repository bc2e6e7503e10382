"""A log of the engine's steps."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import median

POINTS = 400
"""Points of a timeline that are kept for the picture."""


class StepLog:
    """Decode steps: when each was reported (``time.perf_counter()``), the running sequences, and its seconds."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.batch: list[int] = []
        self.seconds: list[float] = []

    def add(self, at: float, batch: int, seconds: float) -> None:
        self.at.append(at)
        self.batch.append(batch)
        self.seconds.append(seconds)

    def between(self, start: float, end: float) -> "StepLog":
        first, last = bisect_left(self.at, start), bisect_right(self.at, end)
        part = StepLog()
        part.at, part.batch, part.seconds = self.at[first:last], self.batch[first:last], self.seconds[first:last]
        return part

    def median_step(self, batch: int) -> tuple[float | None, int]:
        """Return the median seconds of the steps with exactly ``batch`` sequences, and the number of these steps."""
        seconds = [s for b, s in zip(self.batch, self.seconds, strict=True) if b == batch]
        return (median(seconds) if seconds else None), len(seconds)

    def idle_share(self, start: float, end: float, threshold: float) -> float:
        """Return the share of the time in which fewer than ``threshold`` sequences ran.

        The engine does not report steps with prefill; their time counts with the step after them.
        """
        idle, before = 0.0, start
        for at, batch in zip(self.at, self.batch, strict=True):
            if start <= at <= end:
                idle += at - before if batch < threshold else 0.0
                before = at
        return idle / (end - start)

    def timeline(self, start: float) -> list[tuple[float, int]]:
        """Return seconds since ``start`` and running sequences, thinned out evenly."""
        every = max(1, len(self.at) // POINTS)
        points = list(zip(self.at, self.batch, strict=True))
        kept = points[::every] + (points[-1:] if (len(points) - 1) % every else [])
        return [(round(at - start, 4), batch) for at, batch in kept]


def monotone(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Raise each point to the highest one before it."""
    highest, result = 0.0, []
    for batch, seconds in points:
        highest = max(highest, seconds)
        result.append((batch, highest))
    return result
