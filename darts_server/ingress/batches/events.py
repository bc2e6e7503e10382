"""Server-sent events of a part of a batch."""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

GROUP = "group"
NEEDS = "needs"
"""What groups of a part report, for the deadline of the batch. Callers do not get it."""
_NUMBER = re.compile(rb'"number":(\d+)')
_LENGTH = re.compile(rb'"length":(\d+)')


@dataclass(frozen=True, slots=True)
class Event:
    """An event. ``data``: JSON, of one line."""

    name: str
    data: bytes

    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def number(self) -> int:
        """Number of its prompt: a server writes it before anything that its caller chose."""
        found = _NUMBER.search(self.data)
        assert found is not None, self.name
        return int(found[1])

    def renumbered(self, number: int) -> "Event":
        """The same event of another prompt."""
        return Event(self.name, _NUMBER.sub(b'"number":%d' % number, self.data, count=1))

    @property
    def failed(self) -> bool:
        """Whether a group ended with an error, which is its last field."""
        return not self.data.endswith(b'"error":null}')

    @property
    def was_aborted(self) -> bool:
        """Whether a group ended with what its candidates had generated until then, beside its error."""
        return self.failed and self.json().get("aborted") is not None

    @property
    def has_tokens(self) -> bool:
        """Whether a group that failed has anything that was generated."""
        return bool(self.aborted_tokens)

    @property
    def aborted_tokens(self) -> int:
        """Tokens that the candidates of a group had generated when it was aborted."""
        return sum(candidate["length"] for candidate in self.json().get("aborted") or ()) if self.failed else 0

    def lengths(self) -> tuple[list[int], list[int]]:
        """Return the lengths of a group's trajectories, and of what was discarded.

        Quotation marks in texts are escaped, so texts are not mistaken for fields.
        """
        start = max(0, self.data.find(b'"trajectories":['))
        middle = max(start, self.data.rfind(b'"discarded":['))
        parts = self.data[start:middle], self.data[middle:]
        returned, discarded = ([int(length) for length in _LENGTH.findall(part)] for part in parts)
        return returned, discarded


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Event]:
    """Read the events of a stream."""
    parts: list[bytes] = []
    async for chunk in chunks:
        parts.append(chunk)
        if b"\n\n" not in (parts[-2][-1:] if len(parts) > 1 else b"") + chunk:
            continue
        *whole, rest = b"".join(parts).split(b"\n\n")
        parts = [rest] if rest else []
        for text in whole:
            if (event := _parse(text)) is not None:
                yield event


def _parse(text: bytes) -> Event | None:
    """Parse an event; comments are none."""
    name, data = "message", None
    for line in text.split(b"\n"):
        if line.startswith(b"event: "):
            name = line[7:].decode()
        elif line.startswith(b"data: "):
            data = line[6:]
    return None if data is None else Event(name, data)
