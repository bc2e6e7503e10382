"""The write buffer and the read cache in front of a backend."""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple

from darts_server.store.document import Name, Row


class WriteBuffer:
    """The newest text of every name that is not written to the backend yet. Not locked."""

    def __init__(self) -> None:
        self._pending: dict[Name, str] = {}
        self._in_flight: dict[Name, str] = {}
        self._pending_generation: int | None = None
        self._in_flight_generation: int | None = None

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def begin(self, generation: int | None) -> None:
        """Begin with an empty buffer. ``generation``: of the backend, in which the texts that follow were learned."""
        self._pending_generation = generation

    def put(self, name: Name, text: str) -> None:
        self._pending[name] = text

    def get(self, name: Name) -> str | None:
        return self._pending.get(name) or self._in_flight.get(name)

    def keys(self, kind: str) -> list[str]:
        return [key for name_kind, key in self._in_flight | self._pending if name_kind == kind]

    def rows(self, kind: str | None) -> list[Row]:
        """Ordered by kind and key."""
        texts = self._in_flight | self._pending
        return sorted((*name, text) for name, text in texts.items() if kind in (None, name[0]))

    def begin_write(self) -> tuple[dict[Name, str], int | None]:
        """Return all pending texts and their generation. They stay readable until `end_write` or `cancel_write`."""
        self._in_flight, self._pending = self._pending, {}
        self._in_flight_generation = self._pending_generation
        return self._in_flight, self._in_flight_generation

    def end_write(self) -> None:
        """Drop what was written."""
        self._in_flight = {}

    def cancel_write(self) -> None:
        """Make what was not written pending again, except where there is a newer text."""
        self._pending = self._in_flight | self._pending
        self._pending_generation = self._in_flight_generation
        self._in_flight = {}

    def clear(self) -> None:
        self._pending, self._in_flight = {}, {}


class CachedRead(NamedTuple):
    text: str | None
    at: float


class ReadCache:
    """Caches reads: the last ``entries`` names at most, each for at most ``seconds``. Not locked."""

    def __init__(self, entries: int, seconds: float) -> None:
        self._entries = entries
        self._seconds = seconds
        self._reads: OrderedDict[Name, CachedRead] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reads)

    def get(self, name: Name, now: float) -> CachedRead | None:
        read = self._reads.get(name)
        return None if read is None or self._is_expired(read, now) else read

    def put(self, name: Name, text: str | None, now: float) -> None:
        self._reads[name] = CachedRead(text, now)
        self._reads.move_to_end(name)
        while len(self._reads) > self._entries or self._is_expired(next(iter(self._reads.values())), now):
            self._reads.popitem(last=False)

    def drop(self, name: Name) -> None:
        self._reads.pop(name, None)

    def clear(self) -> None:
        self._reads.clear()

    def _is_expired(self, read: CachedRead, now: float) -> bool:
        return now - read.at >= self._seconds


def merge_rows(rows: Iterable[Row], newer: Iterable[Row]) -> Iterator[Row]:
    """Merge rows that are ordered by kind and key; of two with the same name keep the newer one."""
    previous: tuple[str, str] | None = None
    for row in heapq.merge(newer, rows, key=itemgetter(0, 1)):
        if row[:2] != previous:
            yield row
        previous = row[:2]
