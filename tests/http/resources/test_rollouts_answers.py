"""Events of a batch as they are sent, on the scripted engine. Arrays are encoded as lists are."""

import json
from array import array
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.engine.scripted import settle
from darts_server.http.resources.rollouts import CHUNK_BYTES, encode_ascii, encode_json, event_chunks
from darts_server.rollout.batches.run import StreamMode
from tests.rollout.batches.streams import batch_request, idempotency_key, new_registry, token_stream
from tests.rollout.helpers import Harness, lengths

pytestmark = pytest.mark.anyio


def events(text: bytes) -> list[tuple[str, int, dict[str, Any]]]:
    frames = [dict(line.split(": ", 1) for line in frame.split("\n")) for frame in text.decode().split("\n\n") if frame]
    return [(frame["event"], int(frame["id"]), json.loads(frame["data"])) for frame in frames]


async def test_events_that_come_between_two_reads_are_sent_together() -> None:
    harness = Harness(lengths(40))
    batch = await new_registry(harness, "off").open(batch_request(1, size=2), token_stream(4))
    with batch.listen() as listener:
        async with aclosing(event_chunks(listener, StreamMode.TOKENS)) as stream:
            began = events(await anext(stream))
            for _ in range(20):
                await harness.engine.step()
            [first, second] = events(await anext(stream))
            await harness.engine.run()
            rest = [event for text in [text async for text in stream] for event in events(text)]
    assert [name for name, _, _ in began] == ["batch"]
    assert (first[0], first[1], second[1]) == ("delta", 2, 3)
    assert len(first[2]["token_ids"]) > 15
    assert [name for name, _, _ in rest] == ["delta", "trajectory", "delta", "trajectory", "group", "done"]
    assert [number for _, number, _ in rest] == list(range(4, 10))


async def test_chunks_are_not_much_larger_than_the_web_servers_buffer() -> None:
    harness = Harness(lengths(3000))
    batch = await new_registry(harness, "off").open(batch_request(10, size=8), token_stream(10_000), idempotency_key())
    await settle()
    await harness.engine.run()
    with batch.listen() as listener:
        sizes = [len(text) async for text in event_chunks(listener, StreamMode.TOKENS)]
    assert len(sizes) > 10
    assert max(sizes) < 3 * CHUNK_BYTES


floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(floats), st.lists(st.integers(-(2**31), 2**31 - 1)), texts)
def test_arrays_are_read_back_exactly(numbers: list[float], tokens: list[int], text: str) -> None:
    value = {"numbers": array("d", numbers), "tokens": array("i", tokens), "same": np.array(numbers), "text": text}
    expected = {"numbers": numbers, "tokens": tokens, "same": numbers, "text": text}
    assert json.loads(encode_json(value)) == expected
    escaped = encode_ascii(value)
    assert escaped.isascii()
    assert "\n" not in escaped, "it is one line of an event"
    assert json.loads(escaped) == expected


def test_numbers_that_json_does_not_have_are_null() -> None:
    assert encode_json([float("nan"), array("d", [float("inf"), 1.0])]) == b"[null,[null,1.0]]"


@pytest.mark.parametrize("value", [object(), {"a": {1, object()}}])
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        encode_json(value)
