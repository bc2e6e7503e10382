"""The weights room on a fake model."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from safetensors.numpy import save

from darts_server.serving.gate import Gate
from darts_server.weights.coordinator import UpdateSettings
from darts_server.weights.staging import Staging
from darts_server.weights.states import State
from darts_server.weights.updates import UpdateOptions, Updates
from tests.weights.model import SHAPES, FakeGroups, FakeModel, Heard, tensors

HASTY = UpdateSettings(step=2.0)
"""Far more than a step takes on a busy machine."""


class House:
    """The room on a fake model."""

    def __init__(self, folder: Path, limits: UpdateSettings | None = None) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        self.model = FakeModel(folder)
        self.heard = Heard(self.model)
        self.gate = Gate()
        self.groups = FakeGroups()
        self.staging = Staging(folder)
        self.updates = Updates(self.model, self.gate, self.staging, self.root, limits, [self.heard], self.groups)
        self.trainer = Trainer(self)

    async def push(self, value: float, *names: str, wish: UpdateOptions | None = None) -> None:
        data = {n: t for n, t in tensors(value).items() if not names or n in names}
        await self.push_bytes(save(data), wish or UpdateOptions(partial=bool(names)))

    async def push_bytes(self, data: bytes, wish: UpdateOptions) -> None:
        async def body(limit: int) -> AsyncIterator[bytes]:
            assert len(data) <= limit
            yield data

        await self.updates.push(body, wish)

    def serves(self, version: int, **values: float) -> None:
        """All is well, with this version; ``values``: by the last part but one of the tensors' names, or ``all``."""
        assert self.updates.state is State.SERVING
        assert self.updates.version == self.model.weight_version == version
        wanted = {name: values.get(name.split(".")[-2], values.get("all")) for name in SHAPES}
        wanted |= {f"layers.{n}.weight": values[f"layer{n}"] for n in (0, 1) if f"layer{n}" in values}
        assert self.model.values == wanted
        assert self.gate.inside == 0
        self.gate.let_in()
        self.gate.leave()
        assert not self.model.stands or self.updates.coordinator.held


class Trainer:
    """One that uses vLLM's routes, on an engine that does what it is told. Its steps are among the model's calls."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._external = house.updates.external

    async def start(self) -> None:
        await self._external.start(lambda: self._house.model.step("start"))

    async def write(self, names: Sequence[str] = ()) -> None:
        await self._external.write(lambda: self._house.model.step("write"), names)

    async def finish(self) -> None:
        async def finished(version: int) -> None:
            await self._house.model.step("finish")
            self._house.model.weight_version = version

        await self._external.finish(finished)

    async def update(self, names: Sequence[str] = ()) -> None:
        await self.start()
        await self.write(names)
        await self.finish()

    async def pause(self, mode: str) -> None:
        await self._house.updates.coordinator.hold(mode, lambda: self._house.model.step(f"trainer's pause {mode}"))

    async def resume(self) -> None:
        await self._house.updates.coordinator.release(lambda: self._house.model.step("trainer's resume"))


async def until(house: House, state: State) -> None:
    while house.updates.state is not state:
        await asyncio.sleep(0.001)


async def enter(gate: Gate) -> None:
    async with gate.held():
        pass
