"""A trained head at one moment: it makes the scores, and it is what is saved. Plain numpy."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_server.exceptions import InvalidRequest
from darts_server.quality.features import Single, Standardiser
from darts_server.quality.serialization import pack, state_damaged, unpack

LOGIT_RANGE = 60.0
"""Logits are clipped to it, so that ``exp`` cannot overflow; beyond it a sigmoid is as good as 0 or 1."""
MAX_WEIGHT = 1e6
"""Far above any trained one. Logits of any input are finite floats with such weights."""
SHAPES = ("hidden_weight", "hidden_bias", "out_weight", "out_bias")
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""The state that torch's Adam keeps for each parameter."""
NUMBERS = ("width", "hidden", "steps", "seen")

Arrays = Mapping[str, NDArray[np.float32]]


def shapes(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all arrays of a network and its optimiser."""
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
    """The weights of a network at one moment, with the optimiser's moments. Its arrays are never written to."""

    arrays: Arrays

    @property
    def are_finite(self) -> bool:
        return all(bool(np.isfinite(x).all()) for x in self.arrays.values())

    def score(self, feature: Single) -> float:
        """Compute the score s' of one standardised feature: the sigmoid of the network's logit."""
        a = self.arrays
        hidden = np.maximum(a["hidden_weight"] @ feature + a["hidden_bias"], 0)
        logit = float((a["out_weight"] @ hidden + a["out_bias"])[0])
        return float(1 / (1 + np.exp(-np.clip(logit, -LOGIT_RANGE, LOGIT_RANGE))))


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Immutable, so any thread may read it. ``steps``: training steps behind its weights."""

    weights: Weights
    standardiser: Standardiser
    steps: int

    def score(self, feature: Single) -> float:
        """Compute the score s' of a feature that `features.assemble_feature` returned."""
        return self.weights.score(self.standardiser.apply(feature))

    def to_bytes(self, width: int, hidden: int) -> bytes:
        """Serialize weights, optimiser and scale of a head with these sizes."""
        return pack(
            {**self.weights.arrays, "mean": self.standardiser.mean, "variance": self.standardiser.variance},
            {"width": width, "hidden": hidden, "steps": self.steps, "seen": self.standardiser.count},
        )

    @staticmethod
    def from_bytes(data: bytes, width: int, hidden: int) -> "Snapshot":
        """Read what `to_bytes` returned.

        Raises:
            StateDamaged, StateTooNew: `to_bytes` did not make it, or a newer version of it did.
            InvalidRequest: it is of a model or a head of another size.
        """
        arrays, numbers = unpack(data)
        if set(numbers) != set(NUMBERS):
            raise state_damaged("lacks a number, or has one too many")
        if (numbers["width"], numbers["hidden"]) != (width, hidden):
            raise InvalidRequest(
                "state",
                f"is of a quality head with {numbers['width']} inputs and {numbers['hidden']} hidden units, this one "
                f"has {width} and {hidden}; restore it where the same model is served",
            )
        network = shapes(width + 1, hidden)
        scale = {"mean": (width + 1,), "variance": (width + 1,)}
        if {name: x.shape for name, x in arrays.items()} != network | scale:
            raise state_damaged("has arrays of other shapes than its sizes say")
        weights = Weights({name: arrays[name].astype(np.float32) for name in network})
        mean, variance = (arrays[name].astype(np.float64) for name in scale)
        if not (weights.are_finite and np.isfinite([mean, variance]).all() and (variance >= 0).all()):
            raise state_damaged("has values that are not finite, or negative variances")
        if any((np.abs(arrays[name]) > MAX_WEIGHT).any() for name in SHAPES):
            raise state_damaged(f"has weights above {MAX_WEIGHT:g}")
        return Snapshot(weights, Standardiser(numbers["seen"], mean, variance), numbers["steps"])
