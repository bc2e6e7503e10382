"""Files of LoRA adapters, in the folder where the server stages weights.

The engine may read an adapter's files at any time, also for requests that began with a previous adapter of that name
(vLLM evicts adapters above ``--max-loras`` and loads them again). So each name has a path that stays: a symbolic link.
"""

import os
import shutil
from collections.abc import AsyncIterator, Mapping, Set
from pathlib import Path

from anyio.to_thread import run_sync

from darts_server.exceptions import InvalidRequest
from darts_server.files import open_file, read_file
from darts_server.weights.lora_config import MAX_CONFIG_BYTES, LoraConfig, parse_config
from darts_server.weights.staging import BUFFER_BYTES, Staging

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's names of the files."""
FIELD = "path"
FOLDER_SUFFIX, LINK_PREFIX = ".lora", "lora-"


class LoraFiles:
    """Writes, links and removes the folders of this server's LoRA adapters."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    async def write(self, chunks: AsyncIterator[bytes]) -> Path:
        """Write these bytes as the tensors of a new adapter. Returns its folder.

        Raises:
            DiskFull
        """
        path = await self._staging.write(chunks)
        folder = path.with_suffix(FOLDER_SUFFIX)
        folder.mkdir()
        path.rename(folder / TENSORS)
        return folder

    def link(self, name: str, folder: Path) -> Path:
        """Point the name's link to this folder, atomically. Returns the link."""
        link = folder.with_name(LINK_PREFIX + name)
        new = folder.with_name(f"new-{LINK_PREFIX}")
        new.unlink(missing_ok=True)
        new.symlink_to(folder)
        os.replace(new, link)
        return link

    def keep_only(self, folders: Mapping[str, Path], others: Set[Path]) -> None:
        """Remove every folder and link but these, by name, and the folders ``others``."""
        for folder in set(self._staging.glob(f"*{FOLDER_SUFFIX}")) - set(folders.values()) - others:
            self.remove(folder)
        for link in self._staging.glob(f"{LINK_PREFIX}*"):
            if link.name.removeprefix(LINK_PREFIX) not in folders:
                link.unlink(missing_ok=True)

    def remove(self, folder: Path) -> None:
        """Remove one adapter's folder."""
        shutil.rmtree(folder, ignore_errors=True)


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
