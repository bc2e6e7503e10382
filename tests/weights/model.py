"""A model that is a dictionary, and safetensors files to update it with."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from darts_server.exceptions import InvalidRequest
from darts_server.serving.gate import Gate
from darts_server.weights.lora_config import LoraLayers
from darts_server.weights.staging import Staging
from darts_server.weights.tensors import ExpectedTensors, FilePlan, TensorSet, read_tensors
from darts_server.weights.updates import Updates

SHAPES = {"embed_tokens.weight": (4, 2), "layers.0.weight": (2, 2), "layers.1.weight": (2, 2)}
TIED = {"lm_head.weight": "embed_tokens.weight"}


def tensors(value: float, **more: tuple[int, ...]) -> dict[str, np.ndarray]:
    """A full set of one value."""
    return {name: np.full(shape, value, np.float32) for name, shape in (SHAPES | more).items()}


def write(path: Path, value: float, *names: str) -> Path:
    """A file with these tensors, or with all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor for name, tensor in tensors(value).items() if not names or name in names}, path)
    return path


class FakeModel:
    """Implements :class:`darts_server.weights.port.Model`. ``calls``: the names of the methods that were called.

    ``fail``: what the calls of a method raise, in order; ``None`` for a call that succeeds. ``stuck``: methods that
    never return. ``during``: called when a method begins.
    """

    def __init__(self, folder: Path) -> None:
        self.weight_version = 0
        self.values: dict[str, float] = dict.fromkeys(SHAPES, 0.0)
        self.calls: list[str] = []
        self.fail: dict[str, list[Exception | None]] = {}
        self.stuck: set[str] = set()
        self.during: dict[str, Callable[[], object]] = {}
        self.running = False
        self.paused = False
        self.loras: FakeLoras | None = FakeLoras(self)
        self._checkpoint = write(folder / "checkpoint" / "model.safetensors", 0.0)

    async def expected_tensors(self) -> ExpectedTensors:
        return ExpectedTensors(
            {name: file.tensors[name] for name, file in (await self.checkpoint_tensors()).items()}, TIED
        )

    async def checkpoint_tensors(self) -> TensorSet:
        await self.step("checkpoint_tensors", recorded=False)
        return read_tensors(self._checkpoint, "checkpoint")

    async def pause(self) -> None:
        self.paused = True
        await self.step("pause")

    async def resume(self) -> None:
        await self.step("resume")
        self.paused = False

    async def abort_requests(self) -> None:
        await self.step("abort_requests")

    async def load(self, files: FilePlan) -> None:
        assert not self.running, "groups run while the model is written"
        assert sorted(name for _, names in files for name in names) == sorted(SHAPES)
        self.values = dict.fromkeys(SHAPES, -1.0)
        await self.step("load")
        for file, names in files:
            data = load_file(file.path)
            self.values |= {name: float(data[name].flat[0]) for name in names}

    async def abandon_update(self) -> None:
        await self.step("abandon_update")

    async def clear_caches(self) -> None:
        await self.step("clear_caches")

    async def set_version(self, version: int) -> None:
        await self.step("set_version")
        self.weight_version = version

    async def step(self, step: str, *, recorded: bool = True) -> None:
        if recorded:
            self.calls.append(step)
        if step in self.during:
            self.during[step]()
        if step in self.stuck:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if self.fail.get(step) and (error := self.fail[step].pop(0)) is not None:
            raise error


class FakeLoras:
    """Implements :class:`darts_server.weights.port.LoraEngine`. ``served``: scales by name."""

    def __init__(self, model: FakeModel) -> None:
        self.served: dict[str, float] = {}
        self._model = model

    async def layers(self) -> LoraLayers:
        await self._model.step("layers", recorded=False)
        return LoraLayers({"layers.0": (3, 2), "layers.1": (2, 2)}, 4)

    def check_name(self, name: str) -> None:
        if name == "model":
            raise InvalidRequest("name", "is the model itself")

    async def load(self, name: str, folder: Path) -> None:
        assert not self._model.running, "groups run while a LoRA adapter is loaded"
        self.served[name] = -1.0
        await self._model.step("load_lora")
        config = json.loads((folder / "adapter_config.json").read_text())
        first = next(iter(load_file(folder / "adapter_model.safetensors").values()))
        self.served[name] = float(first.flat[0]) * config["lora_alpha"] / config["r"]

    async def unload(self, name: str) -> None:
        await self._model.step("unload_lora")
        self.served.pop(name, None)


class FakeGroups:
    """Implements :class:`darts_server.weights.port.Groups`."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.halted = False
        self.changes = 0

    def prepare_weight_change(self) -> None:
        self.changes += 1

    async def suspend(self) -> None:
        self.halted = True

    def resume(self) -> None:
        self.halted = False

    def abort_all(self, reason: str) -> None:
        self.aborted.append(reason)


@pytest.fixture
def model(tmp_path: Path) -> FakeModel:
    return FakeModel(tmp_path)


@pytest.fixture
def updates(model: FakeModel, tmp_path: Path) -> Iterator[Updates]:
    """Updates of `model`, with files under the test's folder."""
    with Staging(tmp_path) as staging:
        yield Updates(model, Gate(), staging, tmp_path)
