"""Encode large answers in threads, and send them in slices: a slow reader costs only the web server's buffer."""

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from darts_server.caller import caller
from darts_server.exceptions import RETRY_SECONDS, QuotaReached

JSON = "application/json"
SLICE_BYTES = 64 * 1024
"""About as much as the web server buffers for a connection."""
MAX_READERS = 64
"""As many batches are kept by default, and a trainer reads each batch once."""

# Each encoding thread may keep the interpreter from the event loop for 5 ms at a time.
_encoders = anyio.CapacityLimiter(4)

T = TypeVar("T")


def encode_json(value: Any) -> bytes:
    """Encode a value, which may have arrays. NaN and infinity become null.

    Integers of more than 64 bits are refused, so values that callers choose must be `msgspec.Raw`.
    """
    return _encoder.encode(value)


def _encode_array(value: Any) -> Any:
    if isinstance(value, array | np.ndarray):
        return value.tolist()
    raise TypeError(f"cannot encode a {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_encode_array)


async def run_in_encoder_thread(function: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(function, limiter=_encoders)


def split_into_slices(answer: bytes) -> Iterator[bytes]:
    for start in range(0, len(answer), SLICE_BYTES):
        yield answer[start : start + SLICE_BYTES]


async def with_turns_between(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
        # Sending a part lets other tasks run only when the socket's buffer is full.
        await asyncio.sleep(0)


class ClosingResponse(StreamingResponse):
    """Send an answer, and close ``cleanup`` when it was sent or the client has disconnected."""

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        media_type: str,
        length: int | None,
        cleanup: ExitStack,
    ) -> None:
        super().__init__(parts, media_type=media_type)
        if length is not None:
            self.headers["Content-Length"] = str(length)
        self._cleanup = cleanup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._cleanup:
            await super().__call__(scope, receive, send)


def respond(answer: bytes, media_type: str, cleanup: ExitStack | None = None) -> Response:
    """Close ``cleanup`` when the answer was sent."""
    cleanup = cleanup or ExitStack()
    # The web server takes a small answer at once, even for a slow reader.
    if len(answer) <= SLICE_BYTES:
        cleanup.close()
        return Response(answer, media_type=media_type)
    return ClosingResponse(with_turns_between(split_into_slices(answer)), media_type, len(answer), cleanup)


class Readers:
    """Counts the connections of each key that read ``what``, up to ``limit``."""

    def __init__(self, what: str, limit: int = MAX_READERS) -> None:
        self._what = what
        self._limit = limit
        self._open: Counter[str | None] = Counter()

    @property
    def num_connections(self) -> int:
        return self._open.total()

    @contextmanager
    def count_connection(self) -> Iterator[None]:
        """Count a connection while the block runs, or raise `QuotaReached`."""
        name = caller.get().name
        if self._open[name] >= self._limit:
            raise QuotaReached(
                f"this key already has {self._limit} connections that read {self._what}, which is the limit; read "
                "their answers to the end or close some, and send this request again",
                RETRY_SECONDS,
            )
        self._open[name] += 1
        try:
            yield
        finally:
            self._open[name] -= 1
            # A name without connections is deleted, because keys may be replaced for ever.
            if not self._open[name]:
                del self._open[name]


@dataclass(slots=True)
class _Encoding(Generic[T]):
    task: asyncio.Task[T]
    readers: int = 0


class SharedEncodings(Generic[T]):
    """Encodes each thing once for all connections that read it at the same time."""

    def __init__(self) -> None:
        self._encodings: dict[Hashable, _Encoding[T]] = {}

    def __len__(self) -> int:
        return len(self._encodings)

    @contextmanager
    def use(self, key: Hashable, encode: Callable[[], T]) -> Iterator[asyncio.Future[T]]:
        """Encode in a thread, or use another connection's encoding of the key, while the block runs."""
        encoding = self._encodings.get(key)
        if encoding is None:
            encoding = _Encoding(asyncio.create_task(run_in_encoder_thread(encode)))
            self._encodings[key] = encoding
        encoding.readers += 1
        try:
            # If this connection is lost, other connections still need the task, so it is not cancelled.
            yield asyncio.shield(encoding.task)
        finally:
            encoding.readers -= 1
            if not encoding.readers:
                del self._encodings[key]
