"""The served weights as one safetensors file, whatever files they were loaded from."""

import errno
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO

from darts_server.files import open_unchanged, stamp_of
from darts_server.weights.tensors import TensorFile, TensorSet, names_by_file

CHUNK_BYTES = 1 << 22
ALIGNMENT = 8
"""Data begins at a multiple of it, as the safetensors library writes it."""


@dataclass(frozen=True, slots=True)
class Span:
    """A tensor's data in an open file, from ``start``. ``size``: in bytes."""

    file: BinaryIO
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class WeightsExport:
    """Weights that can be read while the server goes on, also to other weights. ``size``: of the file, in bytes."""

    version: int
    size: int
    _header: bytes
    _spans: list[Span]
    _opened: list[tuple[TensorFile, BinaryIO]]
    _closing: ExitStack

    def chunks(self) -> Iterator[bytes]:
        """Yield the file's bytes, once.

        Raises:
            OSError: a file was changed meanwhile; what was yielded is not a whole file.
        """
        with self._closing:
            yield self._header
            for span in self._spans[:-1]:
                yield from _read(span)
            last = b""
            for chunk in _read(self._spans[-1]):
                if last:
                    yield last
                last = chunk
            for tensors, file in self._opened:
                if stamp_of(file) != tensors.stamp:
                    raise OSError(errno.ESTALE, "was changed while it was read", str(tensors.path))
            yield last  # without it the file is not whole

    def close(self) -> None:
        self._closing.close()


def open_weights(tensors: TensorSet, version: int) -> WeightsExport:
    """Open the files of a set of tensors.

    Raises:
        OSError: one of them is gone, or has changed.
    """
    header: dict[str, Any] = {}
    spans, opened, at = list[Span](), [], 0
    with ExitStack() as stack:
        for file, names in names_by_file(tensors):
            data = stack.enter_context(open_unchanged(file.path, file.stamp))
            opened.append((file, data))
            length = int.from_bytes(data.read(8), "little")
            described = json.loads(data.read(length))
            for name in sorted(names, key=lambda each: described[each]["data_offsets"][0]):
                start, end = described[name]["data_offsets"]
                header[name] = {**described[name], "data_offsets": [at, at + end - start]}
                spans.append(Span(data, 8 + length + start, end - start))
                at += end - start
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        head = len(text).to_bytes(8, "little") + text
        return WeightsExport(version, len(head) + at, head, spans, opened, stack.pop_all())


def _read(span: Span) -> Iterator[bytes]:
    span.file.seek(span.start)
    left = span.size
    while left:
        chunk = span.file.read(min(CHUNK_BYTES, left))
        if not chunk:
            raise OSError(errno.ESTALE, "was cut off while it was read", span.file.name)
        left -= len(chunk)
        yield chunk
