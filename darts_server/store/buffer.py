"""What lies between the callers and the backend: new documents on their way there, recent ones from there."""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple

from darts_server.store.document import Name, Row


class Unwritten:
    """The newest text of every name that the backend does not have yet. Not locked."""

    def __init__(self) -> None:
        self._waiting: dict[Name, str] = {}
        self._leaving: dict[Name, str] = {}
        self._waiting_since: int | None = None
        self._leaving_since: int | None = None

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def begin(self, generation: int | None) -> None:
        """What is put from here on, with nothing waiting, was learned in this generation of the backend."""
        self._waiting_since = generation

    def put(self, name: Name, text: str) -> None:
        self._waiting[name] = text

    def get(self, name: Name) -> str | None:
        return self._waiting.get(name) or self._leaving.get(name)

    def keys(self, kind: str) -> list[str]:
        return [key for name_kind, key in self._leaving | self._waiting if name_kind == kind]

    def rows(self, kind: str | None) -> list[Row]:
        """Ordered by kind and key."""
        texts = self._leaving | self._waiting
        return sorted((*name, text) for name, text in texts.items() if kind in (None, name[0]))

    def take(self) -> tuple[dict[Name, str], int | None]:
        """All that waits, and its generation. Unwritten still, until ``written``; ``take_back`` lets it wait again."""
        self._leaving, self._waiting = self._waiting, {}
        self._leaving_since = self._waiting_since
        return self._leaving, self._leaving_since

    def written(self) -> None:
        self._leaving = {}

    def take_back(self) -> None:
        self._waiting = self._leaving | self._waiting
        self._waiting_since = self._leaving_since
        self._leaving = {}

    def clear(self) -> None:
        self._waiting, self._leaving = {}, {}


class Read(NamedTuple):
    text: str | None
    at: float


class Recent:
    """What was read lately, the last ``entries`` names at most, each for at most ``seconds``. Not locked."""

    def __init__(self, entries: int, seconds: float) -> None:
        self._entries = entries
        self._seconds = seconds
        self._reads: OrderedDict[Name, Read] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reads)

    def get(self, name: Name, now: float) -> Read | None:
        read = self._reads.get(name)
        return None if read is None or self._old(read, now) else read

    def keep(self, name: Name, text: str | None, now: float) -> None:
        self._reads[name] = Read(text, now)
        self._reads.move_to_end(name)
        while len(self._reads) > self._entries or self._old(next(iter(self._reads.values())), now):
            self._reads.popitem(last=False)

    def drop(self, name: Name) -> None:
        self._reads.pop(name, None)

    def clear(self) -> None:
        self._reads.clear()

    def _old(self, read: Read, now: float) -> bool:
        return now - read.at >= self._seconds


def overlaid(rows: Iterable[Row], newer: Iterable[Row]) -> Iterator[Row]:
    """Both in their common order; of two with the same name the newer one."""
    before: tuple[str, str] | None = None
    for row in heapq.merge(newer, rows, key=itemgetter(0, 1)):
        if row[:2] != before:
            yield row
        before = row[:2]
