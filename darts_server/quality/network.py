"""The two-layer MLP and its optimiser."""

import torch
from torch.nn import functional

from darts_server.quality.features import Single
from darts_server.quality.replay import Batch
from darts_server.quality.snapshot import MOMENTS, Weights

GRADIENT_NORM = 1.0
"""Longer gradients are clipped, so that one unusual batch cannot ruin the weights."""


class Network:
    """Linear, ReLU, linear, to one logit; binary cross-entropy and Adam.

    The initial weights come from ``seed`` alone. Torch's global generator is not used, because an engine in the same
    process may rely on its state. ``device``: torch's name of the device to compute on.
    """

    def __init__(
        self, width: int, hidden: int, learning_rate: float, weight_decay: float, seed: int, device: str = "cpu"
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay
        self._device = torch.device(device)
        initial = {
            "hidden_weight": torch.randn(hidden, width, generator=generator) * (2 / width) ** 0.5,
            "hidden_bias": torch.zeros(hidden),
            "out_weight": torch.zeros(1, hidden),  # so that all initial scores are a half
            "out_bias": torch.zeros(1),
        }
        self._parameters = {name: x.to(self._device).requires_grad_() for name, x in initial.items()}
        self._optimiser = self._create_optimiser()

    def fit(self, features: Single, batch: Batch) -> float:
        """Make one step on a batch, with its ``features`` standardised; return the loss before the step, in nats."""
        p = self._parameters
        x, targets, weights = (torch.from_numpy(a).to(self._device) for a in (features, batch.targets, batch.weights))
        hidden = functional.relu(functional.linear(x, p["hidden_weight"], p["hidden_bias"]))
        logits = functional.linear(hidden, p["out_weight"], p["out_bias"]).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(logits, targets, weight=weights)
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), GRADIENT_NORM)
        self._optimiser.step()
        return float(loss.detach())

    def weights(self) -> Weights:
        """Copy everything learned."""
        arrays = {name: p.detach().cpu().numpy().copy() for name, p in self._parameters.items()}
        for name, p in self._parameters.items():
            adam = self._optimiser.state.get(p, {})
            for m in MOMENTS:
                initial = torch.zeros(()) if m == "step" else torch.zeros_like(p)
                arrays[f"{name}.{m}"] = adam.get(m, initial).cpu().numpy().copy()
        return Weights(arrays)

    def load(self, weights: Weights, *, moments: bool) -> None:
        """Continue from these weights, with a new optimiser unless ``moments`` are to be loaded as well."""
        with torch.no_grad():
            for name, p in self._parameters.items():
                p.copy_(torch.from_numpy(weights.arrays[name]))
        self._optimiser = self._create_optimiser()
        if moments:
            for name, p in self._parameters.items():
                self._optimiser.state[p] = {m: self._moment(weights, name, m) for m in MOMENTS}

    def _moment(self, weights: Weights, name: str, moment: str) -> torch.Tensor:
        tensor = torch.from_numpy(weights.arrays[f"{name}.{moment}"].copy())
        return tensor if moment == "step" else tensor.to(self._device)  # Adam keeps its step counter on the CPU

    def _create_optimiser(self) -> torch.optim.Adam:
        return torch.optim.Adam(self._parameters.values(), lr=self._learning_rate, weight_decay=self._weight_decay)
