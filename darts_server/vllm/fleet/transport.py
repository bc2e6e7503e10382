"""Connections between the coordinator and the hosts of its engines: framed messages over TCP, and a secret token.

A message is a list of byte strings, as vLLM's are. On the wire each has the number of its parts and their lengths in
front, as unsigned little-endian integers of four bytes. The first message of a host is `Hello`. Whatever is not in
order ends its connection, and nothing else.
"""

import asyncio
import hmac
import logging
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

import msgspec

from darts_server.exceptions import EngineDead

logger = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")
HIDDEN_STATES = b"hidden states"
"""First part of a host's messages that are not its engine's, but of the probes in its workers."""
MAX_PARTS = 4096  # of a message: each large array is one
MAX_BYTES = 1 << 30
HELLO_BYTES, HELLO_SECONDS = 1 << 20, 10.0  # a connection that has not said who it is by then is closed
KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""A host whose machine is gone, or whose network is, is noticed after some seconds without an answer, or with data that
was not taken for so many milliseconds: longer than either end may be too busy to read."""


class Hello(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Who connects.

    ``token``: of this start of the coordinator. ``rank``: of the engine. ``ready``: vLLM's own message.
    ``hidden_states``: ZeroMQ's address at which the host takes hidden states of candidates.
    """

    token: str
    rank: int
    ready: bytes
    hidden_states: str


class Receiver(Protocol):
    """What becomes of a connection's messages."""

    def received(self, parts: list[bytes]) -> None: ...

    def lost(self, reason: str) -> None:
        """The connection has ended. Called once."""


class Malformed(Exception):
    """Bytes that are no message."""


class Parser:
    """Finds the messages in a stream of bytes. ``max_bytes``: of a message."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[list[bytes]]:
        """Yield the messages that are complete now, or raise `Malformed`."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= LENGTH.size:
            (count,) = LENGTH.unpack_from(buffer)
            if not 0 < count <= MAX_PARTS:
                raise Malformed(f"a message of {count} parts")
            end = LENGTH.size * (count + 1)
            if len(buffer) < end:
                return
            lengths = struct.unpack_from(f"<{count}I", buffer, LENGTH.size)
            if (size := sum(lengths)) > self.max_bytes:
                raise Malformed(f"a message of {size} bytes")
            if len(buffer) < end + size:
                return
            parts = []
            with memoryview(buffer) as view:
                for length in lengths:
                    parts.append(bytes(view[end : end + length]))
                    end += length
            del buffer[:end]
            yield parts


class Connection(asyncio.Protocol):
    """One connection, at either end. ``receiver`` may be changed by what it receives."""

    def __init__(self, receiver: Receiver, max_bytes: int = MAX_BYTES) -> None:
        self.receiver = receiver
        self.parser = Parser(max_bytes)
        self._transport: asyncio.Transport | None = None
        self._reason = "it was closed"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base class
        plug = transport.get_extra_info("socket")
        plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                plug.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self.parser.feed(data):
                self.receiver.received(message)
        except Exception as error:  # of what a stranger sends, or of one message of ours
            self.close(f"{type(error).__name__}: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.receiver.lost(str(error) if error is not None else self._reason)

    def send(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send a message; it is lost if the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            lengths = [memoryview(part).nbytes for part in parts]
            head = struct.pack(f"<{len(parts) + 1}I", len(parts), *lengths)
            self._transport.writelines([head, *(memoryview(part).cast("B") for part in parts)])

    def close(self, reason: str) -> None:
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()


Joined = Callable[[Hello, Connection], Receiver]


async def listen(host: str, token: str, joined: Joined) -> asyncio.Server:
    """Listen for hosts of engines on any port.

    ``token``: that they must have. ``joined``: called with each that has said hello, and its connection; returns what
    receives its messages.
    """
    return await asyncio.get_running_loop().create_server(lambda: _Greeting(token, joined).connection, host, 0)


class _Greeting:
    """Receives the first message of a connection."""

    def __init__(self, token: str, joined: Joined) -> None:
        self._token, self._joined = token, joined
        self.connection = Connection(self, HELLO_BYTES)
        self._timer = asyncio.get_running_loop().call_later(
            HELLO_SECONDS, self.connection.close, "it did not say who it is"
        )

    def received(self, parts: list[bytes]) -> None:
        hello = msgspec.msgpack.decode(parts[0], type=Hello)
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise Malformed("the token is not that of this coordinator")
        self._timer.cancel()
        self.connection.parser.max_bytes = MAX_BYTES
        self.connection.receiver = self._joined(hello, self.connection)

    def lost(self, reason: str) -> None:
        self._timer.cancel()
        logger.warning("a connection to the port of the engines was refused: %s", reason)


async def connect(host: str, port: int, hello: Hello, receiver: Receiver) -> Connection:
    """Connect an engine's host to the coordinator.

    Raises:
        EngineDead: no server listens there.
    """
    loop = asyncio.get_running_loop()
    try:
        _, connection = await loop.create_connection(lambda: Connection(receiver), host, port)
    except OSError as error:
        raise EngineDead(f"the coordinator at {host}:{port} cannot be reached: {error}") from error
    connection.send([msgspec.msgpack.encode(hello)])
    return connection
