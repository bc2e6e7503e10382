"""LoRA adapters as PEFT writes them, and the check that an adapter fits a model (Hu et al. 2021, arXiv:2106.09685)."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from darts_server.exceptions import InvalidRequest
from darts_server.weights.tensors import FLOAT_DTYPES, MAX_HEADER_BYTES, WIDEST_DTYPE_BYTES, TensorSet

MAX_CONFIG_BYTES = 1 << 16
"""PEFT's configurations have about 1,000 bytes."""
MAX_ALPHA = 1e9
PREFIX = "base_model.model."
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
IGNORED_KEYS = re.compile(
    "auto_mapping|base_model_name_or_path|corda_config|ensure_weight_tying|eva_config|exclude_modules|"
    "fan_in_fan_out|inference_mode|layers_pattern|layers_to_transform|loftq_config|lora_dropout|megatron_config|"
    "megatron_core|peft_version|qalora_group_size|revision|runtime_config|target_modules|task_type"
)
"""Keys of PEFT's configuration that do not change what an adapter computes from its tensors."""
ALLOWED_VALUES = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
"""Keys that change it, with the values under which an adapter computes W + scale * B A. Other initialisations change
W."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    rank: int
    alpha: float
    rslora: bool = False

    @property
    def scale(self) -> float:
        """Factor of ``B A``. With ``rslora`` as in Kalajdzievski 2023, arXiv:2312.03732."""
        if self.rslora:
            return self.alpha / math.sqrt(self.rank)
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class LoraLayers:
    """Layers that a LoRA adapter can change."""

    shapes: Mapping[str, tuple[int, int]]
    """(outputs, inputs) of the weights, by layer name."""
    max_rank: int

    @property
    def max_bytes(self) -> int:
        """Size of the largest adapter that fits, in any dtype."""
        return WIDEST_DTYPE_BYTES * self.max_rank * sum(map(sum, self.shapes.values())) + MAX_HEADER_BYTES


def parse_config(text: str | bytes, field: str) -> LoraConfig:
    """Parse PEFT's ``adapter_config.json``; ``r`` and ``lora_alpha`` are enough.

    Raises:
        InvalidRequest: about ``field``; names the key that is wrong or not supported.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, "is no JSON; send PEFT's adapter_config.json") from error
    if not isinstance(config, dict):
        raise InvalidRequest(field, "must be an object, such as PEFT's adapter_config.json")
    rank = config.pop("r", None)
    alpha = config.pop("lora_alpha", None)
    rslora = config.pop("use_rslora", False)
    if type(rank) is not int or rank < 1:
        raise InvalidRequest(field, "r must be a whole number, at least 1")
    # `not <` also refuses NaN.
    if type(alpha) not in (int, float) or not abs(alpha) < MAX_ALPHA:
        raise InvalidRequest(field, f"lora_alpha must be a number, below {MAX_ALPHA:g}")
    if type(rslora) is not bool:
        raise InvalidRequest(field, "use_rslora must be true or false")
    # The remaining keys must not change what the adapter computes.
    for key, value in config.items():
        allowed_values = ALLOWED_VALUES.get(key)
        if allowed_values is None:
            # PEFT also writes keys that are not set, as null, false or an empty object.
            if value and not IGNORED_KEYS.fullmatch(key):
                raise InvalidRequest(
                    field,
                    f"{key[:50]!r} is set, and such LoRA adapters are not supported; leave it out if the adapter is "
                    "W + scale * B A without it",
                )
        # Flags are compared by type too, because 1 == True, and PEFT does not write 1.
        elif not any(type(value) is type(allowed) and value == allowed for allowed in allowed_values):
            raise InvalidRequest(field, f"{key} is {str(value)[:50]!r}, and such LoRA adapters are not supported")
    return LoraConfig(rank, alpha, rslora)


def check_lora(
    layers: LoraLayers,
    config: LoraConfig,
    tensors: TensorSet,
    field: str,
) -> None:
    """Check that an adapter fits the model.

    Raises:
        InvalidRequest: about ``field``; names the first tensor that does not fit, or the rank.
    """
    if config.rank > layers.max_rank:
        raise InvalidRequest(
            field, f"r is {config.rank}, and the server takes {layers.max_rank} at most; see --max-lora-rank"
        )
    if not tensors:
        raise InvalidRequest(field, "has no tensor; send at least those of one layer")
    for name, file in tensors.items():
        # A layer has the tensors A [rank, inputs] and B [outputs, rank].
        suffix, other_suffix = (LORA_A, LORA_B) if name.endswith(LORA_A) else (LORA_B, LORA_A)
        layer = name.removesuffix(suffix).removeprefix(PREFIX)
        tensor = file.tensors[name]
        if name != f"{PREFIX}{layer}{suffix}":
            problem = f"tensor {name} is not of a LoRA adapter; its name must be {PREFIX}LAYER{LORA_A} or …{LORA_B}"
            raise InvalidRequest(field, problem)
        if layer not in layers.shapes:
            problem = f"tensor {name} is of no layer that takes LoRA adapters; leave it out, or correct its name"
            raise InvalidRequest(field, problem)

        outputs, inputs = layers.shapes[layer]
        shape = (config.rank, inputs) if suffix == LORA_A else (outputs, config.rank)
        if tensor.shape != shape or tensor.dtype not in FLOAT_DTYPES:
            requirement = f"must have floats and the shape {list(shape)} with r = {config.rank}"
            raise InvalidRequest(field, f"tensor {name} is {tensor}, and {requirement}")
        other_name = f"{PREFIX}{layer}{other_suffix}"
        if other_name not in tensors:
            raise InvalidRequest(field, f"tensor {other_name} is missing, and {name} is there; send both")


def dump_config(config: LoraConfig, tensors: TensorSet) -> str:
    """Return the ``adapter_config.json`` that the engine reads."""
    layer_names = sorted({name.removeprefix(PREFIX).removesuffix(LORA_A).removesuffix(LORA_B) for name in tensors})
    return json.dumps(
        {
            "peft_type": "LORA",
            "r": config.rank,
            "lora_alpha": config.alpha,
            "use_rslora": config.rslora,
            "target_modules": layer_names,
            "bias": "none",
        }
    )
