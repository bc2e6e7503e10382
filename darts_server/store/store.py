"""The store of documents that the other rooms use."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path

from darts_server.exceptions import StateDamaged, StateError, StateTooNew
from darts_server.store.archive import LIMIT_BYTES, pack, unpack
from darts_server.store.backend import MAX_IN_MEMORY, MemoryBackend
from darts_server.store.buffered import BufferedBackend
from darts_server.store.database import SqliteBackend
from darts_server.store.document import Document, Row, Scalar, check_name, decode, encode
from darts_server.store.writer import BackgroundWriter


class Store(AbstractContextManager["Store"]):
    """Documents by kind and key, in ``folder``/state.db, or in memory without a folder. For all threads.

    In memory only the last ``max_in_memory`` of each kind are kept, so that it does not grow without bound.

    ``put`` never waits for the disk: a thread writes new documents twice a second, so a killed process loses the last
    second at most. A failed write is retried until it succeeds; meanwhile ``fault`` says why, and the newest document
    of each key is in memory. ``get`` sees this process's puts at once, and those of other processes that share the
    folder, each with its own store, about a second later. Of two puts of one key the one written later wins.

    ``check`` gets kind and document of everything to be restored; it raises ``ValueError`` for what cannot be used.

    Raises:
        StateDamaged, StateTooNew: the file is damaged, another program's or newer; it was not touched.
        StateError: the folder or file cannot be used.

    >>> with Store() as store:
    ...     store.put("prompt", "sum of primes", {"mean": 812.5, "count": 16})
    ...     store.get("prompt", "sum of primes")
    {'mean': 812.5, 'count': 16}
    """

    def __init__(
        self,
        folder: Path | None = None,
        max_in_memory: int = MAX_IN_MEMORY,
        check: Callable[[str, Document], None] = lambda kind, document: None,
    ) -> None:
        self._check = check
        self._documents = BufferedBackend(MemoryBackend(max_in_memory) if folder is None else SqliteBackend(folder))
        self._writer = BackgroundWriter(self._documents.write)
        self._is_closed = False

    @property
    def fault(self) -> str | None:
        """Why nothing can be written at present; None if the last write succeeded."""
        return self._writer.fault

    def put(self, kind: str, key: str, document: Document) -> None:
        """Store the document, in place of the previous one of that name.

        Raises:
            InvalidRequest: the key is not well-formed Unicode of at most 64 KiB.
            TypeError: the document is not flat, or has a value that is no JSON scalar.
            ValueError: a number is not finite, the document has more than 64 KiB, ``kind`` is no identifier.
            StateError: the store is closed.
        """
        self._documents.put(check_name(kind, key), encode(document))
        self._writer.wake()

    def get(self, kind: str, key: str) -> dict[str, Scalar] | None:
        """Return a copy of the newest document of that name, or None.

        Raises:
            InvalidRequest, ValueError: as ``put``.
            StateError: the store is closed, or its file can no longer be read.
        """
        text = self._documents.get(check_name(kind, key))
        return None if text is None else decode(text)

    def count(self, kind: str) -> int:
        """Count the documents of a kind. Takes milliseconds per 100,000. Raises ``StateError`` as ``get``."""
        return self._documents.count(kind)

    def generation(self) -> int:
        """Count how often ``restore`` has replaced everything, in any process. Raises ``StateError`` as ``get``."""
        return self._documents.generation()

    def items(self, kind: str) -> Iterator[tuple[str, dict[str, Scalar]]]:
        """Yield keys and documents of a kind, by key, as they are when the first is taken. Raises as ``get``."""
        for _, key, text in self._documents.rows(kind):
            yield key, decode(text)

    def flush(self) -> None:
        """Write everything that was put before, and wait for it. Raises ``StateError`` if that fails."""
        if error := self._writer.try_write():
            raise StateError(str(error)) from error

    def export(self) -> bytes:
        """Export everything as one file, see ``archive``. Takes seconds per million documents: call it in a thread."""
        return pack(self._documents.rows(None))

    def restore(self, data: bytes, limit: int = LIMIT_BYTES, keep: Collection[str] = ()) -> None:
        """Replace everything by an exported file, atomically. Takes several times as long as ``export``.

        Documents that are put before it returns are lost too, here and in the other processes. ``limit``: bytes that
        the data may have when decompressed. ``keep``: kinds of documents that stay as they are here.

        Raises:
            StateDamaged, StateTooNew: ``data`` is incomplete, no saved state, too large or newer, or has a document
                that cannot be used; nothing was changed.
            StateError: it could not be written; nothing was changed.
        """
        for row in unpack(data, limit):  # check all of it before anything is changed
            self._check_row(row)
        try:
            kept = [row for kind in sorted(keep) for row in self._documents.rows(kind)]
            self._documents.replace(chain(kept, (row for row in unpack(data, limit) if row[0] not in keep)))
        except (StateDamaged, StateTooNew) as error:  # of the state file: ``data`` was checked above
            raise StateError(str(error)) from error

    def _check_row(self, row: Row) -> None:
        kind, key, text = row
        try:
            self._check(kind, decode(text))
        except ValueError as error:
            raise StateDamaged(
                f"the state given has a document that cannot be used: {kind} {key[:64]!r}: {str(error)[:200]}; "
                "nothing was changed. Send a saved file, byte for byte"
            ) from error

    def close(self) -> None:
        """Write what is pending and close. Raises ``StateError`` if that cannot be written; it is lost then."""
        if self._is_closed:
            return
        self._is_closed = True
        self._writer.stop()
        try:
            self.flush()
        finally:
            self._documents.close()

    def __exit__(self, *_: object) -> None:
        self.close()
