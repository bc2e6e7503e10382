"""New weights for the server, as `client.weights`. Their bytes are sent as they are: neither torch nor safetensors."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

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


SizedT = TypeVar("SizedT", bound=_Sized)


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

    async def push_lora(
        self,
        name: str,
        source: Source,
        *,
        config: Mapping[str, Any] | None = None,
        rule: Rule | None = None,
        version: int | None = None,
    ) -> WeightsRecord:
        """Send a low-rank adapter, or change nothing; returns when it is served under `name`, in place of one before.

        `source` is a folder as PEFT saves it, or the bytes of its `adapter_model.safetensors`. These need a `config`,
        PEFT's `adapter_config.json`, of which `r` and `lora_alpha` are enough, and `use_rslora` where it is set.

        The rest is as in `push`. Unauthorized if the server was started without `--enable-lora`.
        """
        adapter = await asyncio.to_thread(_read_lora, source, config, AsyncPieces)
        call = _calls.push_lora(name, *adapter, rule, version)
        return await self._connection.answer(call)

    async def load_lora(
        self, name: str, path: str | PathLike[str], *, rule: Rule | None = None, version: int | None = None
    ) -> WeightsRecord:
        """Like `push_lora`, of a folder on the server's machine, under its `--weights-root`. It takes a copy."""
        return await self._connection.answer(_calls.load_lora(name, os.fspath(path), rule, version))

    async def remove_lora(self, name: str) -> WeightsRecord:
        """Have an adapter served no more, when all that runs has ended. BadRequest if there is none of that name."""
        return await self._connection.answer(_calls.remove_lora(name))

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

    def push_lora(
        self,
        name: str,
        source: Source,
        *,
        config: Mapping[str, Any] | None = None,
        rule: Rule | None = None,
        version: int | None = None,
    ) -> WeightsRecord:
        """See `AsyncWeightsApi.push_lora`."""
        adapter = _read_lora(source, config, Pieces)
        return self._connection.answer(_calls.push_lora(name, *adapter, rule, version))

    def load_lora(
        self, name: str, path: str | PathLike[str], *, rule: Rule | None = None, version: int | None = None
    ) -> WeightsRecord:
        """See `AsyncWeightsApi.load_lora`."""
        return self._connection.answer(_calls.load_lora(name, os.fspath(path), rule, version))

    def remove_lora(self, name: str) -> WeightsRecord:
        """See `AsyncWeightsApi.remove_lora`."""
        return self._connection.answer(_calls.remove_lora(name))

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


def _read_lora(source: Source, config: Mapping[str, Any] | None, pieces: type[SizedT]) -> tuple[str, SizedT, int]:
    """Configuration, tensors and their size.

    Raises:
        ValueError: bytes without a configuration, or one that is none.
        OSError: the folder or a file cannot be read.
    """
    tensors: Source = source if isinstance(source, bytes) else Path(source) / "adapter_model.safetensors"
    if config is None:
        if isinstance(source, bytes):
            raise ValueError("config: an adapter's bytes need one, such as {'r': 8, 'lora_alpha': 16}")
        config = json.loads((Path(source) / "adapter_config.json").read_text())
    # The tensors' names say which layers they are of, and the list may be too long for a URL.
    told = {key: value for key, value in config.items() if key != "target_modules"}
    sized = pieces(tensors)
    return json.dumps(told), sized, sized.size
