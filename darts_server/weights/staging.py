"""Weights that came over the network, on their way to the model: a folder of this process's own."""

import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from anyio.to_thread import run_sync

from darts_server.exceptions import DiskFull
from darts_server.weights.tensors import SUFFIX

logger = logging.getLogger(__name__)

PREFIX = "darts-weights-"
LOCK = "lock"
"""A file in it that the process holds while it lives. The folder of one that was killed is left with nobody's."""
BUFFER = 1 << 22
"""Bytes that are gathered before a thread writes them: bodies come in pieces of some kilobytes."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Staging:
    """``folder``: where its own is made when it is first needed; ``None`` for the system's for temporary files."""

    def __init__(self, folder: Path | None = None) -> None:
        self._parent = folder or Path(tempfile.gettempdir())
        self._folder: Path | None = None
        self._lock: int | None = None
        self._count = 0

    def __enter__(self) -> "Staging":
        """Remove what processes that were killed have left behind."""
        for folder in self._parent.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if _is_left(folder):
                    logger.warning("%s was left by a process that is gone; removing it", folder)
                    shutil.rmtree(folder)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove all that was staged."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def write(self, chunks: AsyncIterator[bytes]) -> Path:
        """A new file with these bytes, written as they come. Nothing is left of one that fails.

        Raises:
            DiskFull
        """
        path = self._new()
        try:
            with path.open("xb") as file:
                await _copy(chunks, file)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise DiskFull(
                    f"{path.parent} has no room for the weights; free some, or choose another folder "
                    "with --weights-staging"
                ) from error
            raise
        return path

    def keep_only(self, files: set[Path]) -> None:
        """Remove the files that are staged and not among these."""
        if self._folder is not None:
            for path in set(self._folder.glob(f"*{SUFFIX}")) - files:
                path.unlink(missing_ok=True)

    def others(self, pattern: str) -> list[Path]:
        """What else its users have put beside the files, by pattern of the names."""
        return [] if self._folder is None else list(self._folder.glob(pattern))

    def _new(self) -> Path:
        if self._folder is None:
            self._folder, self._lock = _made(self._parent)
        self._count += 1
        return self._folder / f"{self._count}{SUFFIX}"


def _made(parent: Path) -> tuple[Path, int]:
    """A new folder and its lock. It gets its name when it is locked, so that nobody takes it for one that was left."""
    hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
    lock = os.open(hidden / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return hidden.rename(parent / hidden.name.removeprefix(".")), lock


def _is_left(folder: Path) -> bool:
    """Whether it is this user's, and no process holds it."""
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return False
    with (folder / LOCK).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


async def _copy(chunks: AsyncIterator[bytes], file: BinaryIO) -> None:
    gathered = bytearray()
    async for chunk in chunks:
        gathered += chunk
        if len(gathered) >= BUFFER:
            await run_sync(file.write, gathered)
            gathered = bytearray()
    await run_sync(file.write, gathered)
    await run_sync(file.flush)
