"""Server-sent events, on sse-starlette."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, suppress
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.types import Message, Receive, Scope, Send

from darts_server.http.answers import SLICE_BYTES, split_into_slices

MEDIA_TYPE = "text/event-stream"
PING_SECONDS = 15.0
"""Interval of comments. Some proxies close a connection that is silent for 30 seconds."""

# sse-starlette would cut every stream at SIGTERM, but our batches finish while the server drains. The switch holds for
# the whole process, which uses sse-starlette for no other streams.
AppStatus.enable_automatic_graceful_drain = False


class EventStream(EventSourceResponse):
    """Makes the next chunk of ``content`` when the previous chunk was sent, and sends large chunks in slices.

    So neither events nor bytes queue for a slow reader. ``reader`` is entered while the response is sent.
    ``ping_seconds``: 0 for no comments. ``send_timeout``: seconds for a reader that accepts nothing.
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
            content,
            ping=ping_seconds,
            ping_message_factory=lambda: ping,
            sep="\n",
            send_timeout=send_timeout,
        )
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Without the lock, a comment could be sent in the middle of an event.
        one_message_at_a_time = asyncio.Lock()

        async def send_in_slices(message: Message) -> None:
            async with one_message_at_a_time:
                if len(message.get("body", b"")) <= SLICE_BYTES:
                    await send(message)
                    return
                # The last message of a stream is empty, so every slice has `more_body`.
                for part in split_into_slices(message["body"]):
                    await send({**message, "body": part})
                    await asyncio.sleep(0)

        # A reader that stalls cannot get the error.
        with self._reader, suppress(SendTimeoutError):
            await super().__call__(scope, receive, send_in_slices)


def encode_event(name: str, data: Any, event_id: int | None = None) -> bytes:
    # ASCII only, because httpx also splits lines at U+2028 and similar characters.
    return encode_text_event(name, json.dumps(data, separators=(",", ":")), event_id)


def encode_text_event(name: str, text: str, event_id: int | None = None) -> bytes:
    """Encode an event with one line of ASCII text."""
    # sse-starlette's own encoder searches the text for line breaks, which doubles the time.
    id_line = "" if event_id is None else f"id: {event_id}\n"
    return f"{id_line}event: {name}\ndata: {text}\n\n".encode()
