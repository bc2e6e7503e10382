"""Connections over real sockets: messages arrive whole, and malformed bytes end only their connection."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.exceptions import EngineDead
from darts_server.vllm.fleet import transport
from darts_server.vllm.fleet.transport import LENGTH, Connection, Hello, MalformedMessage, Parser, connect, listen

pytestmark = pytest.mark.anyio
TOKEN = "secret"
HELLO = Hello(TOKEN, 1, b"ready", "ipc://states")


class End:
    """One end of a connection, and the messages that it has received."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def message_received(self, parts: list[bytes]) -> None:
        if parts == [b"wrong"]:
            raise ValueError("not in order")
        self.messages.put_nowait(parts)

    def connection_lost(self, reason: str) -> None:
        self.reason.set_result(reason)


class Coordinator:
    def __init__(self) -> None:
        self.ends: list[End] = []
        self.connections: list[Connection] = []
        self.hellos: list[Hello] = []
        self.port = 0

    def create_receiver(self, hello: Hello, connection: Connection) -> End:
        if hello.rank > 5:
            raise ValueError(f"rank {hello.rank}")
        self.hellos.append(hello)
        self.connections.append(connection)
        self.ends.append(End())
        return self.ends[-1]

    async def host(self, hello: Hello = HELLO, wait: bool = True) -> tuple[End, Connection]:
        """Connect a host. ``wait``: whether to wait until it has joined."""
        end = End()
        before = len(self.ends)
        connection = await connect("127.0.0.1", self.port, hello, end)
        while wait and len(self.ends) == before:
            await asyncio.sleep(0.001)
        return end, connection


@asynccontextmanager
async def coordinator() -> AsyncIterator[Coordinator]:
    made = Coordinator()
    hub = await listen("127.0.0.1", TOKEN, made.create_receiver)
    made.port = int(hub.sockets[0].getsockname()[1])
    try:
        async with asyncio.timeout(20):
            yield made
    finally:
        hub.close()
        for connection in made.connections:
            connection.close("the test has ended")


async def test_messages_of_any_size_arrive_whole_and_in_order_in_both_directions() -> None:
    messages = [[b"a"], [b"", bytes(3_000_000), b"c"], [bytes([number % 251]) for number in range(600)]]
    async with coordinator() as there:
        end, connection = await there.host()
        for message in messages:
            connection.send(message)
        assert [await there.ends[0].messages.get() for _ in messages] == messages
        for message in messages:
            there.connections[0].send([memoryview(part) for part in message])
        assert [await end.messages.get() for _ in messages] == messages
        assert there.hellos == [HELLO]


async def test_a_closed_connection_is_noticed_at_both_ends_and_takes_no_messages() -> None:
    async with coordinator() as there:
        end, connection = await there.host()
        there.connections[0].close("not wanted any more")
        assert await there.ends[0].reason == "not wanted any more"
        await end.reason
        connection.send([b"nobody hears this"])


async def test_malformed_bytes_end_only_their_connection() -> None:
    async with coordinator() as there:
        end, connection = await there.host()
        other, _ = await there.host(Hello(TOKEN, 2, b"", ""))
        connection.send([b"wrong"])
        await end.reason
        there.connections[1].send([b"still here"])
        assert await other.messages.get() == [b"still here"]


@pytest.mark.parametrize(
    ("hello", "says"),
    [(Hello("guess", 1, b"", ""), "token"), (Hello(TOKEN, 9, b"", ""), "rank 9"), (Hello("ä", 1, b"", ""), "token")],
)
async def test_strangers_are_refused(hello: Hello, says: str, caplog: pytest.LogCaptureFixture) -> None:
    async with coordinator() as there:
        with caplog.at_level(logging.WARNING):
            end, _ = await there.host(hello, wait=False)
            await end.reason
            await asyncio.sleep(0.01)
        assert says in caplog.text
        assert not there.hellos


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 40, LENGTH.pack(1) + LENGTH.pack(2**31), b""])
async def test_a_first_message_that_is_no_hello_is_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HELLO_SECONDS", 0.1)
    async with coordinator() as there:
        reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
        writer.write(data)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        assert not there.hellos


async def test_a_missing_coordinator_is_reported() -> None:
    async with coordinator() as there:
        port = there.port
    with pytest.raises(EngineDead, match="cannot be reached"):
        await connect("127.0.0.1", port, HELLO, End())


@given(st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=5), max_size=6), st.data())
def test_messages_are_found_however_their_bytes_are_split(messages: list[list[bytes]], data: st.DataObject) -> None:
    stream = b"".join(
        LENGTH.pack(len(parts)) + b"".join(LENGTH.pack(len(part)) for part in parts) + b"".join(parts)
        for parts in messages
    )
    parser = Parser(1000)
    found: list[list[bytes]] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += parser.feed(stream[:size])
        stream = stream[size:]
    assert found == messages


@given(st.binary(min_size=4, max_size=200))
def test_any_bytes_are_messages_or_malformed(stream: bytes) -> None:
    try:
        for message in Parser(100).feed(stream):
            assert sum(map(len, message)) <= 100
    except MalformedMessage:
        pass
