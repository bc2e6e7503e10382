"""Isotonic regression."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def fit_isotonic(values: Sequence[float] | Floats, weights: Sequence[float] | Floats) -> Floats:
    """Fit the non-decreasing sequence with the least weighted sum of squared differences to ``values``.

    ``weights``: above 0.
    """
    means: list[float] = []
    masses: list[float] = []
    sizes: list[int] = []
    for value, weight in zip(values, weights, strict=True):
        mean = float(value)
        mass = float(weight)
        size = 1

        # Pool adjacent violators: where the sequence falls, both neighbours get their weighted mean.
        while means and means[-1] > mean:
            before = masses.pop()
            mean = (means.pop() * before + mean * mass) / (before + mass)
            mass += before
            size += sizes.pop()
        means.append(mean)
        masses.append(mass)
        sizes.append(size)
    return np.repeat(means, sizes)
