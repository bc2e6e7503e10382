"""Streams of server-sent events, called as the web server does."""

import json
from collections.abc import AsyncGenerator
from contextlib import ExitStack, nullcontext

import anyio
import pytest
from httpx import Response
from httpx_sse import EventSource
from sse_starlette.sse import AppStatus
from starlette.types import Message

from darts_server.http.answers import SLICE_BYTES
from darts_server.http.sse import EventStream, encode_event

pytestmark = pytest.mark.anyio
SCOPE = {"type": "http", "method": "GET", "asgi": {"spec_version": "2.3"}}


class Reader:
    """A connection. ``sent``: the bodies of the messages that were sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.may_read = anyio.Event()
        self.may_read.set()

    async def receive(self) -> Message:
        await anyio.sleep_forever()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            await self.may_read.wait()
            self.sent.append(message["body"])


async def numbers(made: list[int], count: int = 3) -> AsyncGenerator[bytes, None]:
    for number in range(count):
        made.append(number)
        yield encode_event("number", number, number)


async def stalled() -> AsyncGenerator[bytes, None]:
    yield encode_event("first", 1)
    await anyio.sleep_forever()


async def test_a_quiet_stream_sends_comments() -> None:
    reader = Reader()
    stream = EventStream(stalled(), nullcontext(), ping_seconds=0.05)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream, SCOPE, reader.receive, reader.send)
        with anyio.fail_after(10):
            while len(reader.sent) < 4:
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    assert reader.sent[1:4] == [b": ping\n\n"] * 3


async def test_events_are_sent_in_order_to_the_end_and_do_not_queue_for_a_slow_reader() -> None:
    reader = Reader()
    made = list[int]()
    reader.may_read = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(EventStream(numbers(made), nullcontext()), SCOPE, reader.receive, reader.send)
        await anyio.sleep(0.05)
        assert made == [0]
        reader.may_read.set()
    assert made == [0, 1, 2]
    assert reader.sent == [f"id: {n}\nevent: number\ndata: {n}\n\n".encode() for n in range(3)] + [b""]


async def test_a_reader_that_accepts_nothing_is_dropped() -> None:
    reader = Reader()
    left = ExitStack()
    reader.may_read = anyio.Event()
    gone = list[bool]()
    left.callback(gone.append, True)
    with anyio.fail_after(10):
        await EventStream(stalled(), left, send_timeout=0.01)(SCOPE, reader.receive, reader.send)
    assert gone


async def test_a_stop_of_the_web_server_does_not_cut_a_stream() -> None:
    """Batches finish during a drain, and only our own shutdown ends their streams."""
    AppStatus.original_handler, original = None, AppStatus.original_handler
    try:
        AppStatus.handle_exit()
    finally:
        AppStatus.original_handler = original
    assert not AppStatus.should_exit


def test_line_separators_in_data_do_not_split_an_event() -> None:
    data = {"text": "a\nb\r\u2028c\x85"}
    response = Response(200, headers={"content-type": "text/event-stream"}, content=encode_event("text", data))
    [event] = EventSource(response).iter_sse()
    assert (event.event, json.loads(event.data)) == ("text", data)


async def test_a_large_event_is_sent_in_slices_without_a_comment_between_them() -> None:
    event = encode_event("large", "x" * (5 * SLICE_BYTES))

    async def events() -> AsyncGenerator[bytes, None]:
        yield event
        await anyio.sleep(0.05)
        yield event

    class SlowReader(Reader):
        async def send(self, message: Message) -> None:
            await anyio.sleep(0.01)
            await super().send(message)

    reader = SlowReader()
    await EventStream(events(), nullcontext(), ping_seconds=0.01)(SCOPE, reader.receive, reader.send)
    assert max(map(len, reader.sent)) == SLICE_BYTES
    sent = b"".join(reader.sent)
    assert sent.count(event) == 2
    assert b": ping" in sent
