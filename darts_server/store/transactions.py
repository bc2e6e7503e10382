"""Bytes by kind and key that are on the disk when a write returns, in a SQLite file of one process."""

import logging
import sqlite3
import threading
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

from darts_server.exceptions import StateDamaged, StateError, StateTooNew
from darts_server.store.document import Name
from darts_server.store.schema import connect, refuse_special_files, translate_errors

logger = logging.getLogger(__name__)

FILE_NAME = "queue.db"
"""As earlier versions named it, which kept a queue there too: what is carried over outlives an upgrade."""
MEMORY = ":memory:"
BUSY_MILLISECONDS = 500
"""How long opening waits for another server on the same folder."""
VERSION = 1
APPLICATION_ID = 0x44415251  # "DARQ"
_TABLE = (
    "CREATE TABLE IF NOT EXISTS entries (kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, "
    "crc INTEGER NOT NULL, PRIMARY KEY (kind, key))"
)
_UPSERT = (
    "INSERT INTO entries VALUES (?, ?, ?, ?) "
    "ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value, crc = excluded.crc"
)

Changes = Mapping[Name, bytes | None]
"""New values by kind and key; ``None`` to delete one."""


class TransactionStore(AbstractContextManager["TransactionStore"]):
    """Bytes by kind and key in ``folder``/queue.db, or in memory without a folder. For all threads.

    Unlike `Store`, whose puts are written a moment later, all changes of a `write` are on the disk when it returns, or
    none are. One process has the file to itself: what was read at its start must not change behind it.

    Raises:
        StateDamaged, StateTooNew: the file is damaged, another program's or newer; it was not changed.
        StateError: the folder or file cannot be used, or another server uses it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._path = Path(MEMORY) if folder is None else folder / FILE_NAME
        self._lock = threading.Lock()
        with translate_errors(self._path), ExitStack() as opened:
            if folder is None:
                connection = sqlite3.connect(MEMORY, isolation_level=None, check_same_thread=False)
            else:
                connection = _open(folder, self._path)
            self._connection = opened.enter_context(closing(connection))
            self._prepare()
            self._closing = opened.pop_all()

    @property
    def is_durable(self) -> bool:
        """Whether what is written is on the disk, not in memory."""
        return str(self._path) != MEMORY

    def read(self, kind: str, key: str) -> bytes | None:
        """Return the value, or ``None``.

        Raises:
            StateError: the file can no longer be read, or is damaged.
        """
        with self._lock, translate_errors(self._path):
            row = self._connection.execute(
                "SELECT kind, key, value, crc FROM entries WHERE kind = ? AND key = ?", (kind, key)
            ).fetchone()
        return None if row is None else self._verify(*row)[1]

    def keys(self, kind: str) -> list[str]:
        """Return the keys of a kind in their order, also of values that are damaged. Raises ``StateError``."""
        with self._lock, translate_errors(self._path):
            rows = self._connection.execute("SELECT key FROM entries WHERE kind = ? ORDER BY key", (kind,)).fetchall()
        return [key for (key,) in rows]

    def write(self, changes: Changes) -> None:
        """Make all changes at once; they are on the disk when this returns.

        Raises:
            StateError: nothing was changed.
        """
        deleted = [name for name, value in changes.items() if value is None]
        put = [(*name, value, _checksum(*name, value)) for name, value in changes.items() if value is not None]
        with self._lock, translate_errors(self._path):
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.executemany("DELETE FROM entries WHERE kind = ? AND key = ?", deleted)
                self._connection.executemany(_UPSERT, put)
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def clear(self) -> None:
        """Delete everything, whatever its state; it is gone from the disk when this returns.

        Raises:
            StateError: nothing was changed.
        """
        with self._lock, translate_errors(self._path):
            self._connection.execute("DELETE FROM entries")

    def close(self) -> None:
        with self._lock:
            self._closing.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self) -> None:
        run = self._connection.execute
        run("PRAGMA locking_mode = EXCLUSIVE")  # a second server on this folder is refused
        application, version = (run(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        is_new = not run("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if not is_new and application != APPLICATION_ID:
            raise StateDamaged(f"{self._path} is another program's file; it was not changed. Move it away")
        if version > VERSION:
            raise StateTooNew(f"{self._path} was written by a newer darts-server; it was not changed. Upgrade")
        if not is_new and (found := run("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise StateDamaged(f"{self._path} is damaged: {found}; it was not changed. Move it away, or restore a copy")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        run("BEGIN IMMEDIATE")
        run(_TABLE)
        run(f"PRAGMA application_id = {APPLICATION_ID}")
        run(f"PRAGMA user_version = {VERSION}")
        run("COMMIT")

    def _verify(self, kind: object, key: object, value: object, crc: object) -> tuple[str, bytes]:
        match kind, key, value:
            case str(), str(), bytes() if _checksum(kind, key, value) == crc:
                return key, value
        raise StateDamaged(
            f"{self._path} is damaged: the checksum of {kind} {str(key)[:64]!r} is wrong; move the file "
            f"({self._path.name}, {self._path.name}-wal) away to start with nothing carried over"
        )


class CarriedFile(AbstractContextManager["CarriedFile"]):
    """The file of what is carried over, in a folder; without a folder, memory.

    It is opened now, so that a file that cannot be used ends the start. While another server uses it, it is opened when
    it is needed: a server that was ending has ended by then.

    Raises:
        StateError: as `TransactionStore`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._store = self._open_unless_used()

    def open(self) -> TransactionStore:
        """Return the file's store, or one in memory, with a warning, if another server still uses the file.

        Raises:
            StateError: as `TransactionStore`.
        """
        self._store = self._store or self._open_unless_used()
        if self._store is None:
            logger.warning(
                "another server keeps what it carries over in %s: what this one carries over does not outlive it; give "
                "this one a --state-dir of its own",
                self._folder,
            )
            self._store = TransactionStore()
        return self._store

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._store.close()

    def _open_unless_used(self) -> TransactionStore | None:
        try:
            return TransactionStore(self._folder)
        except StateError as error:
            if getattr(error.__cause__, "sqlite_errorcode", None) != sqlite3.SQLITE_BUSY:
                raise
            return None


def _open(folder: Path, path: Path) -> sqlite3.Connection:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"{path} cannot be created: {error}; give another --state-dir") from error
    refuse_special_files(path)
    connection = connect(path, "rwc")
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}")
    return connection


def _checksum(kind: str, key: str, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(f"{kind}\0{key}\0".encode()))
