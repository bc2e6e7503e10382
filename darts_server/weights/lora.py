"""LoRA adapters of the served model: pushed, replaced and removed, one at a time.

The engine may read an adapter's files at any time, also for requests that began with a previous adapter of that name
(vLLM evicts adapters above ``--max-loras`` and loads them again). So each name has a path that stays: a symbolic link.
"""

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from anyio.to_thread import run_sync

from darts_server.exceptions import Forbidden, InvalidRequest, NotFound
from darts_server.files import open_file, read_file
from darts_server.records import UpdateRecord
from darts_server.weights.coordinator import Coordinator
from darts_server.weights.lora_config import (
    MAX_CONFIG_BYTES,
    LoraConfig,
    LoraLayers,
    check_lora,
    dump_config,
    parse_config,
)
from darts_server.weights.port import LoraEngine, Rule, Update
from darts_server.weights.staging import BUFFER_BYTES, Staging
from darts_server.weights.tensors import read_tensors, resolve_path

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's names of the files."""
FIELD = "path"
FOLDER_SUFFIX, LINK_PREFIX = ".lora", "lora-"


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
        engine: LoraEngine | None,
        staging: Staging,
        root: Path | None,
    ) -> None:
        self.coordinator = coordinator
        self.staging = staging
        self.served: dict[str, LoadedLora] = {}
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
        """Serve a LoRA adapter: PEFT's configuration, and the bytes of a safetensors file.

        ``body`` is called with the largest number of bytes that it may yield.

        Raises:
            Forbidden: the server was started without LoRA.
            InvalidRequest: the adapter is bad; nothing was changed.
            UpdateError: the previous adapter is served.
            WeightsLost
        """

        async def fetch(layers: LoraLayers) -> Fetched:
            parsed = parse_config(config, "config")
            return parsed, await self.write_tensors(body(layers.max_bytes))

        update = Update("push", rule or self.coordinator.settings.rule, lora=name)
        return await self._put(update, version, name, fetch, "body")

    async def load(
        self,
        name: str,
        path: str,
        rule: Rule | None = None,
        version: int | None = None,
        when_staged: Callable[[], Awaitable[None]] | None = None,
    ) -> UpdateRecord:
        """Serve a LoRA adapter from a copy of a folder under the root, as PEFT saves it.

        ``when_staged``: see `Update`.

        Raises:
            Forbidden: the server was started without LoRA, or there is no root.
            InvalidRequest: the path or the adapter is bad; nothing was changed.
            UpdateError: the previous adapter is served.
            WeightsLost
        """

        async def fetch(layers: LoraLayers) -> Fetched:
            folder, root = await run_sync(resolve_path, self._root, path)
            config = await run_sync(read_config, folder, root)
            return config, await self.write_tensors(stream_tensors(folder, root, layers.max_bytes))

        update = Update("disk", rule or self.coordinator.settings.rule, lora=name, when_staged=when_staged)
        return await self._put(update, version, name, fetch, "path")

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
        update = Update("delete", Rule.FINISH, lora=name)
        return await self.coordinator.run(update, None, _LoraUpdate(self, engine, name, None, "name"))

    async def write_tensors(self, chunks: AsyncIterator[bytes]) -> Path:
        """Write these bytes as the tensors of a new adapter. Returns its folder.

        Raises:
            DiskFull
        """
        path = await self.staging.write(chunks)
        folder = path.with_suffix(FOLDER_SUFFIX)
        folder.mkdir()
        path.rename(folder / TENSORS)
        return folder

    async def _put(
        self,
        update: Update,
        version: int | None,
        name: str,
        fetch: Callable[[LoraLayers], Awaitable[Fetched]],
        field: str,
    ) -> UpdateRecord:
        engine = self._require_lora()
        engine.check_name(name)
        return await self.coordinator.run(update, version, _LoraUpdate(self, engine, name, fetch, field))

    def _require_lora(self) -> LoraEngine:
        if self._engine is None:
            raise Forbidden("this server's model takes no LoRA adapters; start it with --enable-lora")
        return self._engine


class _LoraUpdate:
    """Implements :class:`darts_server.weights.port.Transaction`: adds, replaces or removes a LoRA adapter.

    ``fetch``: fetches what is to be served; ``None`` to serve no adapter of that name any more.
    """

    def __init__(
        self,
        loras: Loras,
        engine: LoraEngine,
        name: str,
        fetch: Callable[[LoraLayers], Awaitable[Fetched]] | None,
        field: str,
    ) -> None:
        self._loras = loras
        self._engine = engine
        self._name = name
        self._fetch = fetch
        self._field = field
        self._old = loras.served.get(name)
        self._new: LoadedLora | None = None

    async def stage(self, update: Update) -> None:
        if (fetch := self._fetch) is None:
            return
        layers = await self._engine.layers()
        config, folder = await update.run_phase("transfer", lambda: fetch(layers))

        def check() -> None:
            tensors = read_tensors(folder / TENSORS, self._field)
            check_lora(layers, config, tensors, self._field)
            (folder / CONFIG).write_text(dump_config(config, tensors))

        await update.run_phase("check", lambda: run_sync(check))
        self._new = LoadedLora(self._loras.coordinator.target, config, folder)

    async def apply(self, update: Update) -> None:
        await self._serve(update, "load", self._new)

    async def roll_back(self, update: Update) -> None:
        await self._serve(update, "restore", self._old)

    def commit(self) -> None:
        if self._new is None:
            del self._loras.served[self._name]
        else:
            self._loras.served[self._name] = self._new

    def clean_up(self) -> None:
        """Remove the folders and links of adapters that are not served."""
        served, staging = self._loras.served, self._loras.staging
        for folder in set(staging.glob(f"*{FOLDER_SUFFIX}")) - {lora.folder for lora in served.values()}:
            shutil.rmtree(folder, ignore_errors=True)
        for link in staging.glob(f"{LINK_PREFIX}*"):
            if link.name.removeprefix(LINK_PREFIX) not in served:
                link.unlink(missing_ok=True)

    async def _serve(self, update: Update, phase: str, lora: LoadedLora | None) -> None:
        if lora is None:
            await update.run_phase(phase, lambda: self._engine.unload(self._name))
            return
        # Point the name's link to the adapter's folder, atomically.
        link, new = lora.folder.with_name(LINK_PREFIX + self._name), lora.folder.with_name(f"new-{LINK_PREFIX}")
        new.unlink(missing_ok=True)
        new.symlink_to(lora.folder)
        os.replace(new, link)
        await update.run_phase(phase, lambda: self._engine.load(self._name, link))


def read_config(folder: Path, root: Path) -> LoraConfig:
    """Read PEFT's configuration from a folder below ``root``.

    Raises:
        InvalidRequest: it is missing, or not supported.
    """
    try:
        text = read_file(folder / CONFIG, MAX_CONFIG_BYTES, root)
    except OSError as error:
        raise _unreadable(folder, CONFIG, error) from error
    return parse_config(text, FIELD)


async def stream_tensors(folder: Path, root: Path, limit: int) -> AsyncIterator[bytes]:
    """Yield the bytes of the tensors in a folder below ``root``, at most ``limit``.

    Raises:
        InvalidRequest: the file is missing, or larger.
    """
    size = 0
    try:
        with await run_sync(open_file, folder / TENSORS, root) as file:
            while chunk := await run_sync(file.read, BUFFER_BYTES):
                size += len(chunk)
                if size > limit:
                    raise InvalidRequest(
                        FIELD, f"{TENSORS} has more than {limit} bytes, the most for a LoRA adapter of this model"
                    )
                yield chunk
    except OSError as error:
        raise _unreadable(folder, TENSORS, error) from error


def _unreadable(folder: Path, name: str, error: OSError) -> InvalidRequest:
    return InvalidRequest(FIELD, f"{folder} must be a folder with {CONFIG} and {TENSORS}: {name}: {error.strerror}")
