"""The SQLite file of a server, which is checked before anything may change it."""

import os
import secrets
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from darts_server.exceptions import StateDamaged, StateError, StateFull, StateTooNew

VERSION = 1
APPLICATION_ID = 0x44415254  # "DART"
BUSY_SECONDS = 5.0
"""How long a statement waits for another process's transaction: the previous server may still be ending."""
_LOG_BYTES = 64 * 1024 * 1024
"""Size to which SQLite shrinks its log again after a large write."""
_TRANSIENT = {
    getattr(sqlite3, f"SQLITE_{name}") for name in ("BUSY", "CANTOPEN", "FULL", "IOERR", "LOCKED", "PERM", "READONLY")
}
"""SQLite's primary result codes for errors of the disk or of other processes, not of the file's content."""


def open_database(path: Path, tables: str) -> sqlite3.Connection:
    """Open the file, which is created with ``tables`` if missing, in autocommit mode, for one thread at a time.

    Raises:
        StateDamaged, StateTooNew: the file is damaged, another program's or newer; it was not touched.
        StateError: the folder or file cannot be used.
    """
    log = Path(f"{path}-wal")
    with translate_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for file in (path, log, Path(f"{path}-shm")):  # SQLite would wait for ever for the writer of a pipe
            if file.exists() and not file.is_file():
                raise StateDamaged(f"{file} is not a regular file; it was not touched. Move it away")
        if not path.exists():
            if log.exists() and not path.exists():  # in this order: SQLite creates the log after the file
                raise StateDamaged(f"{log} exists without {path.name}: put that file back, or move this one away too")
            _create(path, tables)
        # Without a log no other process uses the file. Then SQLite creates no files beside one that may not be ours.
        with closing(_connect(path, "ro" if log.exists() else "ro&immutable=1")) as connection:
            if _pragma(connection, "application_id") != APPLICATION_ID:
                raise damaged(path, "it is another program's file")
            refuse_newer(path, connection)
            if (found := _pragma(connection, "quick_check(1)")) != "ok":
                raise damaged(path, str(found).splitlines()[-1])
        connection = _connect(path, "rw")
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            # Fails if the file is read-only: the start is the time to say so.
            connection.executescript(f"BEGIN IMMEDIATE; PRAGMA user_version = {VERSION}; ROLLBACK")
        except BaseException:
            connection.close()
            raise
        return connection


def _create(path: Path, tables: str) -> None:
    """Create the file, unless another process is first.

    Under another name, so that it appears complete or not at all, and touched, so that it gets the umask's rights:
    SQLite would let only the owner write.
    """
    new = Path(f"{path}.new-{secrets.token_hex(8)}")
    try:
        new.touch()
        with closing(_connect(new, "rw")) as connection:
            connection.executescript(
                f"PRAGMA journal_mode = MEMORY; BEGIN; {tables}; PRAGMA application_id = {APPLICATION_ID}; "
                f"PRAGMA user_version = {VERSION}; COMMIT"
            )
        with suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)


def refuse_newer(path: Path, connection: sqlite3.Connection) -> None:
    version = _pragma(connection, "user_version")
    if isinstance(version, int) and version > VERSION:
        raise StateTooNew(
            f"{path} was written by a newer darts-server (schema {version}, this one reads {VERSION}); "
            "it was not touched. Upgrade, or give another --state-dir"
        )


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    """``mode``: parameters of SQLite's URI."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def _pragma(connection: sqlite3.Connection, name: str) -> object:
    row: tuple[object, ...] = connection.execute(f"PRAGMA {name}").fetchone()
    return row[0]


def checksum(kind: str, key: str, value: bytes) -> int:
    """CRC-32 of a row. SQLite checks the structure of its pages, but not their content."""
    return zlib.crc32(value, zlib.crc32(f"{kind}\0{key}\0".encode()))


def damaged(path: Path, what: str) -> StateDamaged:
    return StateDamaged(
        f"{path} is damaged: {what}; it was not touched. Put a saved copy in its place, or move it "
        f"({path.name}, {path.name}-wal, {path.name}-shm) away to start without what it holds"
    )


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Translate SQLite's and the operating system's errors to ours."""
    try:
        yield
    except OSError as error:
        raise StateError(f"{path} cannot be used: {error}; give another --state-dir") from error
    except UnicodeDecodeError as error:  # of sqlite3, when SQLite's message quotes damaged text
        raise damaged(path, "its tables are not ours") from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", -1) & 0xFF  # errors of the Python module have none
        if code not in _TRANSIENT:
            raise damaged(path, str(error)) from error
        remedy = "look for a full disk, missing rights, another process that holds it, or a folder not on a local disk"
        kind = StateFull if code == sqlite3.SQLITE_FULL else StateError
        raise kind(f"{path} cannot be used: {error} ({error.sqlite_errorname}); {remedy}") from error
