"""The two-layer MLP and its optimiser."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from darts_server.quality.features import Single
from darts_server.quality.replay import Batch

GRADIENT_NORM = 1.0
"""Longer gradients are shortened: one odd batch must not throw the head off."""
LOGIT_RANGE = 60.0
"""Beyond it a sigmoid is 0 or 1 to the last bit."""
SHAPES = ("hidden_weight", "hidden_bias", "out_weight", "out_bias")
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What torch's Adam remembers of each parameter."""

Arrays = Mapping[str, NDArray[np.float32]]


def shapes(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all arrays of a network and its optimiser."""
    parameters: dict[str, tuple[int, ...]] = {
        "hidden_weight": (hidden, width),
        "hidden_bias": (hidden,),
        "out_weight": (1, hidden),
        "out_bias": (1,),
    }
    moments = {f"{name}.{m}": () if m == "step" else parameters[name] for name in SHAPES for m in MOMENTS}
    return parameters | moments


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The weights of a network at one moment, with the optimiser's moments. Nobody writes to its arrays."""

    arrays: Arrays

    @property
    def finite(self) -> bool:
        return all(bool(np.isfinite(x).all()) for x in self.arrays.values())

    def chance(self, feature: Single) -> float:
        """The score s' of one standardised feature: the sigmoid of the network's logit."""
        a = self.arrays
        hidden = np.maximum(a["hidden_weight"] @ feature + a["hidden_bias"], 0)
        logit = float((a["out_weight"] @ hidden + a["out_bias"])[0])
        return float(1 / (1 + np.exp(-np.clip(logit, -LOGIT_RANGE, LOGIT_RANGE))))


class Network:
    """Linear, ReLU, linear, to one logit; binary cross-entropy and Adam.

    The first weights come from ``seed`` alone: torch's global generator, which may be the engine's, is left as it is.
    """

    def __init__(self, width: int, hidden: int, learning_rate: float, weight_decay: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay
        first = torch.randn(hidden, width, generator=generator) * (2 / width) ** 0.5
        self._parameters = {
            "hidden_weight": first.requires_grad_(),
            "hidden_bias": torch.zeros(hidden, requires_grad=True),
            "out_weight": torch.zeros(1, hidden, requires_grad=True),  # so that all first scores are a half
            "out_bias": torch.zeros(1, requires_grad=True),
        }
        self._optimiser = self._fresh_optimiser()

    def fit(self, features: Single, batch: Batch) -> float:
        """One step on a batch, whose ``features`` are given standardised. The loss, in nats, from before the step."""
        p = self._parameters
        x, targets, weights = (torch.from_numpy(a) for a in (features, batch.targets, batch.weights))
        hidden = functional.relu(functional.linear(x, p["hidden_weight"], p["hidden_bias"]))
        logits = functional.linear(hidden, p["out_weight"], p["out_bias"]).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(logits, targets, weight=weights)
        self._optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(p.values(), GRADIENT_NORM)
        self._optimiser.step()
        return float(loss.detach())

    def weights(self) -> Weights:
        """A copy of everything learned."""
        arrays = {name: p.detach().numpy().copy() for name, p in self._parameters.items()}
        for name, p in self._parameters.items():
            remembered = self._optimiser.state.get(p, {})
            for m in MOMENTS:
                like = torch.zeros(()) if m == "step" else torch.zeros_like(p)
                arrays[f"{name}.{m}"] = remembered.get(m, like).numpy().copy()
        return Weights(arrays)

    def load(self, weights: Weights, *, moments: bool) -> None:
        """Go on from these weights; without their ``moments`` the optimiser starts anew."""
        with torch.no_grad():
            for name, p in self._parameters.items():
                p.copy_(torch.from_numpy(weights.arrays[name]))
        self._optimiser = self._fresh_optimiser()
        if moments:
            for name, p in self._parameters.items():
                self._optimiser.state[p] = {m: torch.from_numpy(weights.arrays[f"{name}.{m}"].copy()) for m in MOMENTS}

    def _fresh_optimiser(self) -> torch.optim.Adam:
        return torch.optim.Adam(self._parameters.values(), lr=self._learning_rate, weight_decay=self._weight_decay)
