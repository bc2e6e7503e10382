"""Isotonic regression."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def fit_isotonic(values: Floats, weights: Floats) -> Floats:
    """The nearest sequence that never falls: it has the least weighted sum of squared differences to ``values``.

    Weights are above 0.
    """
    means: list[float] = []
    masses: list[float] = []
    sizes: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        size = 1
        while means and means[-1] >= value:
            mass = masses.pop()
            value = (means.pop() * mass + value * weight) / (mass + weight)
            weight += mass
            size += sizes.pop()
        means.append(value)
        masses.append(weight)
        sizes.append(size)
    return np.repeat(means, sizes)
