"""The weights room with a fake model."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from darts_server.observers import UpdateEvents
from darts_server.records import UpdateRecord
from darts_server.serving.gate import Gate
from darts_server.weights.coordinator import KV_CACHE, State
from darts_server.weights.port import UpdateSettings
from darts_server.weights.staging import Staging
from darts_server.weights.updates import Updates
from tests.weights.model import SHAPES, FakeGroups, FakeModel, tensors

SHORT_TIMEOUT = UpdateSettings(step_timeout=1.0)
"""Far more than a phase takes on a busy machine."""


class Harness:
    """Updates of a fake model, with all objects that take part in them."""

    def __init__(self, folder: Path, settings: UpdateSettings | None = None) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        self.model = FakeModel(folder)
        self.records: list[UpdateRecord] = []
        events = UpdateEvents()
        events.announced.add(lambda version: self.model.calls.append(f"announced {version}"))
        events.ended.add(lambda record: self.model.calls.append(f"ended {record.outcome}"), self.records.append)
        self.gate = Gate()
        self.groups = FakeGroups()
        self.staging = Staging(folder)
        self.updates = Updates(self.model, self.gate, self.staging, self.root, settings, events, self.groups)
        self.trainer = Trainer(self)

    async def push(self, value: float, *names: str, **options: Any) -> None:
        data = {n: t for n, t in tensors(value).items() if not names or n in names}
        await self.push_bytes(save(data), partial=bool(names), **options)

    async def push_bytes(self, data: bytes, **options: Any) -> None:
        async def body(limit: int) -> AsyncIterator[bytes]:
            assert len(data) <= limit
            yield data

        await self.updates.push(body, **options)

    def check_serves(self, version: int, **values: float) -> None:
        """Check that this version is served. ``values``: by the last but one part of tensor names, or ``all``."""
        assert self.updates.coordinator.state is State.SERVING
        assert self.updates.coordinator.version == self.model.weight_version == version
        expected = {name: values.get(name.split(".")[-2], values.get("all")) for name in SHAPES}
        expected |= {f"layers.{n}.weight": values[f"layer{n}"] for n in (0, 1) if f"layer{n}" in values}
        assert self.model.values == expected
        assert self.gate.work_inside == 0
        self.gate.let_in()
        self.gate.leave()
        assert not self.model.paused or self.updates.coordinator.paused_by_trainer


class Trainer:
    """A trainer that uses vLLM's routes. Its steps are recorded among the model's calls."""

    def __init__(self, harness: Harness) -> None:
        self._model = harness.model
        self._external = harness.updates.external
        self._coordinator = harness.updates.coordinator

    def _step(self, name: str) -> Callable[[], Awaitable[None]]:
        return lambda: self._model.step(name)

    async def start(self) -> None:
        await self._external.start(self._step("start"))

    async def write(self, names: Sequence[str] = ()) -> None:
        await self._external.write(self._step("write"), names)

    async def finish(self) -> None:
        async def finish(version: int) -> None:
            await self._model.step("finish")
            self._model.weight_version = version

        await self._external.finish(finish)

    async def update(self, names: Sequence[str] = ()) -> None:
        await self.start()
        await self.write(names)
        await self.finish()

    async def pause(self, mode: str) -> None:
        await self._coordinator.pause_by_trainer(mode, self._step(f"trainer's pause {mode}"))

    async def resume(self) -> None:
        await self._coordinator.resume_by_trainer(self._step("trainer's resume"))

    async def sleep(self, mode: str = "abort", *, frees_memory: bool = True) -> None:
        await self._coordinator.sleep_by_trainer(mode, self._step("sleep"), frees_memory=frees_memory)

    async def wake_up(self, *parts: str) -> None:
        await self._coordinator.wake_up_by_trainer(self._step("wake up"), parts or None)

    async def free_cache(self) -> None:
        await self._coordinator.free_by_trainer(KV_CACHE, self._step("free cache"))

    async def abort(self, *, everything: bool = True) -> None:
        await self._coordinator.abort_by_trainer(self._step("abort"), everything=everything)


async def until(harness: Harness, state: State) -> None:
    while harness.updates.coordinator.state is not state:
        await asyncio.sleep(0.001)


async def enter(gate: Gate) -> None:
    async with gate.enter():
        pass
