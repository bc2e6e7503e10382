from typing import Any

import anyio
import pytest
from fastapi import Request

from darts_server.exceptions import InvalidRequest, TooLarge
from darts_server.http.body import read_body

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Sender:
    """Sends chunks, then ends, hangs or disconnects; counts the chunks that were received."""

    def __init__(self, *chunks: bytes, then: str = "end", announced: str | None = None) -> None:
        self.chunks = list(chunks)
        self.then = then
        self.received = 0
        headers = [] if announced is None else [(b"content-length", announced.encode())]
        self.request = Request({"type": "http", "method": "PUT", "headers": headers}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        if self.chunks:
            self.received += 1
            return {"type": "http.request", "body": self.chunks.pop(0), "more_body": True}
        if self.then == "hang":
            await anyio.sleep_forever()
        return {"type": "http.request", "body": b""} if self.then == "end" else {"type": "http.disconnect"}


async def test_chunks_are_joined() -> None:
    assert await read_body(Sender(b"ab", b"", b"c").request, 3) == b"abc"
    assert await read_body(Sender().request, 0) == b""


async def test_a_body_that_announces_too_much_is_not_read() -> None:
    sender = Sender(b"abcd", announced="4")
    with pytest.raises(TooLarge, match="at most 3 bytes"):
        await read_body(sender.request, 3)
    assert sender.received == 0


async def test_a_body_without_announced_size_is_read_up_to_the_limit() -> None:
    sender = Sender(*[b"a" * 10] * 100)
    with pytest.raises(TooLarge):
        await read_body(sender.request, 35)
    assert sender.received == 4


@pytest.mark.parametrize("then", ["hang", "leave"])
async def test_a_sender_that_hangs_or_disconnects_is_an_error(then: str) -> None:
    with pytest.raises(InvalidRequest, match="is incomplete"):
        await read_body(Sender(b"a", then=then).request, 10, stall_seconds=0.01)
