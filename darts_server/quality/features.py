"""The inputs of the head, made from hidden states and standardised."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Single = NDArray[np.float32]
Floats = NDArray[np.float64]

MEMORY = 4096
"""Features over which mean and variance are taken, roughly. They must follow a policy whose hidden states drift."""
CLIP = 10.0
"""Standard deviations. Values further out are outliers, and must not outweigh all the others."""
MIN_VARIANCE = 1e-12
"""A feature with less variance is constant and carries no information."""


def assemble_feature(hidden: NDArray[np.floating], position: int) -> Single | None:
    """Append the logarithm of its position to a hidden state; ``None`` if a value is not a finite float32.

    With the position as an input, one head serves all detection points, and also states that were taken some tokens
    past one. With a single detection point it is constant, and standardising removes it.

    Raises:
        ValueError: ``hidden`` is not a vector, or ``position`` is below 1.
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
    """Running mean and variance. Immutable: `after` returns the next one."""

    count: int
    mean: Floats
    variance: Floats

    @staticmethod
    def blank(width: int) -> "Standardiser":
        return Standardiser(0, np.zeros(width), np.zeros(width))

    def after(self, feature: Single) -> "Standardiser":
        """Add a feature: exactly for the first `MEMORY` ones; from then on, older ones lose weight exponentially."""
        count = min(self.count + 1, MEMORY)
        deviation = feature - self.mean
        mean = self.mean + deviation / count
        return Standardiser(count, mean, self.variance + (deviation * (feature - mean) - self.variance) / count)

    def apply(self, features: Single) -> Single:
        """Scale one feature, or rows of them, to mean 0 and variance 1."""
        spread = np.where(self.variance > MIN_VARIANCE, np.sqrt(self.variance), np.inf)
        scaled: Floats = (features - self.mean) / spread
        return np.clip(scaled, -CLIP, CLIP).astype(np.float32)
