import asyncio
import json
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from darts_server.http.body import STALL_SECONDS
from darts_server.http.security.heads import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    SLICE_BYTES,
    LimitedHttp,
)

pytestmark = pytest.mark.anyio
START = b"POST /a HTTP/1.1\r\nHost: here\r\n"
MEGABYTE = b"x" * 1_000_000


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class Connection(asyncio.Transport):
    """A connection to a server whose app answers with the size of the body."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.taken = 0
        self._is_closing = False
        self.hold = asyncio.Event()
        self.hold.set()
        self.hold_body = asyncio.Event()
        self.hold_body.set()
        self.late = 0
        config = Config(self._answer, interface="asgi3", log_level="critical", access_log=False)
        config.load()
        self._protocol: asyncio.BaseProtocol = LimitedHttp(config, ServerState(), {})
        self._protocol.connection_made(self)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0
        more = True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        await self.hold.wait()
        body = b"%d;" % size
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await self.hold_body.wait()
        await send({"type": "http.response.body", "body": body})

    async def send(self, data: bytes, chunk: int = 256 * 1024) -> bytes:
        """Send in chunks, as long as the server reads, and return its answers."""
        for begin in range(0, len(data), chunk):
            if self._is_closing:
                break
            part = data[begin : begin + chunk]
            self.taken += len(part)
            assert isinstance(self._protocol, asyncio.Protocol)
            self._protocol.data_received(part)
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        return self.written

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:
            self.late += 1
        else:
            self.written += bytes(data)

    def close(self) -> None:
        self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def status(answer: bytes) -> int:
    return int(answer.split(maxsplit=2)[1])


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + MEGABYTE,
        START + MEGABYTE,
        START + b"a: " + MEGABYTE,
        START + b"a: " + b" " * 1_000_000,
        START + b"a: b\r\n" * 100_000,
        START + (b"abcdefgh: " + b"b" * 4_000 + b"\r\n") * 200,
        START + b"Transfer-Encoding: chunked\r\n\r\n0\r\na: " + MEGABYTE,
        START + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 100_000,
        START + b"Transfer-Encoding: chunked\r\n\r\n1;" + MEGABYTE,
    ],
    ids=["url", "name", "value", "spaces", "many", "long", "trailer", "trailers", "extension"],
)
@pytest.mark.parametrize("chunk", [1_000, 256 * 1024])
async def test_a_head_that_is_too_large_is_refused_before_it_is_kept(head: bytes, chunk: int) -> None:
    connection = Connection()
    answer = await connection.send(head, chunk)
    assert status(answer) == 431
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 431
    assert connection.is_closing()
    assert connection.taken <= MAX_HEAD_BYTES + 2 * SLICE_BYTES + chunk


async def test_a_head_within_the_limits_is_served_however_it_arrives() -> None:
    headers = (b"a: " + b"b" * (MAX_HEAD_BYTES // MAX_HEADERS - 10) + b"\r\n") * (MAX_HEADERS - 2)
    request = START + b"Content-Length: 1000000\r\n" + headers + b"\r\n" + MEGABYTE
    for chunk in (10_000, 256 * 1024):
        assert (await Connection().send(request, chunk)).endswith(b"\r\n\r\n1000000;")


async def test_requests_one_after_the_other_have_their_own_limits() -> None:
    request = START + b"Content-Length: 300000\r\na: " + b"b" * 40_000 + b"\r\n\r\n" + b"x" * 300_000
    answer = await Connection().send(request * 5)
    assert answer.count(b"\r\n\r\n300000;") == 5


@pytest.mark.parametrize(("waiting", "is_refused"), [(MAX_PIPELINED, False), (MAX_PIPELINED + 2, True)])
async def test_few_requests_wait_on_a_connection(waiting: int, is_refused: bool) -> None:
    connection = Connection()
    answer = await connection.send(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * waiting)
    assert (b"HTTP/1.1 429" in answer) is is_refused
    assert is_refused or answer.count(b"0;") == waiting


async def test_nothing_is_written_for_any_request_of_a_connection_that_is_lost() -> None:
    connection = Connection()
    connection.hold.clear()
    await connection.send(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 3)
    connection.get_protocol().connection_lost(None)
    connection.hold.set()
    assert await connection.send(b"") == b""
    assert connection.late == 0


async def test_a_head_that_waits_for_an_earlier_answer_has_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def note(delay: float, *call: Any) -> asyncio.TimerHandle:
        seconds.append(delay)
        return call_later(delay, *call)

    monkeypatch.setattr(loop, "call_later", note)
    connection = Connection()
    connection.hold.clear()
    await connection.send(START + b"Content-Length: 0\r\n\r\n" + START)
    assert STALL_SECONDS not in seconds


async def test_no_error_is_written_into_an_answer_that_has_begun() -> None:
    connection = Connection()
    connection.hold_body.clear()
    begun = await connection.send(START + b"Content-Length: 0\r\n\r\n")
    assert status(begun) == 200
    assert await connection.send(START + MEGABYTE) == begun
    assert connection.is_closing()


async def test_a_head_that_does_not_end_is_refused_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[tuple[Any, ...]] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def note(seconds: float, *call: Any) -> asyncio.TimerHandle:
        if seconds == STALL_SECONDS:
            timers.append(call)
        return call_later(seconds, *call)

    monkeypatch.setattr(loop, "call_later", note)
    connection = Connection()
    for part in (START, b"a", b": b\r\n"):
        await connection.send(part)
    ((late, *given),) = timers
    late(*given)
    assert status(connection.written) == 408
    assert connection.is_closing()

    answered = Connection()
    for part in (START, b"Content-Length: 0\r\n", b"\r\n", START + b"Content-Length: 0\r\n\r\n"):
        await answered.send(part)
    # The timers of the head that came in parts.
    assert len(timers) == 2


async def test_an_upgrade_to_a_web_socket_leaves_the_protocol() -> None:
    connection = Connection()
    await connection.send(
        b"GET / HTTP/1.1\r\nHost: here\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n" + MEGABYTE
    )
    assert not isinstance(connection.get_protocol(), LimitedHttp)
