"""Tokens and log-probs of an answer as tensors, in the form of a safetensors file."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from darts_server.http.answers import SLICE_BYTES, HeldResponse, taking_turns

MEDIA_TYPE = "application/vnd.safetensors"
CHUNK_BYTES = SLICE_BYTES
CHUNK_ROWS = 1024
"""Sent at a time, at most: converting them takes no more than some milliseconds, whatever they are made of."""
I64, I32, F32 = (np.dtype(name) for name in ("<i8", "<i4", "<f4"))


@dataclass(slots=True)
class TokenTensors:
    """Rows of tokens, of any lengths, and ``answer``: the rest of the answer, which refers to rows by their numbers.

    The tensors are `offsets` (int64, [rows + 1]), `token_ids` (int32) and `logprobs` (float32), whose row i is from
    offset i to offset i + 1, and `answer` (uint8): JSON. Rows without log-probs have NaN; `logprobs` is left out if
    no row has any. Only references to the rows are kept, and they are converted while they are sent.
    """

    answer: bytes = b""
    _token_ids: list[Sequence[int]] = field(default_factory=list)
    _logprobs: list[Sequence[float] | None] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float] | None) -> int:
        """Add a row; return its number."""
        self._token_ids.append(token_ids)
        self._logprobs.append(logprobs)
        return len(self._token_ids) - 1

    def response(self, held: ExitStack | None = None) -> HeldResponse:
        """Create a response that sends them. ``held``: what is left when they were sent."""
        header, values = self._header()
        # In the event loop: a thread for each chunk would take longer than the chunk.
        parts = taking_turns(self.chunks())
        return HeldResponse(parts, MEDIA_TYPE, len(header) + values, ExitStack() if held is None else held)

    def chunks(self) -> Iterator[bytes]:
        """Yield the file in parts."""
        # By hand: safetensors writes a whole file at once, and keeps the interpreter for 0.3 s per 100 MB.
        offsets = np.cumsum([0, *map(len, self._token_ids)], dtype=I64)
        yield self._header()[0] + offsets.tobytes()
        yield from _converted(self._token_ids, I32)
        if self._has_logprobs:
            pairs = zip(self._token_ids, self._logprobs, strict=True)
            yield from _converted((np.full(len(ids), np.nan) if row is None else row for ids, row in pairs), F32)
        for start in range(0, len(self.answer), CHUNK_BYTES):
            yield self.answer[start : start + CHUNK_BYTES]

    @property
    def _has_logprobs(self) -> bool:
        return any(row is not None for row in self._logprobs)

    def _header(self) -> tuple[bytes, int]:
        """Return how the file begins, and the size of all values, which follow: those of large types first."""
        tokens = sum(map(len, self._token_ids))
        layout = [("offsets", "I64", 8, len(self._token_ids) + 1), ("token_ids", "I32", 4, tokens)]
        layout += [("logprobs", "F32", 4, tokens)] if self._has_logprobs else []
        fields: dict[str, Any] = {}
        end = 0
        for name, dtype, size, count in [*layout, ("answer", "U8", 1, len(self.answer))]:
            begin, end = end, end + size * count
            fields[name] = {"dtype": dtype, "shape": [count], "data_offsets": [begin, end]}
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the values are aligned
        return len(text).to_bytes(8, "little") + text, end


def _converted(rows: Iterable[Any], dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Convert rows to their bytes, those of short rows together."""
    chunk = bytearray()
    for number, row in enumerate(rows, 1):
        values = CHUNK_BYTES // dtype.itemsize
        for start in range(0, len(row), values):
            chunk += np.asarray(row[start : start + values], dtype).tobytes()
            if len(chunk) >= CHUNK_BYTES:
                part = bytes(chunk)
                chunk.clear()  # first: there may be many readers that do not read
                yield part
        if number % CHUNK_ROWS == 0:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk)
