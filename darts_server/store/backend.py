"""Where documents lie: the port, and the memory when there is no state folder."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from darts_server.store.document import Name, Row


class Backend(Protocol):
    """Rows by name, in one place. Every method may raise ``StateError``, and then has changed nothing.

    ``write`` and ``replace`` are called by one thread at a time; all others under one lock.
    """

    def read(self, name: Name) -> str | None:
        """The document's JSON text."""
        ...

    def count(self, kind: str, others: list[str]) -> int:
        """How many different keys of ``kind`` there are, here and in ``others`` (without repetition) together."""
        ...

    def snapshot(self, kind: str | None) -> AbstractContextManager[Iterable[Row]]:
        """All rows of a kind, or of all kinds, as they are at this moment, ordered by kind and key."""
        ...

    def generation(self) -> int:
        """How often everything was replaced, by any process."""
        ...

    def write(self, texts: Mapping[Name, str], generation: int | None) -> bool:
        """Adds or replaces all of them at once; False if it did not, because this ``generation`` is over."""
        ...

    def replace(self, rows: Iterable[Row]) -> None:
        """These rows, no others, at once."""
        ...

    def close(self) -> None: ...


class Memory:
    """A backend that forgets everything with its process."""

    def __init__(self) -> None:
        self._texts: dict[Name, str] = {}

    def read(self, name: Name) -> str | None:
        return self._texts.get(name)

    def count(self, kind: str, others: list[str]) -> int:
        here = sum(name[0] == kind for name in list(self._texts))
        return here + sum((kind, key) not in self._texts for key in others)

    def snapshot(self, kind: str | None) -> AbstractContextManager[Iterable[Row]]:
        return nullcontext(sorted((*name, text) for name, text in list(self._texts.items()) if kind in (None, name[0])))

    def generation(self) -> int:
        return 0  # no other process can replace anything

    def write(self, texts: Mapping[Name, str], generation: int | None) -> bool:
        self._texts.update(texts)
        return True

    def replace(self, rows: Iterable[Row]) -> None:
        self._texts = {(kind, key): text for kind, key, text in rows}

    def close(self) -> None:
        self._texts = {}
