"""What the engine told of its steps while something ran."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import median

POINTS = 400
"""Of a timeline that is kept for the picture."""


class StepLog:
    """Decode steps: when each was heard of (``time.perf_counter()``), how many sequences ran, and its seconds."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.batch: list[int] = []
        self.seconds: list[float] = []

    def add(self, at: float, batch: int, seconds: float) -> None:
        self.at.append(at)
        self.batch.append(batch)
        self.seconds.append(seconds)

    def between(self, began: float, ended: float) -> "StepLog":
        first, last = bisect_left(self.at, began), bisect_right(self.at, ended)
        part = StepLog()
        part.at, part.batch, part.seconds = self.at[first:last], self.batch[first:last], self.seconds[first:last]
        return part

    def typical(self, batch: int) -> tuple[float | None, int]:
        """Median seconds of the steps in which exactly ``batch`` sequences ran, and how many such steps there were."""
        seconds = [s for b, s in zip(self.batch, self.seconds, strict=True) if b == batch]
        return (median(seconds) if seconds else None), len(seconds)

    def idle_share(self, began: float, ended: float, threshold: float) -> float:
        """Share of the time in which fewer than ``threshold`` sequences ran.

        Steps with a prompt in them are not told of; their time counts with the step after them.
        """
        idle, before = 0.0, began
        for at, batch in zip(self.at, self.batch, strict=True):
            if began <= at <= ended:
                idle += at - before if batch < threshold else 0.0
                before = at
        return idle / (ended - began)

    def timeline(self, began: float) -> list[tuple[float, int]]:
        """Seconds since ``began`` and sequences that ran, thinned out evenly."""
        every = max(1, len(self.at) // POINTS)
        points = list(zip(self.at, self.batch, strict=True))
        kept = points[::every] + (points[-1:] if (len(points) - 1) % every else [])
        return [(round(at - began, 4), batch) for at, batch in kept]


def monotone(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The same points, none below one before it."""
    highest, result = 0.0, []
    for batch, seconds in points:
        highest = max(highest, seconds)
        result.append((batch, highest))
    return result
