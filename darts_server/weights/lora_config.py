"""LoRA adapters as PEFT writes them, and whether one fits a model (Hu et al. 2021, arXiv:2106.09685)."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from darts_server.exceptions import InvalidRequest
from darts_server.weights.tensors import FLOAT_DTYPES, MAX_HEADER_BYTES, TensorSet

MAX_CONFIG_BYTES = 1 << 16
"""PEFT's own configurations have about a thousand."""
MAX_ALPHA = 1e9
PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
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
"""Keys that do, with the values that leave it at W + scale * B A. The other initialisations change W."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Rank and scale of a LoRA adapter."""

    rank: int
    alpha: float
    rslora: bool = False

    @property
    def scale(self) -> float:
        """Factor of ``B A``. With ``rslora`` that of Kalajdzievski 2023, arXiv:2312.03732."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True, slots=True)
class LoraLayers:
    """Layers that a LoRA adapter can change. ``shapes``: (outputs, inputs) of the weights, by layer name."""

    shapes: Mapping[str, tuple[int, int]]
    max_rank: int

    @property
    def max_bytes(self) -> int:
        """Size of the largest adapter that fits, in any dtype."""
        return 8 * self.max_rank * sum(map(sum, self.shapes.values())) + MAX_HEADER_BYTES


def parse_config(text: str | bytes, field: str) -> LoraConfig:
    """Parse PEFT's ``adapter_config.json``; ``r`` and ``lora_alpha`` are enough.

    Raises:
        InvalidRequest: of ``field``; names the key that is wrong or not supported.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, "is no JSON; send PEFT's adapter_config.json") from error
    if not isinstance(given, dict):
        raise InvalidRequest(field, "must be an object, such as PEFT's adapter_config.json")
    rank, alpha, rslora = given.pop("r", None), given.pop("lora_alpha", None), given.pop("use_rslora", False)
    if type(rank) is not int or rank < 1:
        raise InvalidRequest(field, "r must be a whole number, at least 1")
    if type(alpha) not in (int, float) or not abs(alpha) < MAX_ALPHA:  # NaN is not either
        raise InvalidRequest(field, f"lora_alpha must be a number, below {MAX_ALPHA:g}")
    if type(rslora) is not bool:
        raise InvalidRequest(field, "use_rslora must be true or false")
    for key, value in given.items():
        if key not in ALLOWED_VALUES:
            if not IGNORED_KEYS.fullmatch(key) and value:
                raise InvalidRequest(
                    field,
                    f"{key[:50]!r} is set, and such LoRA adapters are not supported; leave it out if the adapter is "
                    "W + scale * B A without it",
                )
        # Flags are compared by identity: 1 == True, and PEFT does not write 1.
        elif not any(value is each or (isinstance(value, str) and value == each) for each in ALLOWED_VALUES[key]):
            raise InvalidRequest(field, f"{key} is {str(value)[:50]!r}, and such LoRA adapters are not supported")
    return LoraConfig(rank, alpha, rslora)


def check_lora(layers: LoraLayers, config: LoraConfig, tensors: TensorSet, field: str) -> None:
    """Check that an adapter fits the model.

    Raises:
        InvalidRequest: of ``field``; names the first tensor that does not fit, or the rank.
    """
    if config.rank > layers.max_rank:
        raise InvalidRequest(
            field, f"r is {config.rank}, and the server takes {layers.max_rank} at most; see --max-lora-rank"
        )
    if not tensors:
        raise InvalidRequest(field, "has no tensor; send at least those of one layer")
    for name, file in tensors.items():
        suffix, other_suffix = (LORA_A, LORA_B) if name.endswith(LORA_A) else (LORA_B, LORA_A)
        layer, tensor = name.removesuffix(suffix).removeprefix(PREFIX), file.tensors[name]
        if name != f"{PREFIX}{layer}{suffix}":
            problem = f"tensor {name} is not one of a LoRA adapter's, {PREFIX}LAYER{LORA_A} or …{LORA_B}"
            raise InvalidRequest(field, problem)
        if layer not in layers.shapes:
            problem = f"tensor {name} is of no layer that takes LoRA adapters; leave it out, or correct its name"
            raise InvalidRequest(field, problem)
        outputs, inputs = layers.shapes[layer]
        shape = (config.rank, inputs) if suffix == LORA_A else (outputs, config.rank)
        if tensor.shape != shape or tensor.dtype not in FLOAT_DTYPES:
            must = f"must have floats and the shape {list(shape)} with r = {config.rank}"
            raise InvalidRequest(field, f"tensor {name} is {tensor}, and {must}")
        if (other := f"{PREFIX}{layer}{other_suffix}") not in tensors:
            raise InvalidRequest(field, f"tensor {other} is missing, and {name} is there; send both")


def dump_config(config: LoraConfig, tensors: TensorSet) -> str:
    """Write ``adapter_config.json`` for the engine, with nothing in it that was not checked."""
    targets = sorted({name.removeprefix(PREFIX).removesuffix(LORA_A).removesuffix(LORA_B) for name in tensors})
    return json.dumps(
        {
            "peft_type": "LORA",
            "r": config.rank,
            "lora_alpha": config.alpha,
            "use_rslora": config.rslora,
            "target_modules": targets,
            "bias": "none",
        }
    )
