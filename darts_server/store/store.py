"""Store of documents."""

import json
import logging
import sqlite3
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from darts_server.exceptions import StateDamaged, StateError
from darts_server.store import archive
from darts_server.store.archive import LIMIT_BYTES, Document, Scalar, check_kind_and_key
from darts_server.store.database import checksum, damaged_error, open_database, refuse_newer, translate_errors

logger = logging.getLogger(__name__)

FILE_NAME = "state.db"
FLUSH_SECONDS = 0.5
"""Time between two writes. With the write itself it is below the second that a killed process may lose."""
MAX_IN_MEMORY = 2**18
"""Documents of each kind without a folder. A prompt takes some hundred bytes."""
MAX_ON_DISK = 2**21
"""Documents of each kind with a folder: some gigabytes of memory. Data sets seldom have more prompts."""
_UPSERT = (
    "INSERT INTO documents VALUES (?, ?, ?, ?) "
    "ON CONFLICT (kind, key) DO UPDATE SET document = excluded.document, crc = excluded.crc"
)
_CREATE_CARRIED = (
    "CREATE TABLE IF NOT EXISTS carried (number INTEGER PRIMARY KEY, value BLOB NOT NULL, crc INTEGER NOT NULL)"
)
"""Run before each use, because files of earlier versions do not have the table."""

# JSON texts by kind and key. A plain dict finds its oldest key more slowly the more keys were deleted before it.
_Texts = defaultdict[str, OrderedDict[str, str]]


class Store(AbstractContextManager["Store"]):
    """Documents by kind and key, in memory and in the state.db of ``folder``. All threads may use it.

    `put` and `get` never wait for the disk. A killed process loses the last second at most. A failed write is retried.
    The next process may start while the previous process ends, and sees its last writes.

    Args:
        folder: folder of state.db, or None to keep documents in memory only.
        limit: maximum number of documents of each kind. The documents that were put first are dropped; among those
            that were read from the file, any. By default `MAX_ON_DISK`, or `MAX_IN_MEMORY` without a folder.
        check: gets kind and document of everything to be restored, and raises ``ValueError`` to refuse it.

    Raises:
        StateDamaged, StateTooNew: the file is damaged, newer, or another program's; it was not touched.
        StateError: the folder or file cannot be used.

    >>> with Store() as store:
    ...     store.put("prompt", "sum of primes", {"mean": 812.5, "count": 16})
    ...     store.get("prompt", "sum of primes")
    {'mean': 812.5, 'count': 16}
    """

    def __init__(
        self,
        folder: Path | None = None,
        limit: int | None = None,
        check: Callable[[str, Document], None] = lambda kind, document: None,
    ) -> None:
        self.fault: str | None = None
        """Why the last write failed, or None if it succeeded."""
        self.generation = 0
        """Number of restores."""
        self._check = check
        default = MAX_IN_MEMORY if folder is None else MAX_ON_DISK
        self._limit = default if limit is None else limit

        # `_memory_lock` is never held while a thread waits for the disk. `_write_lock` guards the file and a restore,
        # and is taken first.
        self._memory_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._texts = _Texts(OrderedDict)
        # None for a document that was dropped.
        self._unwritten: dict[tuple[str, str], str | None] = {}
        self._is_closed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._flush_until_stopped, name="darts-store", daemon=True)

        self._connection: sqlite3.Connection | None = None
        if folder is not None:
            self._path = folder / FILE_NAME
            self._connection = open_database(self._path)
            self._read_version: object = None
            try:
                self._inode = self._path.stat().st_ino
                self._read_if_changed(self._connection)
            except BaseException:
                self._connection.close()
                raise
            self._thread.start()

    def put(self, kind: str, key: str, document: Document) -> None:
        """Store a document, in place of an earlier document of this kind and key.

        Raises:
            InvalidRequest, ValueError: see `check_kind_and_key`.
            TypeError, ValueError: see `archive.encode`.
            StateError: the store is closed.
        """
        check_kind_and_key(kind, key)
        text = archive.encode(document)
        with self._memory_lock:
            self._refuse_closed()
            self._texts[kind][key] = text
            self._texts[kind].move_to_end(key)
            dropped = self._drop_oldest(self._texts)
            if self._connection is not None:
                self._unwritten[kind, key] = text
                self._unwritten |= dropped

    def get(self, kind: str, key: str) -> dict[str, Scalar] | None:
        """Return a copy of a document, or None. Raises as `put`."""
        check_kind_and_key(kind, key)
        with self._memory_lock:
            self._refuse_closed()
            text = self._texts[kind].get(key)
        document: dict[str, Scalar] | None = None if text is None else json.loads(text)
        return document

    def count(self, kind: str) -> int:
        with self._memory_lock:
            return len(self._texts[kind])

    def flush(self) -> None:
        """Write new documents, and read documents that the previous server has written.

        Raises:
            StateError: the disk cannot be used. ``fault`` and the log say why. The documents stay in memory.
        """
        with self._write_lock:
            with self._memory_lock:
                self._refuse_closed()
                rows = list(self._unwritten.items())
            if self._connection is None:
                return
            try:
                if rows:
                    self._write_rows(rows)
                with self._memory_lock:
                    for kind_and_key, text in rows:
                        # A newer document may have been put meanwhile.
                        if kind_and_key in self._unwritten and self._unwritten[kind_and_key] is text:
                            del self._unwritten[kind_and_key]
                # The previous server may still have written documents.
                self._read_if_changed(self._connection)
            except Exception as error:
                if self.fault != str(error):
                    logger.error("the learned state cannot be written and is kept in memory until it can: %s", error)
                self.fault = str(error)
                raise
            if self.fault is not None:
                logger.warning("the learned state is written again")
            self.fault = None

    def export(self) -> bytes:
        """Return all documents as one file, which takes seconds per million documents."""
        with self._memory_lock:
            self._refuse_closed()
            # Sorting takes seconds, so the lock is held only for the copies.
            copies = [(kind, list(texts.items())) for kind, texts in self._texts.items()]
        return archive.pack(sorted((kind, key, text) for kind, texts in copies for key, text in texts))

    def restore(self, data: bytes, limit: int = LIMIT_BYTES) -> None:
        """Replace all documents by the documents of an exported file. Documents that are put meanwhile are lost.

        ``limit``: maximum size of the decompressed data in bytes.

        Raises:
            StateDamaged, StateTooNew: see `archive.unpack`; or ``check`` refuses a document. Nothing was changed.
            StateError: the documents could not be written. Nothing was changed.
        """
        restored = _Texts(OrderedDict)
        for kind, key, text in archive.unpack(data, limit):
            try:
                self._check(kind, json.loads(text))
            except ValueError as error:
                problem = f"has a document that cannot be used: {kind} {key[:64]!r}: {str(error)[:200]}"
                raise archive.damaged_error(problem) from error
            restored[kind][key] = text
        # The file is in the order of keys, so the lowest keys are dropped beyond the limit.
        self._drop_oldest(restored)

        with self._write_lock:
            with self._memory_lock:
                self._refuse_closed()
            if self._connection is not None:
                rows = (((kind, key), text) for kind, texts in restored.items() for key, text in texts.items())
                try:
                    self._write_rows(rows, replace=True)
                except StateDamaged as error:
                    # The state file is damaged, not ``data``, which was checked above.
                    raise StateError(str(error)) from error
            with self._memory_lock:
                self._texts = restored
                self._unwritten = {}
                self.generation += 1

    def add_carried(self, prompts: Iterable[bytes]) -> None:
        """Write encoded prompts that are carried over, which the next server reads by `take_carried`.

        Raises ``StateError`` if nothing was written.
        """
        with self._write_lock, self._transaction() as connection:
            connection.execute(_CREATE_CARRIED)
            rows = ((prompt, checksum("carried", "", prompt)) for prompt in prompts)
            connection.executemany("INSERT INTO carried (value, crc) VALUES (?, ?)", rows)

    def take_carried(self) -> list[bytes | StateDamaged]:
        """Remove and return the prompts of `add_carried` in their order, with an error for each damaged prompt.

        The previous server may add more prompts as it ends. Raises ``StateError`` if nothing was removed.
        """
        taken: list[bytes | StateDamaged] = []
        with self._write_lock, self._transaction() as connection:
            connection.execute(_CREATE_CARRIED)
            for number, value, crc in connection.execute("SELECT * FROM carried ORDER BY number"):
                if isinstance(value, bytes) and checksum("carried", "", value) == crc:
                    taken.append(value)
                else:
                    problem = f"the checksum of number {number} that is carried over in {self._path} is wrong"
                    taken.append(StateDamaged(problem))
            connection.execute("DELETE FROM carried")
        return taken

    def close(self) -> None:
        """Write new documents, and close. Raises ``StateError`` if documents are lost."""
        if self._is_closed:
            return
        self._stop.set()
        if self._connection is not None:
            self._thread.join()
        try:
            self.flush()
        finally:
            with self._write_lock, self._memory_lock:
                self._is_closed = True
                if self._connection is not None:
                    self._connection.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise StateError("the store is closed")

    def _drop_oldest(self, texts: _Texts) -> dict[tuple[str, str], None]:
        """Drop the oldest texts beyond the limit. Return kind and key of each, with None in place of its text."""
        dropped: dict[tuple[str, str], None] = {}
        for kind, texts_of_kind in texts.items():
            while len(texts_of_kind) > self._limit:
                key, _ = texts_of_kind.popitem(last=False)
                dropped[kind, key] = None
        return dropped

    def _flush_until_stopped(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS):
            # `flush` reports the error in ``fault``.
            with suppress(Exception):
                self.flush()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit at the end of the block, or change nothing. Raises as `translate_errors`."""
        self._refuse_closed()
        if self._connection is None:
            raise StateError("nothing is kept on a disk without --state-dir")
        with translate_errors(self._path), self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            # A newer server that has started meanwhile may have migrated the file.
            refuse_newer(self._path, connection)
            if self._path.stat().st_ino != self._inode:
                raise StateError(f"{self._path} was moved or replaced while it was in use; put it back, or restart")
            yield connection

    def _write_rows(self, rows: Iterable[tuple[tuple[str, str], str | None]], *, replace: bool = False) -> None:
        """``replace``: whether to delete all other rows."""
        with self._transaction() as connection:
            if replace:
                connection.execute("DELETE FROM documents")
            for (kind, key), text in rows:
                if text is None:
                    connection.execute("DELETE FROM documents WHERE kind = ? AND key = ?", (kind, key))
                else:
                    connection.execute(_UPSERT, (kind, key, text, checksum(kind, key, text.encode())))

    def _read_if_changed(self, connection: sqlite3.Connection) -> None:
        """Read all documents, and put documents over them that are not written yet.

        Raises:
            StateDamaged: a document has the wrong type or checksum.
        """
        with translate_errors(self._path):
            # SQLite changes this number when another process has written.
            [[version]] = connection.execute("PRAGMA data_version")
            if version == self._read_version:
                return
            texts = _Texts(OrderedDict)
            for kind, key, text, crc in connection.execute("SELECT kind, key, document, crc FROM documents"):
                if not (isinstance(kind, str) and isinstance(key, str) and isinstance(text, str)):
                    raise damaged_error(self._path, "a value is of the wrong type")
                if checksum(kind, key, text.encode()) != crc:
                    raise damaged_error(self._path, f"the checksum of {kind} {key[:64]!r} is wrong")
                texts[kind][key] = text
        with self._memory_lock:
            # The file has no order. Documents that this process has put are newer than the others, in their order.
            for kind, texts_of_kind in self._texts.items():
                for key in texts_of_kind:
                    if key in texts[kind]:
                        texts[kind].move_to_end(key)
            for (kind, key), text in self._unwritten.items():
                if text is None:
                    texts[kind].pop(key, None)
                else:
                    texts[kind][key] = text
                    texts[kind].move_to_end(key)
            self._unwritten |= self._drop_oldest(texts)
            self._texts = texts
            self._read_version = version
