"""New weights for the server, as `client.weights`. Their bytes are sent as they are: neither torch nor safetensors."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from os import PathLike
from typing import BinaryIO

from anyio.to_thread import run_sync

from . import _calls
from ._calls import Rule
from ._connection import AsyncConnection, Connection
from ._knowledge import WeightsRecord

Source = bytes | str | PathLike[str]
# Large enough that handing a piece to a thread costs little; httpx copies what is left of a piece after each write.
PIECE = 1 << 22


class _Sized:
    """Bytes, or a file's, that a request may send more than once: each time from the beginning.

    Raises:
        OSError: the file cannot be read.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        with self._opened() as file:
            self.size = file.seek(0, os.SEEK_END)

    def _opened(self) -> BinaryIO:
        return BytesIO(self._source) if isinstance(self._source, bytes) else open(self._source, "rb")


class Pieces(_Sized):
    """A body of known size, sent in pieces."""

    def __iter__(self) -> Iterator[bytes]:
        with self._opened() as file:
            while piece := file.read(PIECE):
                yield piece


class AsyncPieces(_Sized):
    """The same, read by a thread."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self._opened() as file:
            while piece := await run_sync(file.read, PIECE):
                yield piece


class AsyncWeightsApi:
    """The weights that the server samples with."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def get(self) -> WeightsRecord:
        """Which version is served, and how the last update went."""
        return await self._connection.answer(_calls.weights())

    async def push(
        self, source: Source, *, rule: Rule | None = None, version: int | None = None, partial: bool = False
    ) -> WeightsRecord:
        """Send new weights, or change nothing; returns when they are served.

        `source` is a safetensors file: its bytes, or its path. A file is sent in pieces, so it may be larger than the
        memory; it must not change meanwhile.

        `rule`: what becomes of groups that run. "finish" waits for them, "keep" has them go on with the new weights,
        "restart" starts them anew with these; left out, the server's setting. `version` is the one after that which is
        served, if left out. With `partial` tensors may be missing, and stay what they are.

        It is sent again only if it did not reach the server. BadRequest for a bad set, or while another update is under
        way; ServerFault with status 501 for a model whose weights cannot be replaced. After TimedOut or
        ConnectionFailed the update may go on: `get` tells.
        """
        pieces = await asyncio.to_thread(AsyncPieces, source)
        call = _calls.push_weights(pieces, pieces.size, rule, version, partial)
        return await self._connection.answer(call)

    async def load(
        self, path: str | PathLike[str], *, rule: Rule | None = None, version: int | None = None, partial: bool = False
    ) -> WeightsRecord:
        """Like `push`, of a safetensors file, or a folder of these, on the server's machine.

        The server reads it there, under its `--weights-root` alone. Unauthorized if it has none.
        """
        return await self._connection.answer(_calls.load_weights("path", os.fspath(path), rule, version, partial))

    async def pull(
        self, url: str, *, rule: Rule | None = None, version: int | None = None, partial: bool = False
    ) -> WeightsRecord:
        """Like `push`, of a safetensors file that the server fetches from `url`.

        It does so from its `--weights-hosts` alone. Unauthorized if it has none.
        """
        return await self._connection.answer(_calls.load_weights("url", url, rule, version, partial))


class WeightsApi:
    """The weights that the server samples with."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self) -> WeightsRecord:
        """See `AsyncWeightsApi.get`."""
        return self._connection.answer(_calls.weights())

    def push(
        self, source: Source, *, rule: Rule | None = None, version: int | None = None, partial: bool = False
    ) -> WeightsRecord:
        """See `AsyncWeightsApi.push`."""
        pieces = Pieces(source)
        return self._connection.answer(_calls.push_weights(pieces, pieces.size, rule, version, partial))

    def load(
        self, path: str | PathLike[str], *, rule: Rule | None = None, version: int | None = None, partial: bool = False
    ) -> WeightsRecord:
        """See `AsyncWeightsApi.load`."""
        return self._connection.answer(_calls.load_weights("path", os.fspath(path), rule, version, partial))

    def pull(
        self, url: str, *, rule: Rule | None = None, version: int | None = None, partial: bool = False
    ) -> WeightsRecord:
        """See `AsyncWeightsApi.pull`."""
        return self._connection.answer(_calls.load_weights("url", url, rule, version, partial))
