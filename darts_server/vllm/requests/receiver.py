"""Receive the engine's messages without a future and a timer for each of them.

pyzmq's asynchronous socket, which vLLM uses, costs the API process .1 ms for each message. An engine sends a message in
every step. Here the event loop calls back when the socket is readable, and vLLM's task takes all messages that have
arrived.
"""

import asyncio
from contextlib import suppress
from typing import Any, cast

import zmq
import zmq.asyncio


class MessageReceiver:
    """Replaces ``recv_multipart`` and ``close`` of ``socket``, the asynchronous pyzmq socket of vLLM's client."""

    def __init__(self, socket: Any) -> None:
        # The same socket with pyzmq's synchronous methods. The asynchronous methods of `socket` would read the events
        # that this class waits for, so they must not be called.
        self._socket: Any = zmq.Socket.shadow(socket)
        self._loop = asyncio.get_running_loop()
        self._readable: asyncio.Future[None] | None = None
        self._descriptor = cast(int, self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._wake)
        self._is_closed = False
        self._close_socket = socket.close
        socket.recv_multipart = self.receive
        socket.close = self.close

    async def receive(self, copy: bool = True) -> list[Any]:
        while True:
            # The socket becomes readable again only after all messages were taken.
            with suppress(zmq.Again):
                parts: list[Any] = self._socket.recv_multipart(zmq.NOBLOCK, copy=copy)
                return parts
            self._readable = self._loop.create_future()
            await self._readable

    def _wake(self) -> None:
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)
        else:
            # This ends the call-backs until something else happens. `receive` looks for messages before it waits.
            self._socket.getsockopt(zmq.EVENTS)

    def close(self, linger: int | None = None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._readable is not None:
            self._readable.cancel()
        # Another file may get the socket's descriptor number. The loop may be closed already.
        with suppress(RuntimeError):
            self._loop.remove_reader(self._descriptor)
        self._close_socket(linger=linger)


def receive_directly(engine_core: Any) -> None:
    # Clients of other kinds have no such socket.
    socket = getattr(engine_core.resources, "output_socket", None)
    if isinstance(socket, zmq.asyncio.Socket):
        MessageReceiver(socket)
