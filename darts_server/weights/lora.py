"""LoRA adapters of the served model.

vLLM evicts adapters above ``--max-loras``, and loads them again at any time, even for requests that began with a
previous adapter of that name. So each name has a path that stays, a symbolic link.
"""

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Unpack

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
from darts_server.weights.port import LoraEngine, LoraOptions, Rule, Update
from darts_server.weights.staging import BUFFER_BYTES, Staging
from darts_server.weights.tensors import check_numbers, read_tensors, resolve_path

# PEFT's names of the files.
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
FIELD = "path"
FOLDER_SUFFIX = ".lora"
LINK_PREFIX = "lora-"


@dataclass(frozen=True, slots=True)
class LoadedLora:
    version: int
    """Version of the update that loaded it."""
    config: LoraConfig
    folder: Path


Fetch = Callable[[LoraLayers], Awaitable[tuple[LoraConfig, Path]]]
"""Fetches the configuration, and the path of a file of tensors with at most `LoraLayers.max_bytes`."""


@dataclass(frozen=True, slots=True)
class Loras:
    coordinator: Coordinator
    engine: LoraEngine | None
    """None if the server was started without LoRA."""
    staging: Staging
    root: Path | None
    served: dict[str, LoadedLora] = dataclass_field(default_factory=dict)
    """Adapters by name."""

    async def push(
        self,
        name: str,
        config: str,
        body: Callable[[int], AsyncIterator[bytes]],
        *,
        version: int | None = None,
        **options: Unpack[LoraOptions],
    ) -> UpdateRecord:
        """Serve a LoRA adapter from PEFT's configuration and the bytes of a safetensors file.

        See `Updates.push`. Also raises `Forbidden` if the server was started without LoRA.
        """

        async def fetch(layers: LoraLayers) -> tuple[LoraConfig, Path]:
            return parse_config(config, "config"), await self.staging.write(body(layers.max_bytes))

        update = _LoraUpdate(
            source="push",
            lora=name,
            loras=self,
            fetch=fetch,
            field="body",
            **options,
        )
        return await self._run(update, version)

    async def load(
        self,
        name: str,
        path: str,
        *,
        version: int | None = None,
        **options: Unpack[LoraOptions],
    ) -> UpdateRecord:
        """Serve a LoRA adapter from a copy of PEFT's folder under the root. Raises as `push`."""

        async def fetch(layers: LoraLayers) -> tuple[LoraConfig, Path]:
            folder, root = await run_sync(resolve_path, self.root, path)
            file_name = CONFIG
            try:
                config = await run_sync(read_file, folder / CONFIG, MAX_CONFIG_BYTES, root)
                file_name = TENSORS
                tensor_file = await run_sync(open_file, folder / TENSORS, root)
            except OSError as error:
                problem = f"{folder} must be a folder with {CONFIG} and {TENSORS}: {file_name}: {error.strerror}"
                raise InvalidRequest(FIELD, problem) from error

            async def read_chunks() -> AsyncIterator[bytes]:
                while chunk := await run_sync(tensor_file.read, BUFFER_BYTES):
                    yield chunk

            with tensor_file:
                limit = layers.max_bytes
                if os.fstat(tensor_file.fileno()).st_size > limit:
                    problem = f"{TENSORS} has more than {limit} bytes, the most for a LoRA adapter of this model"
                    raise InvalidRequest(FIELD, problem)
                return parse_config(config, FIELD), await self.staging.write(read_chunks())

        update = _LoraUpdate(
            source="disk",
            lora=name,
            loras=self,
            fetch=fetch,
            field=FIELD,
            **options,
        )
        return await self._run(update, version)

    async def remove(self, name: str) -> UpdateRecord:
        """Stop serving a LoRA adapter when no running request uses it. Raises as `push`, and `NotFound`."""
        # No other rule is possible, because requests cannot continue without the adapter.
        update = _LoraUpdate(
            source="delete",
            lora=name,
            loras=self,
            rule=Rule.FINISH,
        )
        return await self._run(update, None)

    async def _run(self, update: "_LoraUpdate", version: int | None) -> UpdateRecord:
        if self.engine is None:
            raise Forbidden("this server's model takes no LoRA adapters; start it with --enable-lora")
        is_removal = update.fetch is None
        if not is_removal:
            self.engine.check_name(update.lora)
        elif update.lora not in self.served:
            raise NotFound(
                "name", f"no LoRA adapter {update.lora!r} was pushed; GET /darts/v1/weights lists the pushed ones"
            )
        return await self.coordinator.run(update, version)


def check_adapter_numbers(folder: Path) -> None:
    """Check the numbers of an adapter if the folder has one, as PEFT saves it.

    Raises:
        InvalidRequest: names the first tensor with NaN or infinity.
    """
    if (folder / TENSORS).is_file():
        check_numbers(read_tensors(folder / TENSORS, "lora_path"), "lora_path")


@dataclass(slots=True, kw_only=True)
class _LoraUpdate(Update):
    lora: str
    loras: Loras
    fetch: Fetch | None = None
    """Fetches the new adapter. None to remove the old adapter."""
    field: str = ""
    """Field of the request that errors of the new adapter name."""
    staged: LoadedLora | None = None

    @property
    def engine(self) -> LoraEngine:
        # `Loras._run` has checked this.
        assert self.loras.engine is not None
        return self.loras.engine

    async def stage(self) -> None:
        fetch = self.fetch
        # The update removes the adapter.
        if fetch is None:
            return
        layers = await self.engine.layers()
        config, path = await self.run_phase("transfer", lambda: fetch(layers))
        folder = path.with_suffix(FOLDER_SUFFIX)
        folder.mkdir()
        path.rename(folder / TENSORS)

        def check() -> None:
            tensors = read_tensors(folder / TENSORS, self.field)
            check_lora(layers, config, tensors, self.field)
            if self.check_finite:
                check_numbers(tensors, self.field)
            (folder / CONFIG).write_text(dump_config(config, tensors))

        await self.run_phase("check", lambda: run_sync(check))
        self.staged = LoadedLora(self.version, config, folder)

    async def apply(self) -> None:
        await self._load_or_unload("load", self.staged)

    async def roll_back(self) -> str:
        await self._load_or_unload("restore", self.loras.served.get(self.lora))
        return ""

    def commit(self) -> None:
        if self.staged is None:
            del self.loras.served[self.lora]
        else:
            self.loras.served[self.lora] = self.staged

    def clean_up(self) -> None:
        served = self.loras.served
        staging = self.loras.staging
        served_folders = {lora.folder for lora in served.values()}
        for folder in set(staging.glob(f"*{FOLDER_SUFFIX}")) - served_folders:
            shutil.rmtree(folder, ignore_errors=True)
        for link in staging.glob(f"{LINK_PREFIX}*"):
            if link.name.removeprefix(LINK_PREFIX) not in served:
                link.unlink(missing_ok=True)

    async def _load_or_unload(self, phase: str, adapter: LoadedLora | None) -> None:
        if adapter is None:
            await self.run_phase(phase, lambda: self.engine.unload(self.lora))
            return
        # vLLM may load an adapter again at any time, so its path stays: replace the link to the folder atomically.
        link = adapter.folder.with_name(LINK_PREFIX + self.lora)
        new_link = adapter.folder.with_name(f"new-{LINK_PREFIX}")
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(adapter.folder)
        os.replace(new_link, link)
        await self.run_phase(phase, lambda: self.engine.load(self.lora, link))
