"""Large answers: encoded in threads, once for all that read the same one, and sent in slices.

A caller that does not read its answer costs what the web server buffers for it, and few callers may do so at a time.
"""

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
"""About what the web server buffers for a reader before it waits for it to read."""
MAX_READERS = 64
"""Connections of one key that read what is kept. As many batches are kept by default, and a trainer reads each once."""

# Each thread that encodes may keep the event loop from the interpreter for five milliseconds at a time.
_encoders = anyio.CapacityLimiter(4)

T = TypeVar("T")


def encode_json(value: Any) -> bytes:
    """Encode a value, in which sequences of numbers may be arrays. Numbers that JSON does not have are null.

    Integers of more than 64 bits are refused: what callers chose is put in as `msgspec.Raw`.
    """
    return _encoder.encode(value)


def _encode_array(value: Any) -> Any:
    # One after the other, each by itself: the encoder does not let other threads run meanwhile.
    if isinstance(value, array | np.ndarray):
        return value.tolist()
    raise TypeError(f"cannot encode a {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_encode_array)


async def in_thread(function: Callable[[], T]) -> T:
    """Call a function that takes long in one of a few threads."""
    return await anyio.to_thread.run_sync(function, limiter=_encoders)


def slices(answer: bytes) -> Iterator[bytes]:
    """Yield an answer in parts that the web server can buffer."""
    return (answer[start : start + SLICE_BYTES] for start in range(0, len(answer), SLICE_BYTES))


async def taking_turns(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield parts of an answer, and let other tasks run between them."""
    for part in parts:
        yield part
        await asyncio.sleep(0)  # sending yields to other tasks only once the socket's buffer is full


class HeldResponse(StreamingResponse):
    """Send an answer, then exit the context managers in ``held``, also if the client disconnects."""

    def __init__(self, parts: AsyncIterator[bytes], media_type: str, length: int | None, held: ExitStack) -> None:
        headers = None if length is None else {"Content-Length": str(length)}
        super().__init__(parts, media_type=media_type, headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


def respond(answer: bytes, media_type: str, held: ExitStack | None = None) -> Response:
    """Return the response with an answer: in one part if it is small. ``held``: what is left when it was sent."""
    held = ExitStack() if held is None else held
    if len(answer) <= SLICE_BYTES:
        held.close()
        return Response(answer, media_type=media_type)
    return HeldResponse(taking_turns(slices(answer)), media_type, len(answer), held)


class Readers:
    """Count the connections of each key that read something.

    Args:
        what: what they read, for the error.
        limit: the largest number for one key.
    """

    def __init__(self, what: str, limit: int = MAX_READERS) -> None:
        self._what = what
        self._limit = limit
        self._open: Counter[str | None] = Counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a connection of the caller while the block runs.

        Raises:
            QuotaReached
        """
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
            if not self._open[name]:
                del self._open[name]


@dataclass(slots=True)
class _Encoding(Generic[T]):
    """``readers``: how many need it."""

    task: asyncio.Task[T]
    readers: int = 0


class SharedEncodings(Generic[T]):
    """Encode what several connections read once, and keep it as long as one of them needs it."""

    def __init__(self) -> None:
        self._encodings: dict[Hashable, _Encoding[T]] = {}

    def __len__(self) -> int:
        return len(self._encodings)

    @contextmanager
    def use(self, key: Hashable, encode: Callable[[], T]) -> Iterator[asyncio.Future[T]]:
        """Encode in a thread what has that key, unless it was encoded for another connection that still needs it.

        The result may be waited for, and is kept, while the block runs.
        """
        encoding = self._encodings.get(key)
        if encoding is None:
            encoding = self._encodings[key] = _Encoding(asyncio.create_task(in_thread(encode)))
        encoding.readers += 1
        try:
            # Shielded: a connection that is lost must not take it from the others.
            yield asyncio.shield(encoding.task)
        finally:
            encoding.readers -= 1
            if not encoding.readers:
                del self._encodings[key]
