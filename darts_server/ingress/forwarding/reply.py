"""Pass a replica's answer on to the caller."""

import json
import time

from starlette.types import Send

from darts_server.exceptions import DartsError
from darts_server.http.errors import body_of
from darts_server.http.sse import MEDIA_TYPE
from darts_server.ingress.forwarding.headers import to_caller, value_of, without_length
from darts_server.ingress.replicas.replica import Answer

HELD_BYTES = 8 * 1024 * 1024
"""Answers up to this size reach the caller when they are complete, so that they can be generated again before."""
TAIL_BYTES = 4096
"""Of an answer that is passed on while it arrives: its end is kept, which says how many tokens it has."""
NAMED_EVENTS = ("/darts/", "/v1/responses", "/v1/messages")
"""Routes whose streams have events with names."""


class Reply:
    """The response to one request. ``begun``: whether the caller has got a part of it.

    ``received_at``: when the replica's latest part arrived, on the clock of ``time.perf_counter``.
    """

    def __init__(self, path: str, send: Send) -> None:
        self.begun = False
        self.received_at = 0.0
        self._path = path
        self._send = send
        self._is_stream = False

    async def pass_on(self, answer: Answer) -> bytes:
        """Send an answer as it is; returns its end, or all of a short one.

        An event stream is passed on event by event, from its first event on.

        Raises:
            ReplicaFailure: it broke off.
        """
        self._is_stream = value_of(answer.headers, b"content-type").startswith(MEDIA_TYPE.encode())
        held, tail = b"", b""
        async for chunk in answer.chunks():
            self.received_at = time.perf_counter()
            held += chunk
            tail = (tail + chunk)[-TAIL_BYTES:] if self._is_stream or self.begun else b""
            if self._is_stream:
                whole, held = _whole_events(held)
            elif self.begun or len(held) > HELD_BYTES:
                whole, held = held, b""
            else:
                continue
            if whole:
                await self._pass_part(answer, whole)
        if not self.begun and not self._is_stream:
            await self._start(answer, [(b"content-length", str(len(held)).encode())] if held else None)
            await self._end(held)
            return held
        if held or not self.begun:
            await self._pass_part(answer, held)
        await self._end(b"")
        return tail

    async def break_off(self, error: DartsError) -> None:
        """End an answer that has begun with an error: as an event of a stream, otherwise by closing the connection."""
        if not self._is_stream:
            raise error
        data = json.dumps(body_of(error))
        name = "event: error\n" if self._path.startswith(NAMED_EVENTS) else ""
        await self._end(f"{name}data: {data}\n\n".encode())

    async def _pass_part(self, answer: Answer, part: bytes) -> None:
        if not self.begun:
            await self._start(answer, None)
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def _start(self, answer: Answer, length: list[tuple[bytes, bytes]] | None) -> None:
        headers = to_caller(answer.headers)
        if length is not None:
            headers = [*without_length(headers), *length]
        self.begun = True
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def _end(self, part: bytes) -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": False})


def _whole_events(text: bytes) -> tuple[bytes, bytes]:
    """Divide a part of a stream into whole events, and the beginning of another."""
    ends = [at + len(end) for end in (b"\n\n", b"\r\n\r\n") if (at := text.rfind(end)) >= 0]
    return (text[: max(ends)], text[max(ends) :]) if ends else (b"", text)
