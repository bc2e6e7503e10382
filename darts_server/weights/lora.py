"""Low-rank adapters of a running engine's model: pushed, replaced and removed, one at a time."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from anyio.to_thread import run_sync

from darts_server.exceptions import Forbidden, NotFound
from darts_server.types import UpdateRecord
from darts_server.weights.change import Changes
from darts_server.weights.coordinator import Coordinator, Rule, Update
from darts_server.weights.lora_config import LoraConfig, LoraLayers, check, read_config, written
from darts_server.weights.lora_files import CONFIG, TENSORS, LoraFiles, config_in, tensors_in
from darts_server.weights.port import LoraEngine
from darts_server.weights.roots import allowed
from darts_server.weights.staging import Staging
from darts_server.weights.tensors import read


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """One that is served. ``version``: of the update that it came with."""

    version: int
    config: LoraConfig
    folder: Path


Fetched = tuple[LoraConfig, Path]
"""The configuration, and the folder that the tensors are in."""


class Loras:
    """Gives the model adapters. Those that are served are in ``served``, by name.

    Args:
        engine: ``None`` for a model that was started without.
        root: folder that callers may name folders in; ``None`` for none.
    """

    def __init__(
        self, coordinator: Coordinator, changes: Changes, engine: LoraEngine | None, staging: Staging, root: Path | None
    ) -> None:
        self.coordinator = coordinator
        self.files = LoraFiles(staging)
        self.served: dict[str, LoadedLora] = {}
        self._changes = changes
        self._engine = engine
        self._root = root

    async def push(
        self,
        name: str,
        config: str,
        body: Callable[[int], AsyncIterator[bytes]],
        rule: Rule | None = None,
        version: int | None = None,
    ) -> UpdateRecord:
        """An adapter as PEFT's configuration and the bytes of a safetensors file. ``body`` is told how many may come.

        Raises:
            Forbidden: the server was started without adapters.
            InvalidRequest: it is bad; nothing was changed.
            UpdateError: the old one is served.
            WeightsLost
        """

        async def fetch(layers: LoraLayers) -> Fetched:
            known = read_config(config, "config")
            return known, await self.files.take(body(layers.most_bytes))

        return await self._put("push", name, fetch, "body", rule, version)

    async def load(self, name: str, path: str, rule: Rule | None = None, version: int | None = None) -> UpdateRecord:
        """An adapter from a folder under the root, as PEFT saves it. A copy is taken.

        Raises:
            Forbidden: the server was started without adapters, or there is no root.
            InvalidRequest: it is bad; nothing was changed.
            UpdateError: the old one is served.
            WeightsLost
        """

        async def fetch(layers: LoraLayers) -> Fetched:
            folder = await run_sync(allowed, self._root, path)
            known = await run_sync(config_in, folder)
            return known, await self.files.take(tensors_in(folder, layers.most_bytes))

        return await self._put("disk", name, fetch, "path", rule, version)

    async def remove(self, name: str) -> UpdateRecord:
        """Serve it no more, when nothing uses it any more.

        Raises:
            NotFound
            UpdateError: it is served as before.
            WeightsLost
        """
        engine = self._require_lora()
        if name not in self.served:
            raise NotFound("name", f"no adapter {name!r} was pushed; GET /darts/v1/weights tells those that were")
        # Nothing could go on without it, so the rule is always the same.
        update = Update("delete", Rule.FINISH, lora=name)
        return await self._changes.make(update, None, _Removal(self, engine, name))

    async def _put(
        self,
        source: str,
        name: str,
        fetch: Callable[[LoraLayers], Awaitable[Fetched]],
        field: str,
        rule: Rule | None,
        version: int | None,
    ) -> UpdateRecord:
        engine = self._require_lora()
        engine.check_name(name)
        update = Update(source, rule or self.coordinator.limits.rule, lora=name)
        return await self._changes.make(update, version, _Arrival(self, engine, name, fetch, field))

    def _require_lora(self) -> LoraEngine:
        if self._engine is None:
            raise Forbidden("this server's model takes no adapters; start it with --enable-lora")
        return self._engine

    def tidy(self) -> None:
        """Remove the files of those that are not served."""
        self.files.keep_only({name: adapter.folder for name, adapter in self.served.items()})


class _Arrival:
    """Implements :class:`darts_server.weights.change.Change`: an adapter, new or in place of the one before."""

    def __init__(
        self,
        loras: Loras,
        engine: LoraEngine,
        name: str,
        fetch: Callable[[LoraLayers], Awaitable[Fetched]],
        field: str,
    ) -> None:
        self._loras = loras
        self._engine = engine
        self._name = name
        self._fetch = fetch
        self._field = field
        self._old = loras.served.get(name)
        self._new: LoadedLora

    async def stage(self, update: Update) -> None:
        step = self._loras.coordinator.step
        layers = await self._engine.layers()
        config, folder = await step(update, "transfer", lambda: self._fetch(layers))

        def checked() -> None:
            given = read(folder / TENSORS, self._field)
            check(layers, config, given, self._field)
            (folder / CONFIG).write_text(written(config, given))

        await step(update, "check", lambda: run_sync(checked))
        self._new = LoadedLora(self._loras.coordinator.target, config, folder)

    async def write(self, update: Update) -> None:
        await self._serve(update, "load", self._new)

    async def put_back(self, update: Update) -> None:
        if self._old is not None:
            await self._serve(update, "restore", self._old)
        else:
            await self._loras.coordinator.step(update, "restore", lambda: self._engine.remove(self._name))

    async def _serve(self, update: Update, phase: str, adapter: LoadedLora) -> None:
        link = self._loras.files.lead(self._name, adapter.folder)
        await self._loras.coordinator.step(update, phase, lambda: self._engine.put(self._name, link))

    def took(self) -> None:
        self._loras.served[self._name] = self._new

    def tidy(self) -> None:
        self._loras.tidy()


class _Removal:
    """Implements :class:`darts_server.weights.change.Change`: an adapter goes."""

    def __init__(self, loras: Loras, engine: LoraEngine, name: str) -> None:
        self._loras = loras
        self._engine = engine
        self._name = name

    async def stage(self, update: Update) -> None:
        """There is nothing to fetch."""

    async def write(self, update: Update) -> None:
        await self._loras.coordinator.step(update, "load", lambda: self._engine.remove(self._name))

    async def put_back(self, update: Update) -> None:
        link = self._loras.files.lead(self._name, self._loras.served[self._name].folder)
        await self._loras.coordinator.step(update, "restore", lambda: self._engine.put(self._name, link))

    def took(self) -> None:
        del self._loras.served[self._name]

    def tidy(self) -> None:
        self._loras.tidy()
