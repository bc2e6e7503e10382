import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from darts_server.http.answers import SLICE_BYTES, ClosingResponse, split_into_slices, with_turns_between

MEDIA_TYPE = "application/vnd.safetensors"
CHUNK_ROWS = 1024
"""Limit of rows in a chunk, which are converted in some milliseconds."""
I64 = np.dtype("<i8")
I32 = np.dtype("<i4")
F32 = np.dtype("<f4")


@dataclass(slots=True)
class TokenTensors:
    """Rows of tokens of any lengths, and the answer that refers to rows by their numbers.

    The safetensors file has the tensors `offsets` (int64, [rows + 1]), `token_ids` (int32), `logprobs` (float32) and
    `answer` (uint8, JSON). Row i is from offset i to offset i + 1. Rows without log-probs have NaN; `logprobs` is left
    out if no row has log-probs. The rows are converted while they are sent.
    """

    answer: bytes = b""
    _token_ids: list[Sequence[int]] = field(default_factory=list)
    _logprobs: list[Sequence[float] | None] = field(default_factory=list)

    def add_row(self, token_ids: Sequence[int], logprobs: Sequence[float] | None) -> int:
        self._token_ids.append(token_ids)
        self._logprobs.append(logprobs)
        return len(self._token_ids) - 1

    def response(self, cleanup: ExitStack) -> ClosingResponse:
        """``cleanup`` is closed when the file was sent."""
        header, tensor_bytes = self._encode_header()
        # The chunks are made in the event loop: a hop to a thread takes longer than a chunk.
        parts = with_turns_between(self.encode_in_chunks())
        return ClosingResponse(parts, MEDIA_TYPE, len(header) + tensor_bytes, cleanup)

    def encode_in_chunks(self) -> Iterator[bytes]:
        # The safetensors library writes a whole file at once, and keeps the interpreter for .3 s per 100 MB.
        header, _ = self._encode_header()
        lengths = [len(row) for row in self._token_ids]
        offsets = np.cumsum([0, *lengths], dtype=I64)
        yield header + offsets.tobytes()
        yield from _convert_rows(self._token_ids, I32)
        if self._has_logprobs:
            yield from _convert_rows(self._logprobs_or_nan(), F32)
        yield from split_into_slices(self.answer)

    @property
    def _has_logprobs(self) -> bool:
        return any(row is not None for row in self._logprobs)

    def _logprobs_or_nan(self) -> Iterator[Any]:
        for token_ids, logprobs in zip(self._token_ids, self._logprobs, strict=True):
            if logprobs is None:
                yield np.full(len(token_ids), np.nan)
            else:
                yield logprobs

    def _encode_header(self) -> tuple[bytes, int]:
        """Return the file's header, and the number of bytes after it."""
        num_tokens = sum(map(len, self._token_ids))
        # Larger types stand first, so that all values are aligned.
        layout = [("offsets", "I64", 8, len(self._token_ids) + 1), ("token_ids", "I32", 4, num_tokens)]
        if self._has_logprobs:
            layout.append(("logprobs", "F32", 4, num_tokens))
        layout.append(("answer", "U8", 1, len(self.answer)))

        fields: dict[str, Any] = {}
        end = 0
        for name, dtype, value_bytes, count in layout:
            begin = end
            end += value_bytes * count
            fields[name] = {"dtype": dtype, "shape": [count], "data_offsets": [begin, end]}
        text = json.dumps(fields, separators=(",", ":")).encode()
        # Pad the header, so that the tensors after it are aligned.
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, end


def _convert_rows(rows: Iterable[Any], dtype: np.dtype[Any]) -> Iterator[bytes]:
    # Short rows share a chunk.
    max_values = SLICE_BYTES // dtype.itemsize
    chunk = bytearray()
    for number, row in enumerate(rows, 1):
        # A long row is converted in several pieces.
        for start in range(0, len(row), max_values):
            chunk += np.asarray(row[start : start + max_values], dtype).tobytes()
            if len(chunk) >= SLICE_BYTES:
                full_chunk = bytes(chunk)
                # Clear the chunk before the yield, so that a slow reader does not keep two copies.
                chunk.clear()
                yield full_chunk
        # Many short rows take long to convert, so they are sent before the chunk is full.
        if number % CHUNK_ROWS == 0:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk)
