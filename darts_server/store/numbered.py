"""A file of numbered values that may be lost.

A damaged file is moved away, so that a server always starts. Learned state is in another file, which stays untouched.
"""

import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from darts_server.store.database import BUSY_SECONDS, checksum

logger = logging.getLogger(__name__)

WRITE_SECONDS = 1.0
"""Time between two writes. A killed process loses the values since the last one."""
VERSION = 1
_TABLE = "CREATE TABLE IF NOT EXISTS numbered (number INTEGER PRIMARY KEY, value BLOB NOT NULL, crc INTEGER NOT NULL)"


class NumberedFile(AbstractContextManager["NumberedFile"]):
    """Values by number, in ``folder``/``name``. Without a folder nothing is kept. All threads may use it.

    `put` never waits for the disk: a thread writes. A failed write is logged, and repeated until it succeeds.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self.fault: str | None = None
        """Why the last write failed, or None."""
        self._path = Path(name) if folder is None else folder / name
        self._memory_lock = threading.Lock()
        self._write_lock = threading.Lock()
        # None for a value to remove.
        self._unwritten: dict[int, bytes | None] = {}
        self._connection: sqlite3.Connection | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_until_stopped, name="darts-numbered", daemon=True)
        if folder is not None:
            self._connection = self._open()
        if self._connection is not None:
            self._thread.start()

    def read(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield each number, in ascending order, and its value. The value is None if it is damaged."""
        if self._connection is None:
            return
        try:
            for number, value, crc in self._connection.execute("SELECT * FROM numbered ORDER BY number"):
                is_whole = isinstance(value, bytes) and checksum("numbered", str(number), value) == crc
                yield number, value if is_whole else None
        except sqlite3.Error as error:
            logger.warning("the rest of %s cannot be read, and is not used: %s", self._path, error)

    def put(self, number: int, value: bytes | None) -> None:
        """Store a value under a new number, or remove a value (None)."""
        if self._connection is not None:
            with self._memory_lock:
                if value is None and self._unwritten.get(number) is not None:
                    # A number has a single value, which was never written. So the file has nothing to remove.
                    del self._unwritten[number]
                else:
                    self._unwritten[number] = value

    def flush(self) -> None:
        """Write all changes now. A failure is logged, and the changes stay in memory for the next attempt."""
        # The thread may be writing earlier changes, which must be in the file when this returns.
        with self._write_lock:
            if self._connection is None:
                return
            with self._memory_lock:
                changes = self._unwritten
                self._unwritten = {}
            if not changes:
                return
            try:
                with self._connection as connection:
                    connection.execute("BEGIN IMMEDIATE")
                    for number, value in changes.items():
                        if value is None:
                            connection.execute("DELETE FROM numbered WHERE number = ?", (number,))
                        else:
                            row = (number, value, checksum("numbered", str(number), value))
                            connection.execute("INSERT OR REPLACE INTO numbered VALUES (?, ?, ?)", row)
            except sqlite3.Error as error:
                if self.fault is None:
                    logger.error("%s cannot be written, and is kept in memory until it can: %s", self._path, error)
                self.fault = str(error)
                with self._memory_lock:
                    # Changes that were made during the write are newer.
                    self._unwritten = {**changes, **self._unwritten}
                return
            if self.fault is not None:
                logger.warning("%s is written again", self._path)
            self.fault = None

    def close(self) -> None:
        if self._connection is None:
            return
        self._stop.set()
        self._thread.join()
        self.flush()
        self._connection.close()
        self._connection = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_until_stopped(self) -> None:
        while not self._stop.wait(WRITE_SECONDS):
            self.flush()

    def _open(self) -> sqlite3.Connection | None:
        # The second attempt creates the file, because the first has moved it away.
        for _ in range(2):
            try:
                return self._connect()
            except (sqlite3.Error, OSError) as error:
                logger.warning("%s cannot be used, and is moved away: %s", self._path, error)
            for suffix in ("", "-wal", "-shm"):
                try:
                    os.replace(f"{self._path}{suffix}", f"{self._path}.unusable{suffix}")
                except FileNotFoundError:
                    continue
                except OSError as error:
                    logger.warning("%s%s cannot be moved: %s; nothing is written", self._path, suffix, error)
                    return None
        return None

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            self._path,
            BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            [[version]] = connection.execute("PRAGMA user_version")
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"it has version {version}, and this server reads {VERSION}")
            [[problem]] = connection.execute("PRAGMA quick_check(1)")
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
            connection.execute("PRAGMA journal_mode = WAL")
            # Values in this file may be lost, so writes need not survive a power failure.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(_TABLE)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        except BaseException:
            connection.close()
            raise
        return connection
