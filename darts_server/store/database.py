"""SQLite file of a server, which is checked before anything changes it."""

import os
import secrets
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from darts_server.exceptions import StateDamaged, StateError, StateFull, StateTooNew

VERSION = 1
# "DART"
APPLICATION_ID = 0x44415254
BUSY_SECONDS = 5.0
"""Timeout of a statement that waits for the previous server, which may still write as it ends."""
_LOG_BYTES = 64 * 1024 * 1024
_TABLES = (
    "CREATE TABLE documents (kind TEXT NOT NULL, key TEXT NOT NULL, document TEXT NOT NULL, "
    "crc INTEGER NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID"
)
_TRANSIENT = {
    getattr(sqlite3, f"SQLITE_{name}") for name in ("BUSY", "CANTOPEN", "FULL", "IOERR", "LOCKED", "PERM", "READONLY")
}
"""SQLite's primary codes of errors that are not in the file's content."""


def open_database(path: Path) -> sqlite3.Connection:
    """Open the file in autocommit mode, for one thread at a time. A missing file is created.

    Raises:
        StateDamaged, StateTooNew: the file is damaged, newer, or another program's; it was not touched.
        StateError: the folder or file cannot be used.
    """
    log = Path(f"{path}-wal")
    with translate_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # SQLite would wait for ever for the writer of a pipe.
        for file in (path, log, Path(f"{path}-shm")):
            if file.exists() and not file.is_file():
                raise StateDamaged(f"{file} is not a regular file; it was not touched. Move it away")
        if not path.exists():
            # Another process may have just created the file, and then its log. Only a log that still has no file is an
            # orphan.
            if log.exists() and not path.exists():
                raise StateDamaged(f"{log} exists without {path.name}: put that file back, or move this one away too")
            _create(path)

        # Without a log no other process uses the file. `immutable` keeps SQLite from creating files beside a file that
        # may not be ours.
        with closing(_connect(path, "ro" if log.exists() else "ro&immutable=1")) as connection:
            if _read_pragma(connection, "application_id") != APPLICATION_ID:
                raise damaged_error(path, "it is another program's file")
            refuse_newer(path, connection)
            problem = _read_pragma(connection, "quick_check(1)")
            if problem != "ok":
                raise damaged_error(path, str(problem).splitlines()[-1])

        connection = _connect(path, "rw")
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            # A read-only file fails here, at the start.
            connection.executescript(f"BEGIN IMMEDIATE; PRAGMA user_version = {VERSION}; ROLLBACK")
        except BaseException:
            connection.close()
            raise
        return connection


def _create(path: Path) -> None:
    # The file gets its name when it is complete. It is touched first, so that the umask decides who may write it.
    unnamed = Path(f"{path}.new-{secrets.token_hex(8)}")
    try:
        unnamed.touch()
        with closing(_connect(unnamed, "rw")) as connection:
            connection.executescript(
                f"PRAGMA journal_mode = MEMORY; BEGIN; {_TABLES}; PRAGMA application_id = {APPLICATION_ID}; "
                f"PRAGMA user_version = {VERSION}; COMMIT"
            )
        # Another process may be first.
        with suppress(FileExistsError):
            os.link(unnamed, path)
    finally:
        unnamed.unlink(missing_ok=True)


def refuse_newer(path: Path, connection: sqlite3.Connection) -> None:
    version = _read_pragma(connection, "user_version")
    if isinstance(version, int) and version > VERSION:
        raise StateTooNew(
            f"{path} was written by a newer darts-server (schema {version}, this one reads {VERSION}); "
            "it was not touched. Upgrade, or give another --state-dir"
        )


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(
        uri,
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    # SQLite advises both for files that may be damaged.
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def _read_pragma(connection: sqlite3.Connection, name: str) -> object:
    row: tuple[object, ...] = connection.execute(f"PRAGMA {name}").fetchone()
    return row[0]


def checksum(kind: str, key: str, value: bytes) -> int:
    """Return the CRC-32 of a row. SQLite checks the structure of its pages, but not their content."""
    return zlib.crc32(value, zlib.crc32(f"{kind}\0{key}\0".encode()))


def damaged_error(path: Path, problem: str) -> StateDamaged:
    return StateDamaged(
        f"{path} is damaged: {problem}; it was not touched. Put a saved copy in its place, or move it "
        f"({path.name}, {path.name}-wal, {path.name}-shm) away to start without its content"
    )


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(f"{path} cannot be used: {error}; give another --state-dir") from error
    except UnicodeDecodeError as error:
        # sqlite3 raises this when SQLite's message quotes damaged text.
        raise damaged_error(path, "its tables are not ours") from error
    except sqlite3.Error as error:
        # The lowest byte is the primary code. Errors of the Python module itself have no code, and
        # count as damage.
        primary_code = getattr(error, "sqlite_errorcode", -1) & 0xFF
        if primary_code not in _TRANSIENT:
            raise damaged_error(path, str(error)) from error
        remedy = "look for a full disk, missing rights, another process that has it open, or a folder on a network disk"
        error_type = StateFull if primary_code == sqlite3.SQLITE_FULL else StateError
        raise error_type(f"{path} cannot be used: {error} ({error.sqlite_errorname}); {remedy}") from error
