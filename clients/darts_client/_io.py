"""I/O that differs between the async and the sync client.

Each `AsyncX` or `async_x` has a sync twin `X` or `x`, because `hatch_build.py` drops the prefix.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, nullcontext, suppress
from io import BytesIO
from os import PathLike
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO, ParamSpec, TypeVar

import anyio
import httpx
from anyio.to_thread import run_sync
from httpx_sse import EventSource, ServerSentEvent

P = ParamSpec("P")
T = TypeVar("T")

Source = bytes | str | PathLike[str]
# Large enough that handing a piece to a thread costs little. Not larger, because httpx copies the rest of a piece after
# each write.
PIECE_SIZE = 1 << 22

AsyncLock = asyncio.Lock
Lock = threading.Lock
async_sleep = asyncio.sleep
sleep = time.sleep


def async_shield(seconds: float) -> AbstractContextManager[object]:
    """Protect the block from cancellation for `seconds`."""
    return anyio.move_on_after(seconds, shield=True)


def shield(seconds: float) -> AbstractContextManager[object]:
    """Do nothing, because a thread is not cancelled."""
    return nullcontext()


def async_read_sse(response: httpx.Response) -> AbstractAsyncContextManager[AsyncIterator[ServerSentEvent]]:
    """Iterate over the server-sent events of a response. The end of the block closes the iterator."""
    return aclosing(EventSource(response).aiter_sse())


def read_sse(response: httpx.Response) -> AbstractContextManager[Iterator[ServerSentEvent]]:
    return nullcontext(EventSource(response).iter_sse())


async def async_run_blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.to_thread(function, *args, **kwargs)


def run_blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


class _SizedBody:
    """A request body of bytes or of a file. Each iteration starts at the beginning, so a request may be sent again.

    Raises:
        OSError: the file cannot be read.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        with self._open() as file:
            self.size = file.seek(0, os.SEEK_END)

    def _open(self) -> BinaryIO:
        if isinstance(self._source, bytes):
            return BytesIO(self._source)
        return open(self._source, "rb")


class AsyncBody(_SizedBody):
    """A body that a thread reads piece by piece."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self._open() as file:
            # A cancelled `run_sync` waits for its thread, so the file is not closed during a read.
            while piece := await run_sync(file.read, PIECE_SIZE):
                yield piece


class Body(_SizedBody):
    """A body that is read piece by piece."""

    def __iter__(self) -> Iterator[bytes]:
        with self._open() as file:
            while piece := file.read(PIECE_SIZE):
                yield piece


def write_atomically(path: Path, data: bytes) -> None:
    """Write a temporary file beside `path`, and replace `path` once the data is on the disk."""
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(data)
            # A crash after the replacement must not leave an empty file.
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(file.name)
            raise
