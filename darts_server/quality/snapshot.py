"""A trained head at one moment, which scores hidden states and can be saved. It needs numpy only.

A saved head is the line ``darts-quality-head 1 SHA256``, then safetensors, with integers as JSON in its metadata. Only
older versions check the SHA-256 (hex) of the bytes after the line. Nothing is pickled, so bytes from the network cannot
run code.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from darts_server.exceptions import InvalidRequest, StateDamaged

MEMORY = 4096
"""Number of features over which mean and variance are taken. The hidden states drift with the policy."""
CLIP = 10.0
"""Standard deviations at which values are clipped, so that outliers do not outweigh all other values."""
MIN_VARIANCE = 1e-12
"""A feature with less variance is constant and carries no information."""
LOGIT_RANGE = 60.0
"""Maximum of a logit, so that ``exp`` cannot overflow."""
MAX_WEIGHT = 1e6
"""Far above any trained weight. Below it, the logit of any input is a finite float."""
WEIGHT_NAMES = ("hidden_weight", "hidden_bias", "out_weight", "out_bias")
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""State that torch's Adam keeps for each parameter."""
_FIRST_LINE = re.compile(rb"darts-quality-head 1 [0-9a-f]{64}\n")

Single = NDArray[np.float32]
Floats = NDArray[np.float64]


def assemble_feature(hidden: NDArray[np.floating], position: int) -> Single | None:
    """Append the logarithm of its position to a hidden state. Return None if a value is not a finite float32.

    With the position as an input, one head serves all detection points, and also states from some tokens after a point.
    With a single point the logarithm is constant, and the standardiser removes it.
    """
    with np.errstate(over="ignore"):
        feature = np.append(hidden, np.log2(position)).astype(np.float32)
    return feature if np.isfinite(feature).all() else None


@dataclass(frozen=True, slots=True, eq=False)
class Standardiser:
    """Running mean and variance of features."""

    count: int
    mean: Floats
    variance: Floats

    @staticmethod
    def blank(width: int) -> "Standardiser":
        return Standardiser(0, np.zeros(width), np.zeros(width))

    def with_feature(self, feature: Single) -> "Standardiser":
        # Welford's update. With a constant count, older features fade out.
        count = min(self.count + 1, MEMORY)
        deviation = feature - self.mean
        mean = self.mean + deviation / count
        variance = self.variance + (deviation * (feature - mean) - self.variance) / count
        return Standardiser(count, mean, variance)

    def apply(self, features: Single) -> Single:
        """Scale a feature, or rows of features, to mean 0 and variance 1."""
        # Division by infinity makes a constant feature 0.
        spread = np.where(self.variance > MIN_VARIANCE, np.sqrt(self.variance), np.inf)
        scaled: Floats = (features - self.mean) / spread
        return np.clip(scaled, -CLIP, CLIP).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A trained head, which never changes."""

    arrays: Mapping[str, Single]
    """Weights of the network and moments of the optimiser by name, see `array_shapes`."""
    standardiser: Standardiser
    steps: int
    """Training steps behind the weights."""

    def score(self, feature: Single) -> float:
        """Return the score s' of a feature of `assemble_feature`: the sigmoid of the network's logit."""
        arrays = self.arrays
        inputs = self.standardiser.apply(feature)
        hidden = np.maximum(arrays["hidden_weight"] @ inputs + arrays["hidden_bias"], 0)
        logit = float((arrays["out_weight"] @ hidden + arrays["out_bias"])[0])
        return float(1 / (1 + np.exp(-np.clip(logit, -LOGIT_RANGE, LOGIT_RANGE))))

    def to_bytes(self) -> bytes:
        hidden, inputs = self.arrays["hidden_weight"].shape
        # The last input is the position. The other inputs are the hidden state.
        numbers = {"width": inputs - 1, "hidden": hidden, "steps": self.steps, "seen": self.standardiser.count}
        arrays = {**self.arrays, "mean": self.standardiser.mean, "variance": self.standardiser.variance}
        body = safetensors.save(
            {name: np.asarray(array, order="C") for name, array in arrays.items()},
            metadata={"numbers": json.dumps(numbers, sort_keys=True)},
        )
        first_line = f"darts-quality-head 1 {hashlib.sha256(body).hexdigest()}\n"
        return first_line.encode() + body

    @staticmethod
    def from_bytes(data: bytes, width: int, hidden: int) -> "Snapshot":
        """Read the bytes of `to_bytes`.

        Raises:
            StateDamaged: `to_bytes` of this version did not make them.
            InvalidRequest: the saved head, or its model, has another size.
        """
        line = _FIRST_LINE.match(data)
        if not line:
            raise StateDamaged("it does not begin like a quality head of format 1")
        body = data[line.end() :]
        try:
            # The header is JSON after its length in eight bytes. `safetensors.load` does not return the metadata.
            header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
            numbers = json.loads(header["__metadata__"]["numbers"])
            steps = int(numbers["steps"])
            seen = int(numbers["seen"])
            sizes = (int(numbers["width"]), int(numbers["hidden"]))
            arrays = safetensors.load(body)
        except (SafetensorError, OverflowError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StateDamaged(f"it cannot be read ({error!r})") from error

        if sizes != (width, hidden):
            raise InvalidRequest(
                "state",
                f"is of a quality head with {sizes[0]} inputs and {sizes[1]} hidden units, but this server's head has "
                f"{width} and {hidden}; restore it on a server of the same model",
            )
        network = array_shapes(width + 1, hidden)
        standardiser = {"mean": (width + 1,), "variance": (width + 1,)}
        found = {name: array.shape for name, array in arrays.items()}
        if found != network | standardiser or min(steps, seen) < 0:
            raise StateDamaged("it has arrays of other shapes than its sizes say, or negative numbers")

        weights = {name: arrays[name].astype(np.float32) for name in network}
        mean = arrays["mean"].astype(np.float64)
        variance = arrays["variance"].astype(np.float64)
        if not (are_finite(weights) and np.isfinite([mean, variance]).all() and (variance >= 0).all()):
            raise StateDamaged("it has values that are not finite, or negative variances")
        if any((np.abs(weights[name]) > MAX_WEIGHT).any() for name in WEIGHT_NAMES):
            raise StateDamaged(f"it has weights above {MAX_WEIGHT:g}")
        return Snapshot(weights, Standardiser(seen, mean, variance), steps)


def are_finite(arrays: Mapping[str, Single]) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays.values())


def array_shapes(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights and moments by name, for features of size ``width``."""
    shapes: dict[str, tuple[int, ...]] = {
        "hidden_weight": (hidden, width),
        "hidden_bias": (hidden,),
        "out_weight": (1, hidden),
        "out_bias": (1,),
    }
    for name in WEIGHT_NAMES:
        shapes[f"{name}.exp_avg"] = shapes[name]
        shapes[f"{name}.exp_avg_sq"] = shapes[name]
        shapes[f"{name}.step"] = ()
    return shapes
