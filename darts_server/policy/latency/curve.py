"""Time of a decode step by the number of running sequences, and time of a rollout that follows (DARTS cost model)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """PTL(b): seconds of one decode step while b sequences run, linear between the points (``batches``, ``seconds``).

    Below the first point it is constant; beyond the last it rises by ``per_sequence`` seconds a sequence. Plain fields:
    ``LatencyCurve(**json)`` restores it.

    Raises:
        ValueError: there is no point, the batches do not increase, or the curve falls somewhere or is not positive.
    """

    batches: tuple[float, ...]
    seconds: tuple[float, ...]
    per_sequence: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "batches", tuple(self.batches))  # JSON has lists only
        object.__setattr__(self, "seconds", tuple(self.seconds))
        if not self.batches or len(self.batches) != len(self.seconds):
            raise ValueError("batches and seconds must be equally many, and at least one")
        for name, values in (("batches", self.batches), ("seconds", self.seconds)):
            if not all(math.isfinite(x) and x > 0 for x in values):
                raise ValueError(f"{name} must be finite and above 0, got {values}")
        if not all(one < two for one, two in pairwise(self.batches)):
            raise ValueError(f"batches must increase, got {self.batches}")
        if not all(one <= two for one, two in pairwise(self.seconds)):
            raise ValueError(f"seconds must not decrease, got {self.seconds}")
        if not (math.isfinite(self.per_sequence) and self.per_sequence >= 0):
            raise ValueError(f"per_sequence must be finite and at least 0, got {self.per_sequence}")

    def shared_by(self, servers: int) -> "LatencyCurve":
        """Return the curve of so many servers alike, over which the sequences are spread evenly."""
        batches = tuple(batch * servers for batch in self.batches)
        return LatencyCurve(batches, self.seconds, self.per_sequence / servers)

    def step_seconds(self, batch: float) -> float:
        """Return the seconds of one decode step while ``batch`` sequences run."""
        return float(self.step_seconds_array(np.asarray(batch, dtype=np.float64)))

    def step_seconds_array(self, batches: Floats) -> Floats:
        """Return the seconds of one decode step for each of ``batches``, an array of any shape."""
        beyond = self.per_sequence * np.maximum(batches - self.batches[-1], 0.0)
        return np.asarray(np.interp(batches, self.batches, self.seconds) + beyond, dtype=np.float64)

    def rollout_seconds(self, lengths: Sequence[float], capacity: int | None = None) -> float:
        """Return the seconds until all ``lengths`` (tokens, in order of arrival) are generated.

        See `rollout_seconds_batch`.
        """
        return float(self.rollout_seconds_batch(np.asarray([lengths], dtype=np.float64), capacity)[0])

    def rollout_seconds_batch(self, lengths: Floats, capacity: int | None = None, weight: float = 1.0) -> Floats:
        """Return the seconds of each of R rollouts, from ``lengths`` of shape (R, sequences) in tokens.

        The paper's cost model: all sequences start together, each running one gets a token a step, and a step takes
        PTL(b) while b run: T = sum over m of (l_[m] - l_[m-1]) PTL(M' - m + 1), lengths ascending. If the engine runs
        at most ``capacity`` sequences at once, the others queue in order of arrival: one starts whenever one finishes.

        ``weight``: how many sequences each length stands for. The rollout is then a scale model of a larger one, with
        the capacity divided by ``weight``; the error of rounding that to whole slots is corrected in the time.

        Raises:
            ValueError: a length is negative or not finite, or the capacity is below 1.
        """
        if not (np.isfinite(lengths) & (lengths >= 0)).all():
            raise ValueError("lengths must be finite and at least 0")
        if capacity is None:
            return self._unqueued_seconds(lengths, weight)
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        slots = max(1, round(capacity / weight))
        if lengths.shape[-1] <= slots:
            return self._unqueued_seconds(lengths, weight)
        queued = [_run_queue(row, slots) for row in lengths.tolist()]
        full = np.asarray([steps for steps, _ in queued], dtype=np.float64)
        rest = self._unqueued_seconds(np.asarray([left for _, left in queued], dtype=np.float64), capacity / slots)
        return (full * self.step_seconds(capacity) + rest) * (weight * slots / capacity)

    def _unqueued_seconds(self, lengths: Floats, weight: float) -> Floats:
        """Return the seconds if all sequences start together."""
        steps = np.diff(np.sort(lengths, axis=-1), axis=-1, prepend=0.0)
        running = weight * np.arange(lengths.shape[-1], 0, -1, dtype=np.float64)
        # A matrix product would be shorter, but starts threads, which takes longer than this sum.
        return np.asarray((steps * self.step_seconds_array(running)).sum(axis=-1), dtype=np.float64)


def _run_queue(lengths: list[float], slots: int) -> tuple[float, list[float]]:
    """Return the steps until the queue is empty, and the tokens that each running sequence has left then.

    All slots are taken during these steps, so each of them takes the same time.
    """
    ends = lengths[:slots]
    heapify(ends)
    last_start = 0.0
    for length in lengths[slots:]:
        last_start = heapreplace(ends, ends[0] + length)
    return last_start, [end - last_start for end in ends]
