"""The replay buffer of labelled features that the head is trained on."""

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


class ReplayBuffer:
    """The last ``capacity`` examples. Batches are sampled with replacement, newer examples more often.

    Args:
        width: of a feature.
        capacity: examples; each takes 4 ``width`` bytes, allocated at once.
        half_life: an example that is so many examples older is sampled half as often.
        max_weight: bound of the inverse propensity weights; ``None`` gives each example the weight 1.
        rng: samples batches.
    """

    def __init__(
        self, width: int, *, capacity: int, half_life: float, max_weight: float | None, rng: np.random.Generator
    ) -> None:
        self._features = np.zeros((capacity, width), dtype=np.float32)
        self._targets = np.zeros(capacity)
        self._survivals = np.ones(capacity)
        self._added = 0
        self._half_life = half_life
        self._max_weight = max_weight
        self._rng = rng

    def __len__(self) -> int:
        return min(self._added, self._targets.size)

    @property
    def is_one_class(self) -> bool:
        """Whether all targets are equal, so that there is nothing to learn from them."""
        targets = self._targets[: len(self)]
        return not targets.size or float(np.ptp(targets)) == 0.0

    @property
    def prior(self) -> float:
        """Weighted share of positives, with one pseudo-label of each class, so that it is never 0 or 1."""
        count = len(self)
        return float((self._weights() * self._targets[:count]).sum() + 1) / (count + 2)

    def add(self, feature: Single, target: float, survival: float) -> None:
        place = self._added % self._targets.size
        self._features[place], self._targets[place], self._survivals[place] = feature, target, survival
        self._added += 1

    def sample(self, size: int) -> Batch:
        """Copy a batch out of the buffer, which must not be empty."""
        count = len(self)
        age = (self._added - 1 - np.arange(count)) % count
        probabilities = np.exp2(-age / self._half_life)
        sampled = self._rng.choice(count, size, p=probabilities / probabilities.sum())
        return Batch(
            features=self._features[sampled],
            targets=self._targets[sampled].astype(np.float32),
            weights=self._weights()[sampled].astype(np.float32),
        )

    def _weights(self) -> Floats:
        count = len(self)
        if self._max_weight is None:
            return np.ones(count)
        return inverse_propensity_weights(self._survivals[:count], self._max_weight)
