"""Copies of a body."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from darts_server.ingress.everyone.copies import Copies

pytestmark = pytest.mark.anyio


async def whole(copies: Copies, number: int) -> bytes:
    return b"".join([chunk async for chunk in copies.copy(number)])


async def test_each_copy_is_whole() -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b"c"

    copies = Copies(source(), 2)
    _, *read = await asyncio.gather(copies.run(), whole(copies, 0), whole(copies, 1))
    assert read == [b"abc", b"abc"]


async def test_a_copy_of_what_was_not_read_to_its_end_does_not_look_whole() -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"ab"
        await asyncio.Event().wait()

    copies = Copies(source(), 1)
    reading, copy = asyncio.create_task(copies.run()), asyncio.create_task(whole(copies, 0))
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(ConnectionError, match="not read to its end"):
        await copy
