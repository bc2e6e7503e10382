"""Tokens and log-probs of an answer as tensors, in the form of a safetensors file."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from darts_server.http.answers import SLICE_BYTES, ClosingResponse, slices, taking_turns

MEDIA_TYPE = "application/vnd.safetensors"
CHUNK_ROWS = 1024
"""Limit of rows in a chunk, which are converted in some milliseconds."""
I64 = np.dtype("<i8")
I32 = np.dtype("<i4")
F32 = np.dtype("<f4")


@dataclass(slots=True)
class TokenTensors:
    """Rows of tokens of any lengths, and the answer that refers to rows by their numbers.

    The file has the tensors `offsets` (int64, [rows + 1]), `token_ids` (int32), `logprobs` (float32) and `answer`
    (uint8, JSON). Row i is from offset i to offset i + 1. Rows without log-probs have NaN; `logprobs` is left out if no
    row has log-probs. The rows are converted while they are sent.
    """

    answer: bytes = b""
    _token_ids: list[Sequence[int]] = field(default_factory=list)
    _logprobs: list[Sequence[float] | None] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float] | None) -> int:
        """Add a row; return its number."""
        self._token_ids.append(token_ids)
        self._logprobs.append(logprobs)
        return len(self._token_ids) - 1

    def response(self, cleanup: ExitStack) -> ClosingResponse:
        """Create a response with the file. ``cleanup`` is closed when the file was sent."""
        header, values_size = self._header()
        # The chunks are made in the event loop: a hop to a thread takes longer than a chunk.
        parts = taking_turns(self.chunks())
        return ClosingResponse(parts, MEDIA_TYPE, len(header) + values_size, cleanup)

    def chunks(self) -> Iterator[bytes]:
        """Yield the file in parts."""
        # The safetensors library writes a whole file at once, and keeps the interpreter for .3 s per 100 MB.
        header, _ = self._header()
        lengths = [len(row) for row in self._token_ids]
        yield header + np.cumsum([0, *lengths], dtype=I64).tobytes()
        yield from _convert_rows(self._token_ids, I32)
        if self._has_logprobs:
            yield from _convert_rows(self._all_logprobs(), F32)
        yield from slices(self.answer)

    @property
    def _has_logprobs(self) -> bool:
        return any(row is not None for row in self._logprobs)

    def _all_logprobs(self) -> Iterator[Any]:
        """Yield each row's log-probs, or NaN."""
        for token_ids, logprobs in zip(self._token_ids, self._logprobs, strict=True):
            if logprobs is None:
                yield np.full(len(token_ids), np.nan)
            else:
                yield logprobs

    def _header(self) -> tuple[bytes, int]:
        """Return the header of the file, and the number of bytes of all tensors after it."""
        tokens = sum(map(len, self._token_ids))
        # Larger types stand first, so that all values are aligned.
        layout = [("offsets", "I64", 8, len(self._token_ids) + 1), ("token_ids", "I32", 4, tokens)]
        if self._has_logprobs:
            layout.append(("logprobs", "F32", 4, tokens))
        layout.append(("answer", "U8", 1, len(self.answer)))

        fields: dict[str, Any] = {}
        end = 0
        for name, dtype, size, count in layout:
            begin = end
            end += size * count
            fields[name] = {"dtype": dtype, "shape": [count], "data_offsets": [begin, end]}
        text = json.dumps(fields, separators=(",", ":")).encode()
        # Pad the header, so that the tensors after it are aligned.
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, end


def _convert_rows(rows: Iterable[Any], dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Yield the values of rows as chunks of bytes. Short rows share a chunk."""
    chunk_values = SLICE_BYTES // dtype.itemsize
    chunk = bytearray()
    for number, row in enumerate(rows, 1):
        for start in range(0, len(row), chunk_values):
            chunk += np.asarray(row[start : start + chunk_values], dtype).tobytes()
            if len(chunk) >= SLICE_BYTES:
                part = bytes(chunk)
                # Clear the chunk before the yield, so that a slow reader does not keep two copies.
                chunk.clear()
                yield part
        # Many short rows take long to convert, so they are sent before the chunk is full.
        if number % CHUNK_ROWS == 0:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk)
