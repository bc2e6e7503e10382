"""Pass a replica's answer on to the caller."""

import json
import time
from collections.abc import Sequence

from starlette.types import Send

from darts_server.exceptions import DartsError
from darts_server.http.errors import body_of
from darts_server.http.sse import MEDIA_TYPE
from darts_server.ingress.forwarding.headers import to_caller, without_length
from darts_server.ingress.replicas.replica import Answer, value_of

HELD_BYTES = 8 * 1024 * 1024
"""Answers up to this size reach the caller when they are complete, so that they can be generated again before."""
TAIL_BYTES = 4096
"""Of an answer that is passed on while it arrives: its end is kept, which says how many tokens it has."""
EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
MAX_END = max(map(len, EVENT_ENDS))
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
        parts, size, tail = list[bytes](), 0, b""
        async for chunk in answer.chunks():
            self.received_at = time.perf_counter()
            tail = (tail + chunk[-TAIL_BYTES:])[-TAIL_BYTES:] if self._is_stream or self.begun else b""
            end = _end_of_events(parts, chunk) if self._is_stream else len(chunk)
            parts.append(chunk[:end] if end else chunk)
            size += len(chunk)
            if end and (self._is_stream or self.begun or size > HELD_BYTES):
                whole = b"".join(parts)
                parts, size = ([rest], len(rest)) if (rest := chunk[end:]) else ([], 0)
                await self._pass_part(answer, whole)
        held = b"".join(parts)
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


def _end_of_events(parts: Sequence[bytes], chunk: bytes) -> int:
    """Return where the last whole event ends in a chunk that comes after these parts of an event; 0 if none does.

    Only the chunk is searched, with as many bytes before it as the end of an event may begin with.
    """
    before = b""
    for part in reversed(parts):
        before = part[-(MAX_END - 1) :] + before
        if len(before) >= MAX_END - 1:
            break
    before = before[-(MAX_END - 1) :]
    text = before + chunk
    ends = [at + len(end) for end in EVENT_ENDS if (at := text.rfind(end)) >= 0]
    return max(0, max(ends, default=0) - len(before))
