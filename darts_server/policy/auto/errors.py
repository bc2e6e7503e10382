"""By how much forecasts are expected to be wrong, from what was measured of the same option and of others.

A measured error, the logarithm of a value over its forecast, is taken for the sum of

* a level that all options share. It drifts: training changes lengths, and what is known of them lags behind;
* what the options of a rule have in common, and what an option has of its own. The model of a rollout simplifies each
  in its own way. Both fade, so that an option that looks worse than it is, by chance, is tried again;
* noise.

All are normally distributed, so that what is expected of an option is linear in what was measured (a Gaussian process).
How much the level drifts and how large the noise is differ between training runs. Every pair of `DRIFTS` and `NOISES`
counts by how well it explains what was measured.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.auto.options import rule_of

Floats = NDArray[np.float64]

LEVEL = 0.3
"""Typical error of all forecasts together, in logarithms, or of shares."""
RULES_DIFFER, OPTIONS_DIFFER = 0.1, 0.05
"""By how much the errors of rules typically differ from each other, and those of the options of a rule."""
STALE = 32
"""Batches after which what differs between options counts half."""
DRIFTS = (0.005, 0.03, 0.1)
"""By how much the level typically differs from one batch to the next."""
NOISES = (0.03, 0.06, 0.12, 0.25)
"""By how much batches of the same option typically differ."""
_DRIFTS, _NOISES = (grid.ravel() for grid in np.meshgrid(DRIFTS, NOISES))


class Errors:
    """What is expected of errors of one kind.

    Args:
        batches: number of batches that had begun when each was measured, shape (n,).
        names: of the options that were measured, shape (n,).
        values: what was measured, shape (n,).
    """

    def __init__(self, batches: Sequence[int], names: Sequence[str], values: Sequence[float]) -> None:
        self._batches = np.asarray(batches, dtype=np.float64)
        self._names = np.asarray(names)
        self._rules = np.asarray([rule_of(name) for name in names])
        self._measured = len(names)
        if not self._measured:
            return
        found = np.asarray(values, dtype=np.float64)
        between = [self._covariances(name, batch) for name, batch in zip(names, self._batches, strict=True)]
        noise = _NOISES[:, None, None] ** 2 * np.eye(self._measured)
        covariances = np.stack(between, axis=1) + noise  # (pairs, n, n)
        self._inverse = np.linalg.inv(covariances)
        self._coefficients = self._inverse @ found
        log_likelihood = -0.5 * (self._coefficients @ found + np.linalg.slogdet(covariances)[1])
        likelihood = np.exp(log_likelihood - log_likelihood.max())
        self._weights = likelihood / likelihood.sum()

    def expect(self, name: str, batch: int) -> float:
        """Return the error that is to be expected of an option in the ``batch``-th batch; 0 if nothing was measured."""
        return float(self._weights @ self._means(name, batch)) if self._measured else 0.0

    def spread(self, name: str, batch: int) -> float:
        """Return the standard deviation of what would be measured of an option, around what is expected of it."""
        if not self._measured:
            return sqrt(LEVEL**2 + RULES_DIFFER**2 + OPTIONS_DIFFER**2 + float((_NOISES**2).mean()))
        covariances, means = self._covariances(name, batch), self._means(name, batch)
        known = np.einsum("pn,pnm,pm->p", covariances, self._inverse, covariances)
        drift = _DRIFTS**2 * self._since_first(batch)
        each = LEVEL**2 + RULES_DIFFER**2 + OPTIONS_DIFFER**2 + drift + _NOISES**2 - known
        return sqrt(float(self._weights @ (each + (means - self._weights @ means) ** 2)))

    def _means(self, name: str, batch: int) -> Floats:
        """Return what each pair expects of an option, shape (pairs,)."""
        return np.asarray((self._covariances(name, batch) * self._coefficients).sum(axis=1))

    def _covariances(self, name: str, batch: float) -> Floats:
        """Return how an option's error varies with those that were measured, noise aside, shape (pairs, n)."""
        fresh = 0.5 ** (np.abs(self._batches - batch) / STALE)
        own = RULES_DIFFER**2 * (self._rules == rule_of(name)) + OPTIONS_DIFFER**2 * (self._names == name)
        drifted = np.minimum(self._since_first(self._batches), self._since_first(batch))
        return np.asarray(LEVEL**2 + own * fresh + _DRIFTS[:, None] ** 2 * drifted)

    def _since_first(self, batch: float | Floats) -> Floats:
        return np.asarray(np.maximum(batch - self._batches.min(), 0.0))
