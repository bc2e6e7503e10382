"""Server-sent events, on sse-starlette."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, suppress
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.types import Message, Receive, Scope, Send

from darts_server.http.answers import SLICE_BYTES, slices

MEDIA_TYPE = "text/event-stream"
PING_SECONDS = 15.0
"""Proxies close connections that are silent for a minute, some for half of that."""

# sse-starlette would cut every stream at SIGTERM, but ours end with their content: batches finish during a drain. This
# switch holds for the whole process, in which nothing else streams through sse-starlette.
AppStatus.enable_automatic_graceful_drain = False


class EventStream(EventSourceResponse):
    """Respond with encoded events.

    The next chunk of ``content`` is made when the previous one was sent, so events do not queue for a slow reader.
    Large chunks are sent in slices, so that the web server has no copy of a chunk that its reader does not read.

    Args:
        reader: entered while the response is sent.
        ping_seconds: interval of comments that keep the connection open; 0 for none.
        send_timeout: seconds after which a reader that accepts nothing is dropped.
    """

    def __init__(
        self,
        content: AsyncIterator[bytes],
        reader: AbstractContextManager[object],
        ping_seconds: float = PING_SECONDS,
        send_timeout: float | None = None,
    ) -> None:
        ping = ServerSentEvent(comment="ping", sep="\n")
        super().__init__(
            content, ping=ping_seconds, ping_message_factory=lambda: ping, sep="\n", send_timeout=send_timeout
        )
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.Lock()  # or a comment would be sent in the middle of an event

        async def send_slices(message: Message) -> None:
            async with sending:
                # All chunks but the empty one at the end have more after them.
                if len(message.get("body", b"")) <= SLICE_BYTES:
                    await send(message)
                    return
                for part in slices(message["body"]):
                    await send({**message, "body": part})
                    await asyncio.sleep(0)

        with self._reader, suppress(SendTimeoutError):
            await super().__call__(scope, receive, send_slices)


def encode(name: str, data: Any, event_id: int | None = None) -> bytes:
    """Encode an event with JSON data."""
    # Escaped to ASCII: httpx splits lines at U+2028 and others too, which server-sent events do not.
    return encode_text(name, json.dumps(data, separators=(",", ":")), event_id)


def encode_text(name: str, text: str, event_id: int | None = None) -> bytes:
    """Encode an event with a text in ASCII, of one line."""
    # By hand: sse-starlette searches the text for lines, which takes twice as long as to make it.
    number = "" if event_id is None else f"id: {event_id}\n"
    return f"{number}event: {name}\ndata: {text}\n\n".encode()
