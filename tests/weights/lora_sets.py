"""LoRA adapters for the model of :mod:`tests.weights.model`."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from darts_server.files import Stamp
from darts_server.weights.lora_config import LoraLayers
from darts_server.weights.tensors import Tensor, TensorFile, TensorSet
from tests.weights.harness import Harness

LAYERS = LoraLayers({"layers.0": (3, 2), "layers.1": (2, 2)}, 4)
CONFIG = json.dumps({"r": 2, "lora_alpha": 2})
BASE = "base_model.model."


def tensors_of(*layers: str, rank: int = 2, dtype: str = "F32") -> TensorSet:
    """Headers of these layers' tensors, in a file that does not exist."""
    shapes = {}
    for layer in layers:
        outputs, inputs = LAYERS.shapes.get(layer, (2, 2))
        shapes[f"{BASE}{layer}.lora_A.weight"] = Tensor((rank, inputs), dtype)
        shapes[f"{BASE}{layer}.lora_B.weight"] = Tensor((outputs, rank), dtype)
    file = TensorFile(Path("nowhere"), shapes, Stamp("nowhere", 0, 0, 0, 0))
    return dict.fromkeys(shapes, file)


def bytes_of(value: float, *layers: str) -> bytes:
    """A file with matrices of one value."""
    headers = tensors_of(*(layers or ("layers.0",)))
    return save({name: np.full(file.tensors[name].shape, value, np.float32) for name, file in headers.items()})


def save_to(folder: Path, value: float) -> Path:
    """Write a folder as PEFT does."""
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(bytes_of(value))
    (folder / "adapter_config.json").write_text(CONFIG)
    return folder


async def push(harness: Harness, value: float | bytes, name: str = "a", config: str = CONFIG, **more: Any) -> None:
    data = value if isinstance(value, bytes) else bytes_of(value)

    async def body(limit: int) -> AsyncIterator[bytes]:
        assert len(data) <= limit
        yield data

    await harness.updates.loras.push(name, config, body, **more)
