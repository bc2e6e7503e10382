"""A trained head at one moment: it scores hidden states, and it is what is saved. Plain numpy.

A saved head is a line of ASCII, then safetensors. The line is ``darts-quality-head 1 SHA256``, with the SHA-256 (hex)
of all bytes after it, which only older versions check: the store has one of its own. Integers are JSON in the metadata
of the safetensors part. Nothing is pickled, so bytes from the network cannot run code.
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
"""Features over which mean and variance are taken, roughly. They must follow a policy whose hidden states drift."""
CLIP = 10.0
"""Standard deviations. Values further out are outliers, and must not outweigh all the others."""
MIN_VARIANCE = 1e-12
"""A feature with less variance is constant and carries no information."""
LOGIT_RANGE = 60.0
"""Logits are clipped to it, so that ``exp`` cannot overflow; beyond it a sigmoid is as good as 0 or 1."""
MAX_WEIGHT = 1e6
"""Far above any trained one. Logits of any input are finite floats with such weights."""
SHAPES = ("hidden_weight", "hidden_bias", "out_weight", "out_bias")
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""The state that torch's Adam keeps for each parameter."""
_FIRST_LINE = re.compile(rb"darts-quality-head 1 [0-9a-f]{64}\n")

Single = NDArray[np.float32]
Floats = NDArray[np.float64]


def assemble_feature(hidden: NDArray[np.floating], position: int) -> Single | None:
    """Append the logarithm of its position to a hidden state; ``None`` if a value is not a finite float32.

    With the position as an input, one head serves all detection points, and also states that were taken some tokens
    past one. With a single detection point it is constant, and standardising removes it.
    """
    with np.errstate(over="ignore"):
        feature = np.append(hidden, np.log2(position)).astype(np.float32)
    return feature if np.isfinite(feature).all() else None


@dataclass(frozen=True, slots=True, eq=False)
class Standardiser:
    """Running mean and variance. Immutable: `after` returns the next one."""

    count: int
    mean: Floats
    variance: Floats

    @staticmethod
    def blank(width: int) -> "Standardiser":
        return Standardiser(0, np.zeros(width), np.zeros(width))

    def after(self, feature: Single) -> "Standardiser":
        """Add a feature: exactly for the first `MEMORY` ones; from then on, older ones lose weight exponentially."""
        count = min(self.count + 1, MEMORY)
        deviation = feature - self.mean
        mean = self.mean + deviation / count
        return Standardiser(count, mean, self.variance + (deviation * (feature - mean) - self.variance) / count)

    def apply(self, features: Single) -> Single:
        """Scale one feature, or rows of them, to mean 0 and variance 1."""
        spread = np.where(self.variance > MIN_VARIANCE, np.sqrt(self.variance), np.inf)
        scaled: Floats = (features - self.mean) / spread
        return np.clip(scaled, -CLIP, CLIP).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Immutable, so any thread may read it.

    ``arrays``: the weights of a network, and the optimiser's moments, by name; see `shapes`. They are never written to.
    ``steps``: training steps behind them.
    """

    arrays: Mapping[str, Single]
    standardiser: Standardiser
    steps: int

    def score(self, feature: Single) -> float:
        """Compute the score s' of a feature that `assemble_feature` returned: the sigmoid of the network's logit."""
        a = self.arrays
        hidden = np.maximum(a["hidden_weight"] @ self.standardiser.apply(feature) + a["hidden_bias"], 0)
        logit = float((a["out_weight"] @ hidden + a["out_bias"])[0])
        return float(1 / (1 + np.exp(-np.clip(logit, -LOGIT_RANGE, LOGIT_RANGE))))

    def to_bytes(self) -> bytes:
        """Serialize weights, optimiser and scale."""
        hidden, features = self.arrays["hidden_weight"].shape
        numbers = {"width": features - 1, "hidden": hidden, "steps": self.steps, "seen": self.standardiser.count}
        arrays = {**self.arrays, "mean": self.standardiser.mean, "variance": self.standardiser.variance}
        body = safetensors.save(
            {name: np.asarray(x, order="C") for name, x in arrays.items()},
            metadata={"numbers": json.dumps(numbers, sort_keys=True)},
        )
        return b"darts-quality-head 1 %s\n" % hashlib.sha256(body).hexdigest().encode() + body

    @staticmethod
    def from_bytes(data: bytes, width: int, hidden: int) -> "Snapshot":
        """Read what `to_bytes` returned.

        Raises:
            StateDamaged: `to_bytes` of this version did not make it.
            InvalidRequest: it is of a model or a head of another size.
        """
        line = _FIRST_LINE.match(data)
        if not line:
            raise StateDamaged("it does not begin like a quality head of format 1")
        body = data[line.end() :]
        try:
            # The header: JSON, after its length in eight bytes. The library's reader for bytes returns tensors only.
            header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
            numbers = json.loads(header["__metadata__"]["numbers"])
            steps, seen, *sizes = (int(numbers[name]) for name in ("steps", "seen", "width", "hidden"))
            arrays = safetensors.load(body)
        except (SafetensorError, OverflowError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StateDamaged(f"it cannot be read ({error!r})") from error
        if sizes != [width, hidden]:
            raise InvalidRequest(
                "state",
                f"is of a quality head with {sizes[0]} inputs and {sizes[1]} hidden units, this one has {width} and "
                f"{hidden}; restore it where the same model is served",
            )
        network, scale = shapes(width + 1, hidden), dict.fromkeys(("mean", "variance"), (width + 1,))
        if {name: x.shape for name, x in arrays.items()} != network | scale or min(steps, seen) < 0:
            raise StateDamaged("it has arrays of other shapes than its sizes say, or negative numbers")
        weights = {name: arrays[name].astype(np.float32) for name in network}
        mean, variance = (arrays[name].astype(np.float64) for name in scale)
        if not (are_finite(weights) and np.isfinite([mean, variance]).all() and (variance >= 0).all()):
            raise StateDamaged("it has values that are not finite, or negative variances")
        if any((np.abs(weights[name]) > MAX_WEIGHT).any() for name in SHAPES):
            raise StateDamaged(f"it has weights above {MAX_WEIGHT:g}")
        return Snapshot(weights, Standardiser(seen, mean, variance), steps)


def are_finite(arrays: Mapping[str, Single]) -> bool:
    return all(bool(np.isfinite(x).all()) for x in arrays.values())


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
