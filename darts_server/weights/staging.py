"""This process's folder for weights that arrive over the network."""

import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from anyio.to_thread import run_sync

from darts_server.exceptions import DiskFull
from darts_server.files import open_file
from darts_server.weights.tensors import SUFFIX

logger = logging.getLogger(__name__)

PREFIX = "darts-weights-"
LOCK = "lock"
"""File that the process locks while it lives. The kernel releases the lock of a killed process."""
BUFFER_BYTES = 1 << 22
"""Bytes that are gathered before a thread writes them. Bodies arrive in pieces of some kilobytes."""
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Staging:
    """A folder below ``parent`` that is created with its first file. ``parent``: by default for temporary files."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent or Path(tempfile.gettempdir())
        self._folder: Path | None = None
        self._lock: int | None = None
        self._num_files = 0

    def __enter__(self) -> "Staging":
        # Remove the folders of killed processes.
        for folder in self._parent.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                    continue
                with open_file(folder / LOCK) as lock:
                    # Raises if the folder's process lives.
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                logger.warning("%s was left by a process that is gone; removing it", folder)
                shutil.rmtree(folder)
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def write(self, chunks: AsyncIterator[bytes]) -> Path:
        """Write bytes to a new file as they arrive. After a failure the file is removed.

        Raises:
            DiskFull
        """
        if self._folder is None:
            self._folder = self._create_folder()
        self._num_files += 1
        path = self._folder / f"{self._num_files}{SUFFIX}"
        buffer = bytearray()
        try:
            with path.open("xb") as file:
                async for chunk in chunks:
                    buffer += chunk
                    if len(buffer) >= BUFFER_BYTES:
                        await run_sync(file.write, buffer)
                        buffer = bytearray()
                await run_sync(file.write, buffer)
                await run_sync(file.flush)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise DiskFull(
                    f"{path.parent} has no room for the weights; free some, or choose another folder "
                    "with --weights-staging"
                ) from error
            raise
        return path

    def _create_folder(self) -> Path:
        # Lock the folder before it gets its name: another process that starts meanwhile would remove it.
        hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=self._parent))
        self._lock = os.open(hidden / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return hidden.rename(self._parent / hidden.name.removeprefix("."))

    def remove_all_except(self, kept_files: set[Path]) -> None:
        for path in set(self.glob(f"*{SUFFIX}")) - kept_files:
            path.unlink(missing_ok=True)

    def glob(self, pattern: str) -> list[Path]:
        if self._folder is None:
            return []
        return list(self._folder.glob(pattern))
