"""The port to where documents are stored, and the backend in memory for servers without a state folder."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from darts_server.store.document import Name, Row


class Backend(Protocol):
    """Stores rows by name. Every method may raise ``StateError``, and then has changed nothing.

    ``write`` and ``replace`` are called by one thread at a time; all others under one lock.
    """

    def read(self, name: Name) -> str | None:
        """Return the document's JSON text."""
        ...

    def count(self, kind: str, pending: list[str]) -> int:
        """Count the distinct keys of ``kind``, stored and ``pending`` (without repetition) together."""
        ...

    def snapshot(self, kind: str | None) -> AbstractContextManager[Iterable[Row]]:
        """All rows of a kind, or of all kinds, as they are at this moment, ordered by kind and key."""
        ...

    def generation(self) -> int:
        """Number of times that everything was replaced, by any process."""
        ...

    def write(self, texts: Mapping[Name, str], generation: int | None) -> bool:
        """Add or replace all of these at once. Returns False, and writes nothing, if ``generation`` has passed."""
        ...

    def replace(self, rows: Iterable[Row]) -> None:
        """Replace everything by these rows, at once."""
        ...

    def close(self) -> None: ...


MAX_IN_MEMORY = 2**18
"""Documents of each kind. A prompt's takes some hundred bytes, and data sets seldom have more prompts."""


class MemoryBackend:
    """Stores rows in memory. Of each kind it keeps the ``max_documents`` written last."""

    def __init__(self, max_documents: int = MAX_IN_MEMORY) -> None:
        self._max_documents = max_documents
        self._generation = 0
        # Ordered: to find the oldest of a plain dict takes longer the more were deleted before it.
        self._texts: dict[str, OrderedDict[str, str]] = {}

    def read(self, name: Name) -> str | None:
        kind, key = name
        return self._texts.get(kind, OrderedDict()).get(key)

    def count(self, kind: str, pending: list[str]) -> int:
        stored = self._texts.get(kind, OrderedDict())
        return len(stored) + sum(key not in stored for key in pending)

    def snapshot(self, kind: str | None) -> AbstractContextManager[Iterable[Row]]:
        kinds = [name for name in list(self._texts) if kind in (None, name)]
        return nullcontext(sorted((name, key, text) for name in kinds for key, text in list(self._texts[name].items())))

    def generation(self) -> int:
        return self._generation

    def write(self, texts: Mapping[Name, str], generation: int | None) -> bool:
        for (kind, key), text in texts.items():
            stored = self._texts.setdefault(kind, OrderedDict())
            stored[key] = text
            stored.move_to_end(key)
            if len(stored) > self._max_documents:
                stored.popitem(last=False)
        return True

    def replace(self, rows: Iterable[Row]) -> None:
        new = MemoryBackend(self._max_documents)
        new.write({(kind, key): text for kind, key, text in rows}, None)
        self._texts = new._texts
        self._generation += 1

    def close(self) -> None:
        self._texts = {}
