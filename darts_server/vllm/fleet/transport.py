"""Connections between the coordinator and the hosts of its engines: framed messages over TCP, and a secret token.

A message is a list of byte strings, as in vLLM. On the wire it begins with the number of its parts and their lengths,
as unsigned little-endian integers of four bytes. The first message of a host is `Hello`.
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
"""First part of a host's messages with hidden states. All others are its engine's."""
# Each large array is a part.
MAX_PARTS = 4096
MAX_BYTES = 1 << 30
HELLO_BYTES = 1 << 20
HELLO_SECONDS = 10.0
"""Seconds after which a connection without a `Hello` is closed."""
# A host whose machine or network is gone is noticed after some seconds without an answer, or if it has not taken data
# for 30 s, longer than either end may be too busy to read.
KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}


class Hello(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Introduction of a host.

    ``token``: secret of this run of the coordinator. ``ready``: vLLM's own message that its engine is ready.
    ``hidden_states``: ZeroMQ address at which the host receives hidden states.
    """

    token: str
    rank: int
    ready: bytes
    hidden_states: str


class Receiver(Protocol):
    def message_received(self, parts: list[bytes]) -> None: ...

    def connection_lost(self, reason: str) -> None:
        """Handle the end of the connection. Called once."""


class MalformedMessage(Exception):
    """The received bytes are no message."""


class Parser:
    """Finds the messages in a stream of bytes. ``max_bytes``: limit of a message."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[list[bytes]]:
        """Yield the messages that are complete now, or raise `MalformedMessage`."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= LENGTH.size:
            (count,) = LENGTH.unpack_from(buffer)
            if not 0 < count <= MAX_PARTS:
                raise MalformedMessage(f"a message of {count} parts")
            head_size = LENGTH.size * (count + 1)
            if len(buffer) < head_size:
                return
            lengths = struct.unpack_from(f"<{count}I", buffer, LENGTH.size)
            body_size = sum(lengths)
            if body_size > self.max_bytes:
                raise MalformedMessage(f"a message of {body_size} bytes")
            if len(buffer) < head_size + body_size:
                return
            parts = []
            begin = head_size
            with memoryview(buffer) as view:
                for length in lengths:
                    parts.append(bytes(view[begin : begin + length]))
                    begin += length
            del buffer[: head_size + body_size]
            yield parts


class Connection(asyncio.Protocol):
    """One connection, at either end. ``receiver`` may replace itself."""

    def __init__(self, receiver: Receiver, max_bytes: int = MAX_BYTES) -> None:
        self.receiver = receiver
        self.parser = Parser(max_bytes)
        self._transport: asyncio.Transport | None = None
        self._close_reason = "it was closed"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has another base class.
        self._transport = cast(asyncio.Transport, transport)
        tcp = transport.get_extra_info("socket")
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Not every system has all options.
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                tcp.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self.parser.feed(data):
                self.receiver.message_received(message)
        except Exception as error:
            # A stranger's bytes, or a fault with one message, must end only this connection.
            self.close(f"{type(error).__name__}: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        # After `close` there is no error.
        self.receiver.connection_lost(self._close_reason if error is None else str(error))

    def send(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send a message; it is lost if the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            views = [memoryview(part).cast("B") for part in parts]
            head = struct.pack(f"<{len(parts) + 1}I", len(parts), *map(len, views))
            self._transport.writelines([head, *views])

    def close(self, reason: str) -> None:
        """End the connection at once, and drop unsent bytes. The receiver's ``connection_lost`` gets the reason."""
        self._close_reason = reason
        if self._transport is not None:
            self._transport.abort()


CreateReceiver = Callable[[Hello, Connection], Receiver]


async def listen(host: str, token: str, create_receiver: CreateReceiver) -> asyncio.Server:
    """Listen for hosts of engines on a free port.

    ``create_receiver``: called with each host that has the ``token``, and its connection. It returns the
    connection's receiver.
    """
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: _HelloReceiver(token, create_receiver).connection, host, 0)


class _HelloReceiver:
    """Receives the `Hello` of a host. Then the host's own receiver takes its place."""

    def __init__(self, token: str, create_receiver: CreateReceiver) -> None:
        self._token = token
        self._create_receiver = create_receiver
        self.connection = Connection(self, HELLO_BYTES)
        loop = asyncio.get_running_loop()
        self._hello_timeout = loop.call_later(HELLO_SECONDS, self.connection.close, "it did not say who it is")

    def message_received(self, parts: list[bytes]) -> None:
        hello = msgspec.msgpack.decode(parts[0], type=Hello)
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            # The connection closes after any error.
            raise MalformedMessage("the token is not that of this coordinator")
        self._hello_timeout.cancel()
        self.connection.parser.max_bytes = MAX_BYTES
        self.connection.receiver = self._create_receiver(hello, self.connection)

    def connection_lost(self, reason: str) -> None:
        self._hello_timeout.cancel()
        logger.warning("a connection to the port of the engines was refused: %s", reason)


async def connect(
    host: str,
    port: int,
    hello: Hello,
    receiver: Receiver,
) -> Connection:
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
