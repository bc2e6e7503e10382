"""Pushed weights on their way to the model: a folder of this process's own."""

import errno
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from anyio.to_thread import run_sync

from darts_server.exceptions import DiskFull

PREFIX = "darts-weights-"
BUFFER = 1 << 22
"""Bytes that are gathered before a thread writes them: bodies come in pieces of some kilobytes."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Staging:
    """``folder``: where its own is made when it is first needed; ``None`` for the system's for temporary files."""

    def __init__(self, folder: Path | None = None) -> None:
        self._parent = folder
        self._folder: Path | None = None
        self._count = 0

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, *_: object) -> None:
        """Remove all that was staged."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

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
        """Remove what is staged and not among these."""
        if self._folder is not None:
            for path in set(self._folder.iterdir()) - files:
                path.unlink(missing_ok=True)

    def _new(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))
        self._count += 1
        return self._folder / f"{self._count}.safetensors"


async def _copy(chunks: AsyncIterator[bytes], file: BinaryIO) -> None:
    gathered = bytearray()
    async for chunk in chunks:
        gathered += chunk
        if len(gathered) >= BUFFER:
            await run_sync(file.write, gathered)
            gathered = bytearray()
    await run_sync(file.write, gathered)
    await run_sync(file.flush)
