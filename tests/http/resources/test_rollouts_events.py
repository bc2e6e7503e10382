"""Events as they go over the wire, on the scripted engine."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from darts_server.engine.scripted import settle
from darts_server.http.resources.rollouts_events import LARGEST_PIECE, STILL_HERE, pieces
from darts_server.rollout.batches.run import Stream
from tests.rollout.batches.streams import ask, batches, claim, tokens
from tests.rollout.helpers import House, lengths

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def piece(stream: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(stream)


def events(text: bytes) -> list[tuple[str, int, dict[str, object]]]:
    frames = [dict(line.split(": ", 1) for line in frame.split("\n")) for frame in text.decode().split("\n\n") if frame]
    return [(frame["event"], int(frame["id"]), json.loads(frame["data"])) for frame in frames]


async def test_what_came_meanwhile_goes_out_together() -> None:
    house = House(lengths(40))
    batch = await batches(house, "off").open(ask(1, size=2), tokens(4))
    with batch.listen() as listener:
        async with aclosing(pieces(listener, Stream.TOKENS)) as stream:
            began = events(await piece(stream))
            for _ in range(20):
                await house.engine.step()
            [first, second] = events(await piece(stream))
            await house.engine.run()
            rest = [event for text in [text async for text in stream] for event in events(text)]
    assert [name for name, _, _ in began] == ["batch"]
    assert (first[0], first[1], second[1]) == ("delta", 2, 3)
    assert len(first[2]["token_ids"]) > 15  # type: ignore[arg-type]
    assert [name for name, _, _ in rest] == ["delta", "trajectory", "delta", "trajectory", "group", "done"]
    assert [number for _, number, _ in rest] == list(range(4, 10))


async def test_a_quiet_stream_says_that_it_is_still_there() -> None:
    house = House(lengths(5))
    batch = await batches(house, "off").open(ask(1, size=1), tokens(100))
    with batch.listen() as listener:
        async with aclosing(pieces(listener, Stream.TOKENS, quiet=0.01)) as stream:
            assert events(await piece(stream))[0][0] == "batch"
            assert [await piece(stream) for _ in range(3)] == [STILL_HERE] * 3
            await house.engine.run()
            assert events(await piece(stream))[-1][0] == "done"


async def test_pieces_are_not_much_larger_than_what_is_taken_at_once() -> None:
    house = House(lengths(3000))
    batch = await batches(house, "off").open(ask(10, size=8), tokens(10_000), claim())
    await settle()
    await house.engine.run()
    with batch.listen() as listener:
        sizes = [len(text) async for text in pieces(listener, Stream.TOKENS)]
    assert len(sizes) > 10
    assert max(sizes) < 3 * LARGEST_PIECE
