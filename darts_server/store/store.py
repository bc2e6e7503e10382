"""The store of documents that the other rooms use."""

import json
import logging
import math
import sqlite3
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from darts_server.exceptions import StateDamaged, StateError
from darts_server.store import archive
from darts_server.store.archive import LIMIT_BYTES, Document, Name, Row, Scalar, check_name
from darts_server.store.database import checksum, damaged, open_database, refuse_newer, translate_errors

logger = logging.getLogger(__name__)

FILE_NAME = "state.db"
FLUSH_SECONDS = 0.5
"""Between two writes, so that one takes many documents. With the write itself it stays below the second that a killed
process may lose."""
MAX_IN_MEMORY = 2**18
"""Documents of each kind without a folder. A prompt's takes some hundred bytes, and data sets seldom have more."""
_TABLES = (
    "CREATE TABLE documents (kind TEXT NOT NULL, key TEXT NOT NULL, document TEXT NOT NULL, "
    "crc INTEGER NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID"
)
_CARRIED = "CREATE TABLE IF NOT EXISTS carried (number INTEGER PRIMARY KEY, value BLOB NOT NULL, crc INTEGER NOT NULL)"
"""Created at its first use, as files of earlier versions have none."""
_UPSERT = (
    "INSERT INTO documents VALUES (?, ?, ?, ?) "
    "ON CONFLICT (kind, key) DO UPDATE SET document = excluded.document, crc = excluded.crc"
)


# Texts by kind and key. Ordered: to find the oldest of a plain dict takes longer the more were deleted before it.
_Texts = defaultdict[str, OrderedDict[str, str]]


class Store(AbstractContextManager["Store"]):
    """Documents by kind and key, in memory, and with a ``folder`` also in its state.db. For all threads.

    Without a folder only the last ``max_in_memory`` of each kind are kept, so that it does not grow without bound.

    No call but `flush` and `restore` waits for the disk: a thread writes new documents twice a second, so a killed
    process loses the last second at most. A failed write is retried until it succeeds; meanwhile ``fault`` says why.
    One process uses a folder; the next one may start while it ends, and sees what it still writes.

    ``check`` gets kind and document of everything to be restored; it raises ``ValueError`` for what cannot be used.

    Raises:
        StateDamaged, StateTooNew: a file is damaged, another program's or newer; it was not touched.
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
        self.fault: str | None = None
        """Why nothing can be written at present; None if the last write succeeded."""
        self._check = check
        self._limit = max_in_memory if folder is None else math.inf
        self._lock = threading.Lock()  # of what is in memory; never held while waiting for the disk
        self._write_lock = threading.Lock()  # of the file, and of a restore; taken before the other lock
        self._texts = _Texts(OrderedDict)
        self._unwritten: dict[Name, str] = {}
        self.generation = 0
        """How often `restore` has replaced everything."""
        self._is_closed = False
        self._stop = threading.Event()
        self._connection: sqlite3.Connection | None = None
        self._thread = threading.Thread(target=self._flush_until_stopped, name="darts-store", daemon=True)
        if folder is not None:
            self._path = folder / FILE_NAME
            self._connection = open_database(self._path, _TABLES)
            self._version: object = None
            try:
                self._inode = self._path.stat().st_ino
                self._read(self._connection)
            except BaseException:
                self._connection.close()
                raise
            self._thread.start()

    def put(self, kind: str, key: str, document: Document) -> None:
        """Store the document, in place of the previous one of that name.

        Raises:
            InvalidRequest: the key is not well-formed Unicode of at most 64 KiB.
            TypeError: the document is not flat, or has a value that is no JSON scalar.
            ValueError: a number is not finite, the document has more than 64 KiB, ``kind`` is no identifier.
            StateError: the store is closed.
        """
        name, text = check_name(kind, key), archive.encode(document)
        with self._lock:
            self._refuse_closed()
            self._keep(self._texts, kind, key, text)
            if self._connection is not None:
                self._unwritten[name] = text

    def get(self, kind: str, key: str) -> dict[str, Scalar] | None:
        """Return a copy of the newest document of that name, or None.

        Raises:
            InvalidRequest, ValueError: as ``put``.
            StateError: the store is closed.
        """
        check_name(kind, key)
        with self._lock:
            self._refuse_closed()
            text = self._texts[kind].get(key)
        document: dict[str, Scalar] | None = None if text is None else json.loads(text)
        return document

    def count(self, kind: str) -> int:
        """Count the documents of a kind."""
        with self._lock:
            return len(self._texts[kind])

    def flush(self) -> None:
        """Write everything that was put before, and wait for it.

        Raises:
            StateError: it cannot be written at present; ``fault`` says why, and the log does once.
        """
        with self._write_lock:
            with self._lock:
                self._refuse_closed()
                rows = [(*name, text) for name, text in self._unwritten.items()]
            try:
                if self._connection is not None:
                    if rows:
                        self._write(rows)
                    with self._lock:
                        for kind, key, text in rows:
                            if self._unwritten.get((kind, key)) is text:  # otherwise there is a newer one by now
                                del self._unwritten[kind, key]
                    self._read(self._connection)
            except Exception as error:
                if self.fault != str(error):
                    logger.error("the learned state cannot be written and is kept in memory until it can: %s", error)
                self.fault = str(error)
                raise
            if self.fault is not None:
                logger.warning("the learned state is written again")
            self.fault = None

    def export(self) -> bytes:
        """Export everything as one file, see ``archive``. Takes seconds per million documents: call it in a thread."""
        with self._lock:
            self._refuse_closed()
            copies = [(kind, list(texts.items())) for kind, texts in self._texts.items()]
        return archive.pack(sorted((kind, key, text) for kind, texts in copies for key, text in texts))

    def restore(self, data: bytes, limit: int = LIMIT_BYTES) -> None:
        """Replace everything by an exported file, atomically. Takes several times as long as ``export``.

        Documents that are put before it returns are lost too. ``limit``: bytes that the data may have when
        decompressed.

        Raises:
            StateDamaged, StateTooNew: ``data`` is incomplete, no saved state, too large or newer, or has a document
                that cannot be used; nothing was changed.
            StateError: it could not be written; nothing was changed.
        """
        restored = _Texts(OrderedDict)
        for kind, key, text in archive.unpack(data, limit):
            try:
                self._check(kind, json.loads(text))
            except ValueError as error:
                what = f"has a document that cannot be used: {kind} {key[:64]!r}: {str(error)[:200]}"
                raise archive.damaged(what) from error
            self._keep(restored, kind, key, text)
        with self._write_lock:
            with self._lock:
                self._refuse_closed()
            if self._connection is not None:
                rows = ((kind, key, text) for kind, texts in restored.items() for key, text in texts.items())
                try:
                    self._write(rows, replace=True)
                except StateDamaged as error:  # of the state file: ``data`` was checked above
                    raise StateError(str(error)) from error
            with self._lock:
                self._texts, self._unwritten = restored, {}
                self.generation += 1

    def add_carried(self, values: Iterable[bytes]) -> None:
        """Keep values for the next server, in their order. All are on the disk when this returns.

        Raises:
            StateError: nothing was changed; there is no folder, for example.
        """
        with self._write_lock, self._transaction() as connection:
            connection.execute(_CARRIED)
            rows = ((value, checksum("carried", "", value)) for value in values)
            connection.executemany("INSERT INTO carried (value, crc) VALUES (?, ?)", rows)

    def take_carried(self) -> list[bytes | StateDamaged]:
        """Remove what was kept and return it in its order, with an error in place of each damaged value.

        A server that starts takes it when it is about to serve; one that still ends may add more meanwhile.

        Raises:
            StateError: nothing was removed.
        """
        with self._write_lock, self._transaction() as connection:
            connection.execute(_CARRIED)
            taken: list[bytes | StateDamaged] = [
                value
                if isinstance(value, bytes) and checksum("carried", "", value) == crc
                else StateDamaged(f"the checksum of number {number} that is carried over in {self._path} is wrong")
                for number, value, crc in connection.execute("SELECT * FROM carried ORDER BY number")
            ]
            connection.execute("DELETE FROM carried")
        return taken

    def close(self) -> None:
        """Write what is pending and close. Raises ``StateError`` if that cannot be written; it is lost then."""
        if self._is_closed:
            return
        self._stop.set()
        if self._connection is not None:
            self._thread.join()
        try:
            self.flush()
        finally:
            with self._write_lock, self._lock:
                self._is_closed = True
                if self._connection is not None:
                    self._connection.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise StateError("the store is closed")

    def _keep(self, texts: _Texts, kind: str, key: str, text: str) -> None:
        texts[kind][key] = text
        texts[kind].move_to_end(key)
        if len(texts[kind]) > self._limit:
            texts[kind].popitem(last=False)

    def _flush_until_stopped(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS):
            with suppress(Exception):  # it is kept in ``fault``
                self.flush()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit at the end of the block, or change nothing; then it is on the disk. Errors: see `translate_errors`."""
        self._refuse_closed()
        if self._connection is None:
            raise StateError("nothing is kept on a disk without --state-dir")
        with translate_errors(self._path), self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            refuse_newer(self._path, connection)  # the next server may have migrated it
            if self._path.stat().st_ino != self._inode:
                raise StateError(f"{self._path} was moved or replaced while it was in use; put it back, or restart")
            yield connection

    def _write(self, rows: Iterable[Row], *, replace: bool = False) -> None:
        """Add or overwrite rows, or ``replace`` everything by them, all at once."""
        with self._transaction() as connection:
            if replace:
                connection.execute("DELETE FROM documents")
            connection.executemany(_UPSERT, ((*row, checksum(row[0], row[1], row[2].encode())) for row in rows))

    def _read(self, connection: sqlite3.Connection) -> None:
        """Read everything at the start, and again when another process has written: the previous server that ends.

        Raises:
            StateDamaged
        """
        with translate_errors(self._path):
            [[version]] = connection.execute("PRAGMA data_version")
            if version == self._version:
                return
            texts = _Texts(OrderedDict)
            for kind, key, text, crc in connection.execute("SELECT kind, key, document, crc FROM documents"):
                if not (isinstance(kind, str) and isinstance(key, str) and isinstance(text, str)):
                    raise damaged(self._path, "a value is of the wrong type")
                if checksum(kind, key, text.encode()) != crc:
                    raise damaged(self._path, f"the checksum of {kind} {key[:64]!r} is wrong")
                texts[kind][key] = text
        with self._lock:
            for (kind, key), text in self._unwritten.items():
                texts[kind][key] = text
            self._texts, self._version = texts, version
