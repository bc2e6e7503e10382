"""The state file: how it is created, and how it is checked before anything may change it."""

import os
import secrets
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from darts_server.exceptions import StateDamaged, StateError, StateFull, StateTooNew
from darts_server.store.document import Row, checksum

VERSION = 1
APPLICATION_ID = 0x44415254  # "DART"
BUSY_SECONDS = 5.0
"""How long a statement waits for another process's transaction. The longest, a restore, takes seconds."""
_TABLES = {
    "documents": "CREATE TABLE documents (kind TEXT NOT NULL, key TEXT NOT NULL, document TEXT NOT NULL, "
    "crc INTEGER NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID",
    "restores": "CREATE TABLE restores (generation INTEGER NOT NULL)",
}
_TRANSIENT = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}
"""SQLite's primary result codes for errors of the disk or of other processes, not of the file's content."""


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Connect in autocommit mode, for any thread, one at a time. ``mode``: parameters of SQLite's URI."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def create(path: Path) -> None:
    """Create an empty state file if there is none.

    The file is written under another name and linked, so that it appears complete or not at all. Another process may
    be first.
    """
    stray = Path(f"{path}-wal")
    if stray.exists() and not path.exists():  # in this order: SQLite creates the log after the file
        raise StateDamaged(f"{stray} exists without {path.name}: put that file back, or move this one away too")
    new = path.with_name(f"{path.name}.new-{secrets.token_hex(8)}")
    try:
        new.touch(exist_ok=False)  # with the umask's rights: SQLite would let only the owner write
        with closing(connect(new, "rw")) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute("BEGIN")
            for statement in _TABLES.values():
                connection.execute(statement)
            connection.execute("INSERT INTO restores VALUES (0)")
            connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.execute("COMMIT")
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            Path(f"{new}{suffix}").unlink(missing_ok=True)


def refuse_special_files(path: Path) -> None:
    """Check that the state file and its logs are regular files: SQLite would wait for ever for the writer of a pipe.

    Raises:
        StateDamaged: one is not.
        StateError: one cannot be read.
    """
    for suffix in ("", "-wal", "-shm"):
        file = Path(f"{path}{suffix}")
        try:
            if not stat.S_ISREG(file.stat().st_mode):
                raise StateDamaged(f"{file} is not a regular file; it was not touched. Move it away")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StateError(f"{file} cannot be read: {error.strerror}; give another --state-dir") from error


def check_file(path: Path) -> None:
    """Check the whole file, and change nothing.

    Raises:
        StateDamaged: it is no database, another program's, or damaged.
        StateTooNew: a newer version wrote it.
        StateError: it cannot be read.
    """
    with translate_errors(path):
        # Without its log at first (immutable): otherwise SQLite would create files beside one that is not ours.
        with closing(connect(path, "ro&immutable=1")) as connection:
            if _pragma(connection, "application_id") != APPLICATION_ID:
                raise damaged(path, "it is another program's file")
            refuse_newer(path, connection)
        with closing(connect(path, "ro")) as connection:
            refuse_newer(path, connection)
            _check_content(path, connection)


def _check_content(path: Path, connection: sqlite3.Connection) -> None:
    if (found := _pragma(connection, "quick_check(1)")) != "ok":
        raise damaged(path, str(found).splitlines()[-1])
    tables = dict(connection.execute("SELECT name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'"))
    if tables != _TABLES or _pragma(connection, "user_version") != VERSION:
        raise damaged(path, "its tables are not ours")
    if _pragma(connection, "journal_mode") != "wal":
        raise damaged(path, "it is not in WAL mode")
    if connection.execute("SELECT count(*), min(typeof(generation)) FROM restores").fetchone() != (1, "integer"):
        raise damaged(path, "it does not say how often it was restored")
    for _ in verify_rows(path, connection.execute("SELECT kind, key, document, crc FROM documents")):
        pass


def verify_rows(path: Path, rows: Iterable[tuple[object, ...]]) -> Iterator[Row]:
    """Yield the rows without their checksums. Raises ``StateDamaged`` at a row whose checksum is wrong."""
    with translate_errors(path):
        for kind, key, text, crc in rows:
            if not (isinstance(kind, str) and isinstance(key, str) and isinstance(text, str)):
                raise damaged(path, "a value is of the wrong type")
            if checksum(kind, key, text) != crc:
                raise damaged(path, f"the checksum of {kind} {key[:64]!r} is wrong")
            yield kind, key, text


def refuse_newer(path: Path, connection: sqlite3.Connection) -> None:
    version = _pragma(connection, "user_version")
    if isinstance(version, int) and version > VERSION:
        raise StateTooNew(
            f"{path} was written by a newer darts-server (schema {version}, this one reads {VERSION}); "
            "it was not touched. Upgrade, or give another --state-dir"
        )


def damaged(path: Path, what: str) -> StateDamaged:
    return StateDamaged(
        f"{path} is damaged: {what}; it was not touched. Put a saved copy in its place, or move it "
        f"({path.name}, {path.name}-wal, {path.name}-shm) away to start with nothing learned"
    )


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Translate SQLite's errors to ours."""
    try:
        yield
    except UnicodeDecodeError as error:  # of sqlite3, when SQLite's message quotes damaged text
        raise damaged(path, "its tables are not ours") from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)  # errors of the Python module have none
        if code is None or code & 0xFF not in _TRANSIENT:
            raise damaged(path, str(error)) from error
        remedy = "look for a full disk, missing rights, another process that holds it, or a folder not on a local disk"
        kind = StateFull if code & 0xFF == sqlite3.SQLITE_FULL else StateError
        raise kind(f"{path} cannot be used: {error} ({error.sqlite_errorname}); {remedy}") from error


def _pragma(connection: sqlite3.Connection, name: str) -> object:
    row: tuple[object, ...] = connection.execute(f"PRAGMA {name}").fetchone()
    return row[0]
