"""What the head sees of a partial trajectory, on one scale."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Single = NDArray[np.float32]
Floats = NDArray[np.float64]

MEMORY = 4096
"""Features that mean and variance look back on, about: a policy that drifts moves its hidden states, too."""
CLIP = 10.0
"""Standard deviations. What lies further out is an outlier, and must not outweigh all else."""
LEAST_VARIANCE = 1e-12
"""A feature that varies less is constant, and says nothing."""


def assembled(hidden: NDArray[np.floating], position: int) -> Single | None:
    """Hidden state and the logarithm of its position as one feature; ``None`` where a value is not a finite float32.

    With the position among the inputs one head serves all detection points, and also a state that was taken some
    tokens past one. Of a single detection point it is constant, and standardised away.

    Raises:
        ValueError: ``hidden`` is no vector, or ``position`` is below 1.
    """
    if hidden.ndim != 1:
        raise ValueError(f"hidden must be a vector, got shape {hidden.shape}")
    if position < 1:
        raise ValueError(f"position must be at least 1, got {position}")
    with np.errstate(over="ignore"):
        feature = np.append(hidden, np.log2(position)).astype(np.float32)
    return feature if np.isfinite(feature).all() else None


@dataclass(frozen=True, slots=True, eq=False)
class Standardiser:
    """Running mean and variance. A value: `after` gives the next one, and this one stays as it is."""

    count: int
    mean: Floats
    variance: Floats

    @staticmethod
    def blank(width: int) -> "Standardiser":
        return Standardiser(0, np.zeros(width), np.zeros(width))

    def after(self, feature: Single) -> "Standardiser":
        """With one more feature: exact for the first `MEMORY`, and from then on the older ones fade."""
        count = min(self.count + 1, MEMORY)
        off = feature - self.mean
        mean = self.mean + off / count
        return Standardiser(count, mean, self.variance + (off * (feature - mean) - self.variance) / count)

    def apply(self, features: Single) -> Single:
        """One feature, or rows of them, with mean 0 and variance 1."""
        spread = np.where(self.variance > LEAST_VARIANCE, np.sqrt(self.variance), np.inf)
        scaled: Floats = (features - self.mean) / spread
        return np.clip(scaled, -CLIP, CLIP).astype(np.float32)
