"""The tensors of an answer are a safetensors file, as its own library reads it."""

import asyncio
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from darts_server.http.answers import SLICE_BYTES
from darts_server.http.token_tensors import CHUNK_ROWS, MEDIA_TYPE, TokenTensors

Row = tuple[Sequence[int], Sequence[float] | None]


def chunks_of(rows: Sequence[Row], answer: bytes) -> tuple[list[bytes], dict[str, str]]:
    tensors = TokenTensors()
    assert [tensors.add_row(*row) for row in rows] == list(range(len(rows)))
    tensors.answer = answer
    response = tensors.response(ExitStack())
    assert response.media_type == MEDIA_TYPE

    async def read() -> list[bytes]:
        return [bytes(chunk) async for chunk in response.body_iterator]  # type: ignore[arg-type]

    return asyncio.run(read()), dict(response.headers)


def load(rows: Sequence[Row], answer: bytes = b"{}") -> dict[str, Any]:
    chunks, headers = chunks_of(rows, answer)
    body = b"".join(chunks)
    assert int(headers["content-length"]) == len(body)
    return safetensors.numpy.load(body)


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    found: list[Row] = []
    for tokens in draw(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=6)):
        values = draw(st.lists(st.floats(-100, 0, width=32), min_size=len(tokens), max_size=len(tokens)))
        found.append(
            draw(st.sampled_from([(tokens, values), (array("i", tokens), array("d", values)), (tokens, None)]))
        )
    return found


@given(rows(), st.binary(max_size=30))
def test_every_row_is_read_back_exactly(rows: list[Row], answer: bytes) -> None:
    loaded = load(rows, answer)
    assert loaded["answer"].tobytes() == answer
    assert ("logprobs" in loaded) == any(values is not None for _, values in rows)
    for number, (tokens, values) in enumerate(rows):
        place = slice(*loaded["offsets"][number : number + 2])
        assert loaded["token_ids"][place].tolist() == list(tokens)
        if values is not None:
            assert loaded["logprobs"][place].tolist() == list(values)
        elif "logprobs" in loaded:
            assert np.isnan(loaded["logprobs"][place]).all()
    types = {name: str(tensor.dtype) for name, tensor in loaded.items()}
    assert types.pop("logprobs", "float32") == "float32"
    assert types == {"offsets": "int64", "token_ids": "int32", "answer": "uint8"}


def test_the_event_loop_gets_a_turn_after_each_part() -> None:
    long = array("i", range(3 * SLICE_BYTES // 4 + 1))
    chunks, _ = chunks_of([(long, None), (long, None)], bytes(2 * SLICE_BYTES))
    assert len(chunks) > 8
    assert max(map(len, chunks)) <= 2 * SLICE_BYTES
    short = [([1], None)] * (3 * CHUNK_ROWS)
    chunks, _ = chunks_of(short, b"")
    assert max(len(chunk) for chunk in chunks[1:]) == 4 * CHUNK_ROWS
