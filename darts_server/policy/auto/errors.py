"""By how much forecasts are expected to be wrong, from what was measured of the same option and of others.

A measured error, the logarithm of a value over its forecast, is taken for the sum of

* a level that all options share. It drifts: training changes lengths, and what is known of them lags behind;
* what the options of a rule have in common, and what an option has of its own. The model of a rollout simplifies each
  in its own way. Half of the variance of both lasts, the other half fades: what was measured long ago says less;
* noise.

All are normally distributed, so that what is expected of an option is linear in what was measured (a Gaussian process).
How much the level drifts, how large the noise is, and whether the model is wrong about some options by far, differ
between training runs. Each combination of `DRIFTS`, `NOISES` and `APART` is a case, which counts by how likely it is
and how well it explains what was measured.

While one option alone is measured, its own error looks the same as a level that drifts: whether ``off`` has changed
shows when it runs again. So the last few measurements of ``off`` are always kept (see `state`), and it is measured
again while it may be the fastest (see `chooser`).
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.auto.options import kind_of

Floats = NDArray[np.float64]

LEVEL = 0.3
"""Typical error of all forecasts together, in logarithms, or of shares."""
RULES_DIFFER, OPTIONS_DIFFER = 0.1, 0.05
"""By how much the errors of rules typically differ from each other, and those of the options of a rule."""
STALE = 32
"""Batches after which what fades is half gone."""
LONGEST_GAP = 64
"""Batches for which the level drifts, at most, from one that was measured to the next."""
DRIFTS = (0.002, 0.03, 0.1)
"""By how much the level typically differs from one batch to the next."""
NOISES = (0.03, 0.06, 0.12, 0.25)
"""By how much batches of the same option typically differ."""
APART = {1.0: 0.9, 6.0: 0.1}
"""How many times as much as is typical rules and options differ, and how likely that is: the model of a rollout may be
wrong about what a rule does."""
_DRIFTS, _NOISES, _APART = (grid.ravel() for grid in np.meshgrid(DRIFTS, NOISES, list(APART)))
_LIKELY = np.asarray([APART[apart] for apart in _APART])
_LIKELY /= _LIKELY.sum()


class Errors:
    """What is expected of errors of one kind.

    Args:
        batches: number of batches that had begun when each was measured, in this order, shape (n,).
        names: of the options that were measured, shape (n,).
        values: what was measured, shape (n,).
    """

    def __init__(self, batches: Sequence[int], names: Sequence[str], values: Sequence[float]) -> None:
        self._batches = np.asarray(batches, dtype=np.float64)
        self._names = np.asarray(names)
        self._kinds = np.asarray([kind_of(name) for name in names])
        self._elapsed = np.clip(np.diff(self._batches, prepend=self._batches[:1]), 0.0, LONGEST_GAP).cumsum()
        found = np.asarray(values, dtype=np.float64)
        measured = zip(names, self._batches, self._elapsed, strict=True)
        rows = [self._covariances(name, batch, elapsed) for name, batch, elapsed in measured]
        noise = _NOISES[:, None, None] ** 2 * np.eye(found.size)
        covariances = np.reshape(rows, (found.size, _LIKELY.size, found.size)).swapaxes(0, 1) + noise  # (cases, n, n)
        self._inverse = np.linalg.inv(covariances)
        self._coefficients = self._inverse @ found
        log_likelihood = -0.5 * (self._coefficients @ found + np.linalg.slogdet(covariances)[1])
        likelihood = _LIKELY * np.exp(log_likelihood - log_likelihood.max())
        self._weights = likelihood / likelihood.sum()

    def expect(self, name: str, batch: int) -> float:
        """Return the error that is to be expected of an option in the ``batch``-th batch; 0 if nothing was measured."""
        return float(self._weights @ self._means(self._covariances(name, batch)))

    def spread(self, name: str, batch: int) -> float:
        """Return the standard deviation of what would be measured of an option, around what is expected of it."""
        prior = LEVEL**2 + _APART**2 * (RULES_DIFFER**2 + OPTIONS_DIFFER**2) + _NOISES**2
        prior = prior + _DRIFTS**2 * self._elapsed_at(batch)
        return sqrt(self._variance(prior, self._covariances(name, batch)))

    def differ(self, name: str, other: str, batch: int) -> float:
        """Return the standard deviation of the difference between two options, around what is expected of it."""
        differ = RULES_DIFFER**2 * (kind_of(name) != kind_of(other)) + OPTIONS_DIFFER**2 * (name != other)
        covariances = self._covariances(name, batch) - self._covariances(other, batch)
        return sqrt(max(0.0, self._variance(2 * _APART**2 * differ, covariances)))

    def _variance(self, prior: Floats, covariances: Floats) -> float:
        """Return the variance that is left of a ``prior`` one, over all cases."""
        means, known = self._means(covariances), np.einsum("pn,pnm,pm->p", covariances, self._inverse, covariances)
        return float(self._weights @ (prior - known + (means - self._weights @ means) ** 2))

    def _means(self, covariances: Floats) -> Floats:
        """Return what each case expects, shape (cases,)."""
        return np.asarray((covariances * self._coefficients).sum(axis=1))

    def _covariances(self, name: str, batch: float, elapsed: float | None = None) -> Floats:
        """Return how an option's error varies with those that were measured, noise aside, shape (cases, n).

        ``elapsed``: batches for which the level has drifted by then.
        """
        fresh = (1 + 0.5 ** (np.abs(self._batches - batch) / STALE)) / 2
        own = RULES_DIFFER**2 * (self._kinds == kind_of(name)) + OPTIONS_DIFFER**2 * (self._names == name)
        drifted = np.minimum(self._elapsed, self._elapsed_at(batch) if elapsed is None else elapsed)
        return np.asarray(LEVEL**2 + _APART[:, None] ** 2 * own * fresh + _DRIFTS[:, None] ** 2 * drifted)

    def _elapsed_at(self, batch: float) -> float:
        if not self._batches.size:
            return 0.0
        return float(self._elapsed[-1] + np.clip(batch - self._batches[-1], 0.0, LONGEST_GAP))
