"""Time of a decode step by the number of running sequences (DARTS cost model)."""

import math
from dataclasses import dataclass
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

    def scaled(self, weight: float, slower: float = 1.0) -> "LatencyCurve":
        """Return the curve for sequences of which each stands for ``weight``, with steps ``slower`` times as long."""
        batches, seconds = (batch / weight for batch in self.batches), (slower * second for second in self.seconds)
        return LatencyCurve(tuple(batches), tuple(seconds), slower * weight * self.per_sequence)

    def step_seconds(self, batch: float) -> float:
        """Return the seconds of one decode step while ``batch`` sequences run."""
        return float(self.step_seconds_array(np.asarray(batch, dtype=np.float64)))

    def step_seconds_array(self, batches: Floats) -> Floats:
        """Return the seconds of one decode step for each of ``batches``, an array of any shape."""
        beyond = self.per_sequence * np.maximum(batches - self.batches[-1], 0.0)
        return np.asarray(np.interp(batches, self.batches, self.seconds) + beyond, dtype=np.float64)
