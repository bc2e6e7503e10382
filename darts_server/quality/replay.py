"""The labelled features that the head is trained on."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.pruning.calibration import inverse_propensity_weights
from darts_server.quality.features import Single

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """``features``: [batch, width]. ``targets``, ``weights``: [batch]; the weights of the whole buffer have mean 1."""

    features: Single
    targets: Single
    weights: Single


class Replay:
    """The last ``capacity`` examples. Batches are drawn with replacement, newer ones more often.

    Args:
        width: of a feature.
        capacity: examples; each takes 4 ``width`` bytes, set aside at once.
        half_life: examples after which one is drawn half as often.
        most_weight: bound of the inverse propensity weights; ``None`` counts all examples as one.
        rng: what batches are drawn with.
    """

    def __init__(
        self, width: int, *, capacity: int, half_life: float, most_weight: float | None, rng: np.random.Generator
    ) -> None:
        self._features = np.zeros((capacity, width), dtype=np.float32)
        self._targets = np.zeros(capacity)
        self._survivals = np.ones(capacity)
        self._added = 0
        self._half_life = half_life
        self._most_weight = most_weight
        self._rng = rng

    def __len__(self) -> int:
        return min(self._added, self._targets.size)

    @property
    def one_class(self) -> bool:
        """Whether all targets are the same, so that nothing tells one from another."""
        known = self._targets[: len(self)]
        return not known.size or float(np.ptp(known)) == 0.0

    @property
    def prior(self) -> float:
        """Weighted share of positives, with one imagined label of each class: never quite 0 or 1."""
        count = len(self)
        return float((self._weights() * self._targets[:count]).sum() + 1) / (count + 2)

    def add(self, feature: Single, target: float, survival: float) -> None:
        place = self._added % self._targets.size
        self._features[place], self._targets[place], self._survivals[place] = feature, target, survival
        self._added += 1

    def sample(self, size: int) -> Batch:
        """A batch of copies, from a buffer that is not empty."""
        count = len(self)
        age = (self._added - 1 - np.arange(count)) % count
        chances = np.exp2(-age / self._half_life)
        drawn = self._rng.choice(count, size, p=chances / chances.sum())
        return Batch(
            features=self._features[drawn],
            targets=self._targets[drawn].astype(np.float32),
            weights=self._weights()[drawn].astype(np.float32),
        )

    def _weights(self) -> Floats:
        count = len(self)
        if self._most_weight is None:
            return np.ones(count)
        return inverse_propensity_weights(self._survivals[:count], self._most_weight)
