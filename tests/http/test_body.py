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
    """Sends chunks, then ends, hangs or goes away; counts what was taken."""

    def __init__(self, *chunks: bytes, then: str = "end", announced: str | None = None) -> None:
        self.chunks = list(chunks)
        self.then = then
        self.taken = 0
        headers = [] if announced is None else [(b"content-length", announced.encode())]
        self.request = Request({"type": "http", "method": "PUT", "headers": headers}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        if self.chunks:
            self.taken += 1
            return {"type": "http.request", "body": self.chunks.pop(0), "more_body": True}
        if self.then == "hang":
            await anyio.sleep_forever()
        return {"type": "http.request", "body": b""} if self.then == "end" else {"type": "http.disconnect"}


async def test_chunks_come_together() -> None:
    assert await read_body(Sender(b"ab", b"", b"c").request, 3) == b"abc"
    assert await read_body(Sender().request, 0) == b""


async def test_nothing_is_taken_of_a_body_that_announces_too_much() -> None:
    sender = Sender(b"abcd", announced="4")
    with pytest.raises(TooLarge, match="at most 3 bytes"):
        await read_body(sender.request, 3)
    assert sender.taken == 0


async def test_a_body_that_does_not_announce_its_size_is_taken_up_to_the_limit() -> None:
    sender = Sender(*[b"a" * 10] * 100)
    with pytest.raises(TooLarge):
        await read_body(sender.request, 35)
    assert sender.taken == 4


@pytest.mark.parametrize("then", ["hang", "leave"])
async def test_a_sender_that_hangs_or_leaves_is_not_waited_for(then: str) -> None:
    with pytest.raises(InvalidRequest, match="did not come to its end"):
        await read_body(Sender(b"a", then=then).request, 10, stall=0.01)
