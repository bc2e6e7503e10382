"""The store that the rooms above use."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from darts_server.exceptions import StateDamaged, StateError, StateTooNew
from darts_server.store.backend import MAX_IN_MEMORY, Memory
from darts_server.store.contents import Contents
from darts_server.store.database import Database
from darts_server.store.document import Document, Scalar, decode, encode, named
from darts_server.store.portable import LIMIT_BYTES, pack, unpack
from darts_server.store.writer import Writer


class Store(AbstractContextManager["Store"]):
    """Documents by kind and key, in ``folder``/state.db, or in memory without a folder. For all threads.

    Memory has the last ``max_in_memory`` of each kind, so that it does not grow for ever; a file has all.

    ``put`` never waits for the disk: a thread writes what is new twice a second, so a killed process loses the last
    second at most. A write that fails is tried again until it succeeds; meanwhile ``fault`` says why, and memory has
    the newest document of each key. A ``get`` sees this process's puts at once, and about a second later those of other
    processes that share the folder, each with a store of its own; of two puts of one key the one written later stays.

    Raises:
        StateDamaged, StateTooNew: the file is damaged, not ours or newer; it was not touched.
        StateError: the folder or file cannot be used.

    >>> with Store() as store:
    ...     store.put("prompt", "sum of primes", {"mean": 812.5, "count": 16})
    ...     store.get("prompt", "sum of primes")
    {'mean': 812.5, 'count': 16}
    """

    def __init__(self, folder: Path | None = None, max_in_memory: int = MAX_IN_MEMORY) -> None:
        self._contents = Contents(Memory(max_in_memory) if folder is None else Database(folder))
        self._writer = Writer(self._contents.write)
        self._closed = False

    @property
    def fault(self) -> str | None:
        """Why nothing is written at present; None when all is well."""
        return self._writer.fault

    def put(self, kind: str, key: str, document: Document) -> None:
        """Remembers the document in place of the one of that name.

        Raises:
            InvalidRequest: the key is not well-formed Unicode of at most 64 KiB.
            TypeError: the document is not flat, or has a value that is no JSON scalar.
            ValueError: a number is not finite, the document has more than 64 KiB, ``kind`` is no identifier.
            StateError: the store is closed.
        """
        self._contents.put(named(kind, key), encode(document))
        self._writer.wake()

    def get(self, kind: str, key: str) -> dict[str, Scalar] | None:
        """The newest document of that name, or None; the caller's own copy.

        Raises:
            InvalidRequest, ValueError: as ``put``.
            StateError: the store is closed, or its file can no longer be read.
        """
        text = self._contents.get(named(kind, key))
        return None if text is None else decode(text)

    def count(self, kind: str) -> int:
        """How many documents of a kind there are. Takes milliseconds per 100,000. Raises ``StateError`` as ``get``."""
        return self._contents.count(kind)

    def items(self, kind: str) -> Iterator[tuple[str, dict[str, Scalar]]]:
        """Key and document of all of a kind, by key, as of the first step. Raises ``StateError`` as ``get``."""
        for _, key, text in self._contents.rows(kind):
            yield key, decode(text)

    def flush(self) -> None:
        """Waits until all that was put before is on the disk. Raises ``StateError`` if it cannot be written."""
        if error := self._writer.try_write():
            raise StateError(str(error)) from error

    def export(self) -> bytes:
        """Everything learned as one file, see ``portable``. Takes seconds per million documents: not in the loop."""
        return pack(self._contents.rows(None))

    def restore(self, data: bytes, limit: int = LIMIT_BYTES) -> None:
        """Replaces everything by what ``export`` gave, at once or not at all. Takes several times as long.

        What was put before it returns is gone too, here and in the other processes. ``limit``: bytes that the data may
        have when decompressed.

        Raises:
            StateDamaged, StateTooNew: ``data`` is not whole, not ours, too large or newer; nothing was changed.
            StateError: it could not be written; nothing was changed.
        """
        for _ in unpack(data, limit):  # all of it, before anything is touched
            pass
        try:
            self._contents.replace(unpack(data, limit))
        except (StateDamaged, StateTooNew) as error:  # the file in the folder, since ``data`` is whole
            raise StateError(str(error)) from error

    def close(self) -> None:
        """Writes what is left and ends. Raises ``StateError`` if that cannot be written: it is lost then."""
        if self._closed:
            return
        self._closed = True
        self._writer.stop()
        try:
            self.flush()
        finally:
            self._contents.close()

    def __exit__(self, *_: object) -> None:
        self.close()
