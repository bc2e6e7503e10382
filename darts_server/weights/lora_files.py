"""Where the files of adapters are: in the folder that the server stages weights in.

The engine reads them whenever it likes, also for requests that began with the adapter before. So each name has a path
that stays, a link.
"""

import os
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from anyio.to_thread import run_sync

from darts_server.exceptions import InvalidRequest
from darts_server.weights.lora_config import LARGEST_CONFIG, LoraConfig, read_config
from darts_server.weights.staging import BUFFER, Staging

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
FIELD = "path"
KIND, LINK = ".lora", "lora-"
"""How the names of folders with adapters end, and how those of links begin."""


class LoraFiles:
    """Those of this server."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    async def take(self, chunks: AsyncIterator[bytes]) -> Path:
        """A new folder, with these bytes as the adapter's tensors.

        Raises:
            DiskFull
        """
        path = await self._staging.write(chunks)
        folder = path.with_suffix(KIND)
        folder.mkdir()
        path.rename(folder / TENSORS)
        return folder

    def lead(self, name: str, folder: Path) -> Path:
        """The path that stays. From now on it leads to this folder."""
        link = folder.with_name(LINK + name)
        new = folder.with_name(f"new-{LINK}")
        new.unlink(missing_ok=True)
        new.symlink_to(folder)
        os.replace(new, link)
        return link

    def keep_only(self, folders: Mapping[str, Path]) -> None:
        """Remove what is of no adapter among these, by name."""
        for folder in set(self._staging.others(f"*{KIND}")) - set(folders.values()):
            shutil.rmtree(folder, ignore_errors=True)
        for link in self._staging.others(f"{LINK}*"):
            if link.name.removeprefix(LINK) not in folders:
                link.unlink(missing_ok=True)


def config_in(folder: Path) -> LoraConfig:
    """
    Raises:
        InvalidRequest: it is not there, or not taken.
    """
    try:
        with (folder / CONFIG).open("rb") as file:
            text = file.read(LARGEST_CONFIG + 1)
    except OSError as error:
        raise _unreadable(folder, CONFIG, error) from error
    if len(text) > LARGEST_CONFIG:
        raise InvalidRequest(FIELD, f"{CONFIG} has more than {LARGEST_CONFIG} bytes")
    return read_config(text, FIELD)


async def tensors_in(folder: Path, limit: int) -> AsyncIterator[bytes]:
    """The bytes of the file with the tensors, at most ``limit``.

    Raises:
        InvalidRequest: it is not there, or has more.
    """
    size = 0
    try:
        with (folder / TENSORS).open("rb") as file:
            while chunk := await run_sync(file.read, BUFFER):
                size += len(chunk)
                if size > limit:
                    raise InvalidRequest(FIELD, f"{TENSORS} has more than {limit} bytes, which no adapter here has")
                yield chunk
    except OSError as error:
        raise _unreadable(folder, TENSORS, error) from error


def _unreadable(folder: Path, name: str, error: OSError) -> InvalidRequest:
    return InvalidRequest(FIELD, f"{folder} must be a folder with {CONFIG} and {TENSORS}: {name}: {error.strerror}")
