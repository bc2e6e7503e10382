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


MAX_IN_MEMORY = 2**18
"""Documents of each kind. Of prompts they are some hundred bytes each, and data sets seldom have more of these."""


class Memory:
    """A backend that forgets everything with its process, and of each kind all but the ``most`` written last."""

    def __init__(self, most: int = MAX_IN_MEMORY) -> None:
        self._most = most
        self._texts: dict[str, dict[str, str]] = {}

    def read(self, name: Name) -> str | None:
        kind, key = name
        return self._texts.get(kind, {}).get(key)

    def count(self, kind: str, others: list[str]) -> int:
        here = self._texts.get(kind, {})
        return len(here) + sum(key not in here for key in others)

    def snapshot(self, kind: str | None) -> AbstractContextManager[Iterable[Row]]:
        kinds = [name for name in list(self._texts) if kind in (None, name)]
        return nullcontext(sorted((name, key, text) for name in kinds for key, text in list(self._texts[name].items())))

    def generation(self) -> int:
        return 0  # no other process can replace anything

    def write(self, texts: Mapping[Name, str], generation: int | None) -> bool:
        for (kind, key), text in texts.items():
            here = self._texts.setdefault(kind, {})
            here.pop(key, None)
            here[key] = text
            if len(here) > self._most:
                del here[next(iter(here))]
        return True

    def replace(self, rows: Iterable[Row]) -> None:
        new = Memory(self._most)
        new.write({(kind, key): text for kind, key, text in rows}, None)
        self._texts = new._texts

    def close(self) -> None:
        self._texts = {}
