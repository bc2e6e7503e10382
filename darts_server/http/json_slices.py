"""Find the objects of a long list in a JSON text without parsing it, so that they can be parsed in slices.

A parser keeps the interpreter until it has read its whole text. Here no call takes longer than a window does.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WINDOW_BYTES = 64 * 1024
"""Searched at once, in a tenth of a millisecond."""
SPACE = b" \t\n\r"
_QUOTE_OR_BRACKET = re.compile(rb'["\[\]{}]')
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_COLON = re.compile(rb"[ \t\n\r]*+:[ \t\n\r]*+")
MAX_ESCAPED = len(r"\u0000")
"""Bytes of a character in a JSON string."""


@dataclass(frozen=True, slots=True)
class Objects:
    """A list in a text, which begins and ends with its brackets. ``spans``: where each object is."""

    start: int
    end: int
    spans: Sequence[tuple[int, int]]

    def slices(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield start and end of successive objects that have ``size`` bytes together, or of one that has more."""
        first: int | None = None
        last = 0
        for start, end in self.spans:
            if first is not None and end - first > size:
                yield first, last
                first = None
            first, last = start if first is None else first, end
        if first is not None:
            yield first, last


def find_objects(text: bytes, field: str) -> Objects | None:
    """Find the list of objects in a field of the outermost object, the last one if it is given twice.

    ``None`` if there is no such list, or it has something else in it. The text inside the objects, and outside the
    list, may still be no JSON.
    """
    depth, begin = 0, 0
    array: int | None = None
    last: int | None = None
    spans: list[tuple[int, int]] = []
    for start, end in strings_and_brackets(text):
        match text[start : start + 1]:
            case b'"':
                if depth == 1 and _is_name(text, start, end, field) and (colon := _COLON.match(text, end)):
                    array = colon.end() if text[colon.end() : colon.end() + 1] == b"[" else None
                    last, spans = None, []
            case b"[" | b"{":
                depth += 1
                if depth == 3:
                    begin = start
            case _:
                depth -= 1
                if array is not None and last is None:
                    if depth == 2:
                        spans.append((begin, end))
                    elif depth <= 1:
                        last = end
    return Objects(array, last, spans) if array is not None and last and _is_list(text, array, last, spans) else None


def strings_and_brackets(text: bytes, at: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield start and end of each string, and of each bracket outside of them. The last string may have no end."""
    stop = len(text) if stop is None else stop
    while at < stop:
        found = _QUOTE_OR_BRACKET.search(text, at, min(at + WINDOW_BYTES, stop))
        if found is None:
            at += WINDOW_BYTES
            continue
        at = found.end()
        if found[0] == b'"':
            at = _end_of_string(text, at)
        yield found.start(), at


def _is_name(text: bytes, start: int, end: int, field: str) -> bool:
    """Whether a string in the text is that name, which may be written with escapes."""
    if end - start > MAX_ESCAPED * len(field) + 2:
        return False
    try:
        return bool(json.loads(text[start:end]) == field)
    except ValueError:
        return False


def _is_list(text: bytes, start: int, end: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a list has only these objects in it, and commas between them."""
    if text[end - 1 : end] != b"]":
        return False
    edges = [start + 1, *(edge for span in spans for edge in span), end - 1]
    gaps = [text[left:right].strip(SPACE) for left, right in zip(edges[::2], edges[1::2], strict=True)]
    return not gaps[0] and not gaps[-1] and all(gap == b"," for gap in gaps[1:-1])


def _end_of_string(text: bytes, at: int) -> int:
    while at < len(text):
        read = _IN_STRING.match(text, at, at + WINDOW_BYTES)
        assert read is not None, "it matches nothing, too"
        if read.end() < len(text) and text[read.end()] == ord('"'):
            return read.end() + 1
        at = read.end() if read.end() > at else len(text)
    return at
