"""LoRA adapters of the served model: pushed, replaced and removed, one at a time."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from anyio.to_thread import run_sync

from darts_server.exceptions import Forbidden, InvalidRequest, NotFound
from darts_server.records import UpdateRecord
from darts_server.weights.coordinator import Coordinator
from darts_server.weights.lora_config import LoraConfig, LoraLayers, check_lora, dump_config, parse_config
from darts_server.weights.lora_files import CONFIG, TENSORS, LoraFiles, read_config, stream_tensors
from darts_server.weights.phases import Update
from darts_server.weights.port import LoraEngine
from darts_server.weights.roots import resolve_path
from darts_server.weights.rules import Rule
from darts_server.weights.staged import StagedUpdates
from darts_server.weights.staging import Staging
from darts_server.weights.tensors import read_tensors
from darts_server.weights.transaction import TransactionRunner


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """A LoRA adapter that is served. ``version``: of the update that brought it."""

    version: int
    config: LoraConfig
    folder: Path


Fetched = tuple[LoraConfig, Path]
"""The configuration, and the folder with the tensors."""


class Loras:
    """Updates the LoRA adapters of the model. ``served``: the pushed ones, by name.

    Args:
        engine: ``None`` for a server that was started without LoRA.
        root: folder that callers may name paths in; ``None`` to allow none.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        transactions: TransactionRunner,
        staged: StagedUpdates,
        engine: LoraEngine | None,
        staging: Staging,
        root: Path | None,
    ) -> None:
        self.coordinator = coordinator
        self.files = LoraFiles(staging)
        self.served: dict[str, LoadedLora] = {}
        self.staged = staged
        self._transactions = transactions
        self._engine = engine
        self._root = root

    async def push(
        self,
        name: str,
        config: str,
        body: Callable[[int], AsyncIterator[bytes]],
        rule: Rule | None = None,
        version: int | None = None,
        stage_seconds: float | None = None,
    ) -> UpdateRecord | None:
        """Serve a LoRA adapter: PEFT's configuration, and the bytes of a safetensors file.

        ``body`` is called with the largest number of bytes that it may yield. ``stage_seconds``: see `UpdateOptions`;
        returns ``None`` if the adapter is only staged.

        Raises:
            Forbidden: the server was started without LoRA.
            InvalidRequest: the adapter is bad; nothing was changed.
            UpdateError: the previous adapter is served.
            WeightsLost
        """

        async def fetch(layers: LoraLayers) -> Fetched:
            parsed = parse_config(config, "config")
            return parsed, await self.files.write(body(layers.max_bytes))

        return await self._put("push", name, fetch, "body", rule, version, stage_seconds=stage_seconds)

    async def load(
        self,
        name: str,
        path: str,
        rule: Rule | None = None,
        version: int | None = None,
        when_staged: Callable[[], Awaitable[None]] | None = None,
        stage_seconds: float | None = None,
    ) -> UpdateRecord | None:
        """Serve a LoRA adapter from a copy of a folder under the root, as PEFT saves it.

        ``when_staged``: see `Update`. ``stage_seconds``: as for `push`.

        Raises:
            Forbidden: the server was started without LoRA, or there is no root.
            InvalidRequest: the path or the adapter is bad; nothing was changed.
            UpdateError: the previous adapter is served.
            WeightsLost
        """

        async def fetch(layers: LoraLayers) -> Fetched:
            folder, root = await run_sync(resolve_path, self._root, path)
            config = await run_sync(read_config, folder, root)
            return config, await self.files.write(stream_tensors(folder, root, layers.max_bytes))

        return await self._put("disk", name, fetch, "path", rule, version, when_staged, stage_seconds)

    async def remove(self, name: str) -> UpdateRecord:
        """Stop serving a LoRA adapter, when no running request uses it.

        Raises:
            NotFound
            UpdateError: it is still served.
            WeightsLost
        """
        engine = self._require_lora()
        if name not in self.served:
            raise NotFound("name", f"no LoRA adapter {name!r} was pushed; GET /darts/v1/weights lists the pushed ones")
        # Requests cannot continue without the adapter, so no other rule is possible.
        update = Update("delete", Rule.FINISH, lora=name, timeout=self.coordinator.settings.step_timeout)
        return await self._transactions.run(update, None, _LoraRemoval(self, engine, name))

    def clean_up(self) -> None:
        """Remove the files of adapters that are neither served nor staged."""
        self.files.keep_only({name: lora.folder for name, lora in self.served.items()}, self.staged.files)

    async def _put(
        self,
        source: str,
        name: str,
        fetch: Callable[[LoraLayers], Awaitable[Fetched]],
        field: str,
        rule: Rule | None,
        version: int | None,
        when_staged: Callable[[], Awaitable[None]] | None = None,
        stage_seconds: float | None = None,
    ) -> UpdateRecord | None:
        engine = self._require_lora()
        engine.check_name(name)
        settings = self.coordinator.settings
        update = Update(
            source, rule or settings.rule, lora=name, timeout=settings.step_timeout, when_staged=when_staged
        )
        transaction = _LoraUpdate(self, engine, name, fetch, field)
        if stage_seconds is not None:
            await self.staged.stage(update, version, transaction, stage_seconds)
            return None
        return await self._transactions.run(update, version, transaction)

    def _require_lora(self) -> LoraEngine:
        if self._engine is None:
            raise Forbidden("this server's model takes no LoRA adapters; start it with --enable-lora")
        return self._engine


class _LoraUpdate:
    """Implements :class:`darts_server.weights.transaction.StageableTransaction`: adds or replaces a LoRA adapter."""

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

    @property
    def files(self) -> set[Path]:
        return {self._new.folder}

    async def stage(self, update: Update) -> None:
        layers = await self._engine.layers()
        config, folder = await update.run_phase("transfer", lambda: self._fetch(layers))

        def check() -> None:
            tensors = read_tensors(folder / TENSORS, self._field)
            check_lora(layers, config, tensors, self._field)
            (folder / CONFIG).write_text(dump_config(config, tensors))

        await update.run_phase("check", lambda: run_sync(check))
        self._new = LoadedLora(self._loras.coordinator.target, config, folder)

    async def check_again(self) -> None:
        self._engine.check_name(self._name)
        self._new = replace(self._new, version=self._loras.coordinator.target)

    async def reversal(self) -> "_LoraUpdate":
        raise InvalidRequest(
            "keep_previous", "is for the model itself; leave it out, and push the earlier adapter again"
        )

    async def apply(self, update: Update) -> None:
        await self._load(update, "load", self._new)

    async def roll_back(self, update: Update) -> None:
        if self._old is not None:
            await self._load(update, "restore", self._old)
        else:
            await update.run_phase("restore", lambda: self._engine.unload(self._name))

    def commit(self) -> None:
        self._loras.served[self._name] = self._new

    def clean_up(self) -> None:
        self._loras.clean_up()

    def discard(self) -> None:
        self._loras.files.remove(self._new.folder)

    async def _load(self, update: Update, phase: str, lora: LoadedLora) -> None:
        link = self._loras.files.link(self._name, lora.folder)
        await update.run_phase(phase, lambda: self._engine.load(self._name, link))


class _LoraRemoval:
    """Implements :class:`darts_server.weights.transaction.Transaction`: removes a LoRA adapter."""

    def __init__(self, loras: Loras, engine: LoraEngine, name: str) -> None:
        self._loras = loras
        self._engine = engine
        self._name = name

    async def stage(self, update: Update) -> None:
        """There is nothing to fetch."""

    async def apply(self, update: Update) -> None:
        await update.run_phase("load", lambda: self._engine.unload(self._name))

    async def roll_back(self, update: Update) -> None:
        link = self._loras.files.link(self._name, self._loras.served[self._name].folder)
        await update.run_phase("restore", lambda: self._engine.load(self._name, link))

    def commit(self) -> None:
        del self._loras.served[self._name]

    def clean_up(self) -> None:
        self._loras.clean_up()
