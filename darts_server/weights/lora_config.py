"""Low-rank adapters as PEFT writes them, and whether one fits a model (Hu et al. 2021, arXiv:2106.09685)."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from darts_server.exceptions import InvalidRequest
from darts_server.weights.tensors import FLOATS, LARGEST_HEADER, Tensor, TensorSet

LARGEST_CONFIG = 1 << 16
"""Bytes; PEFT's own has about a thousand."""
LARGEST_ALPHA = 1e9
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
"""Keys of PEFT's configuration that do not change what an adapter computes from its tensors."""
PLAIN = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal")}
"""Keys that do, with the values that leave it at W + scale * B A. The other ways to begin change W."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """``alpha`` and ``rslora``: what the scale is made of."""

    rank: int
    alpha: float
    rslora: bool = False

    @property
    def scale(self) -> float:
        """What ``B A`` is multiplied by. With ``rslora`` that of Kalajdzievski 2023, arXiv:2312.03732."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True, slots=True)
class LoraLayers:
    """What an adapter can change. ``shapes``: of the weights, (outputs, inputs), by the name of the layer."""

    shapes: Mapping[str, tuple[int, int]]
    max_rank: int

    @property
    def most_bytes(self) -> int:
        """No adapter that fits has more, in whichever dtype."""
        return 8 * self.max_rank * sum(map(sum, self.shapes.values())) + LARGEST_HEADER


def read_config(text: str | bytes, field: str) -> LoraConfig:
    """PEFT's ``adapter_config.json``; ``r`` and ``lora_alpha`` are enough.

    Raises:
        InvalidRequest: of ``field``; names the key that is wrong, or not taken here.
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
    if type(alpha) not in (int, float) or not abs(alpha) < LARGEST_ALPHA:  # NaN is not either
        raise InvalidRequest(field, f"lora_alpha must be a number, below {LARGEST_ALPHA:g}")
    if type(rslora) is not bool:
        raise InvalidRequest(field, "use_rslora must be true or false")
    for key, value in given.items():
        _check_key(key, value, field)
    return LoraConfig(rank, alpha, rslora)


def check(layers: LoraLayers, config: LoraConfig, given: TensorSet, field: str) -> None:
    """
    Raises:
        InvalidRequest: of ``field``; names the first tensor that does not fit, or the rank.
    """
    if config.rank > layers.max_rank:
        raise InvalidRequest(
            field, f"r is {config.rank}, and the server takes {layers.max_rank} at most; see --max-lora-rank"
        )
    if not given:
        raise InvalidRequest(field, "has no tensor; send at least those of one layer")
    for name, file in given.items():
        _check_tensor(layers, config.rank, name, file.tensors[name], field)
        twin = name.removesuffix(DOWN) + UP if name.endswith(DOWN) else name.removesuffix(UP) + DOWN
        if twin not in given:
            raise InvalidRequest(field, f"tensor {twin} is missing, and {name} is there; send both")


def written(config: LoraConfig, given: TensorSet) -> str:
    """``adapter_config.json`` of an adapter that was checked, with nothing in it that was not."""
    targets = sorted({name.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP) for name in given})
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


def _check_key(key: str, value: Any, field: str) -> None:
    if key in PLAIN:
        if not any(value is plain or (isinstance(value, str) and value == plain) for plain in PLAIN[key]):
            raise InvalidRequest(field, f"{key} is {str(value)[:50]!r}, and such adapters are not taken")
    elif key not in HARMLESS and value:
        raise InvalidRequest(
            field,
            f"{key[:50]!r} is set, and such adapters are not taken; leave it out if the adapter is W + scale * B A "
            "without it",
        )


def _check_tensor(layers: LoraLayers, rank: int, name: str, tensor: Tensor, field: str) -> None:
    layer = name.removesuffix(DOWN if name.endswith(DOWN) else UP).removeprefix(PREFIX)
    if name not in (f"{PREFIX}{layer}{DOWN}", f"{PREFIX}{layer}{UP}"):
        raise InvalidRequest(field, f"tensor {name} is not one of an adapter's, {PREFIX}LAYER{DOWN} or …{UP}")
    if layer not in layers.shapes:
        raise InvalidRequest(field, f"tensor {name} is of no layer that takes adapters; leave it out, or correct it")
    outputs, inputs = layers.shapes[layer]
    wanted = (rank, inputs) if name.endswith(DOWN) else (outputs, rank)
    if tensor.shape != wanted or tensor.dtype not in FLOATS:
        raise InvalidRequest(
            field, f"tensor {name} is {tensor}, and must have floats and the shape {list(wanted)} with r = {rank}"
        )
