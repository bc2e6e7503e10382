"""What is carried over from one server to the next: bytes by kind and key, on the disk when a write returns."""

import logging
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

from darts_server.exceptions import StateError
from darts_server.store import database
from darts_server.store.archive import Name

logger = logging.getLogger(__name__)

FILE_NAME = "queue.db"
"""As earlier versions named it, which kept a queue there too: what is carried over outlives an upgrade."""
MEMORY = Path(":memory:")
BUSY_MILLISECONDS = 500
"""How long opening waits for another server on the same folder."""
VERSION = 1
APPLICATION_ID = 0x44415251  # "DARQ"
_TABLE = (
    "CREATE TABLE IF NOT EXISTS entries (kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, "
    "crc INTEGER NOT NULL, PRIMARY KEY (kind, key))"
)


class CarriedFile(AbstractContextManager["CarriedFile"]):
    """Bytes by kind and key in ``folder``/queue.db, or in memory without a folder. For all threads.

    Unlike `Store`, whose puts are written a moment later, all of a `write` is on the disk when it returns, or nothing
    of it is. One process has the file to itself: what was read at its start must not change behind it.

    The file is opened now, so that a file that cannot be used ends the start. While another server uses it, it is
    opened by `open`: a server that was ending has ended by then.

    Raises:
        StateDamaged, StateTooNew: the file is damaged, another program's or newer; it was not changed.
        StateError: the folder or file cannot be used.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._path = MEMORY
        self._connection = sqlite3.connect(MEMORY, isolation_level=None, check_same_thread=False)
        self._connection.execute(_TABLE)
        self._is_waiting = folder is not None and not self._open_unless_used(folder)

    def open(self) -> "CarriedFile":
        """Return this, with its file open; in memory, with a warning, if another server still uses the file.

        Raises:
            StateError: as for the class.
        """
        if self._is_waiting and self._folder is not None and not self._open_unless_used(self._folder):
            logger.warning(
                "another server keeps what it carries over in %s: what this one carries over does not outlive it; give "
                "this one a --state-dir of its own",
                self._folder,
            )
        self._is_waiting = False
        return self

    @property
    def is_durable(self) -> bool:
        """Whether what is written is on the disk, not in memory."""
        return self._path != MEMORY

    def read(self, kind: str, key: str) -> bytes | None:
        """Return the value, or ``None``.

        Raises:
            StateError: the file can no longer be read, or is damaged.
        """
        with self._using():
            row = self._connection.execute(
                "SELECT value, crc FROM entries WHERE kind = ? AND key = ?", (kind, key)
            ).fetchone()
        if row is None:
            return None
        value, crc = row
        if not isinstance(value, bytes) or database.checksum(kind, key, value) != crc:
            raise database.damaged(self._path, f"the checksum of {kind} {key[:64]!r} is wrong")
        return value

    def keys(self, kind: str) -> list[str]:
        """Return the keys of a kind in their order, also of values that are damaged. Raises ``StateError``."""
        with self._using():
            rows = self._connection.execute("SELECT key FROM entries WHERE kind = ? ORDER BY key", (kind,)).fetchall()
        return [key for (key,) in rows]

    def write(self, values: Mapping[Name, bytes]) -> None:
        """Write all values at once; they are on the disk when this returns.

        Raises:
            StateError: nothing was changed.
        """
        rows = [(*name, value, database.checksum(*name, value)) for name, value in values.items()]
        with self._using(), self._connection:  # commits, or rolls back
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", rows)

    def clear(self) -> None:
        """Delete everything, whatever its state; it is gone from the disk when this returns.

        Raises:
            StateError: nothing was changed.
        """
        with self._using():
            self._connection.execute("DELETE FROM entries")

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._lock, database.translate_errors(self._path):
            yield

    def _open_unless_used(self, folder: Path) -> bool:
        """Use the file in place of memory, unless another server does; return whether."""
        path = folder / FILE_NAME
        try:
            with database.translate_errors(path), ExitStack() as opened:
                folder.mkdir(parents=True, exist_ok=True)
                database.refuse_special_files(path)
                connection = opened.enter_context(closing(database.connect(path, "rwc")))
                connection.execute(f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}")
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # a second server on this folder is refused
                if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                    database.refuse_foreign(path, connection, APPLICATION_ID, VERSION)
                    database.refuse_broken(path, connection)
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                connection.executescript(
                    f"BEGIN IMMEDIATE; {_TABLE}; PRAGMA application_id = {APPLICATION_ID}; "
                    f"PRAGMA user_version = {VERSION}; COMMIT"
                )
                opened.pop_all()
        except StateError as error:
            if getattr(error.__cause__, "sqlite_errorcode", None) != sqlite3.SQLITE_BUSY:
                raise
            return False
        self._connection.close()
        self._path, self._connection = path, connection
        return True
