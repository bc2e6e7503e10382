"""The state file ``state.db``: an SQLite file of one server, which is checked before anything may change it."""

import os
import secrets
import sqlite3
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from darts_server.exceptions import StateDamaged, StateError, StateFull, StateTooNew
from darts_server.store.archive import Name, Row

FILE_NAME = "state.db"
VERSION = 1
APPLICATION_ID = 0x44415254  # "DART"
BUSY_SECONDS = 5.0
"""How long a statement waits for another process's transaction. The longest, a restore, takes seconds."""
_LOG_BYTES = 64 * 1024 * 1024
"""Size to which SQLite shrinks its log again after a restore."""
_TABLES = {
    "documents": "CREATE TABLE documents (kind TEXT NOT NULL, key TEXT NOT NULL, document TEXT NOT NULL, "
    "crc INTEGER NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID",
    "restores": "CREATE TABLE restores (generation INTEGER NOT NULL)",
}
"""Earlier versions read the second one."""
_SELECT = "SELECT kind, key, document, crc FROM documents"
_UPSERT = (
    "INSERT INTO documents VALUES (?, ?, ?, ?) "
    "ON CONFLICT (kind, key) DO UPDATE SET document = excluded.document, crc = excluded.crc"
)
_TRANSIENT = {
    getattr(sqlite3, f"SQLITE_{name}") for name in ("BUSY", "CANTOPEN", "FULL", "IOERR", "LOCKED", "PERM", "READONLY")
}
"""SQLite's primary result codes for errors of the disk or of other processes, not of the file's content."""


class Database:
    """Rows in ``folder``/state.db, which is created if missing.

    `write` may run in one thread while another one reads; only one thread at a time may do either. Every method may
    raise ``StateError``, and then has changed nothing.

    Raises:
        StateDamaged, StateTooNew: the file cannot be used; it was not touched.
        StateError: the folder or file cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / FILE_NAME
        with translate_errors(path), ExitStack() as opened:
            folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                create(path)
            refuse_special_files(path)
            _check_file(path)
            # One connection reads and one writes, so that a reader never waits for the disk of a writer.
            self._writer = opened.enter_context(closing(connect(path, "rw")))
            self._reader = opened.enter_context(closing(connect(path, "ro")))
            self._writer.execute("PRAGMA synchronous = FULL")
            self._writer.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            self._status = path.stat()
            # Fails if the file is read-only: the start is the time to say so.
            self._writer.executescript("BEGIN IMMEDIATE; UPDATE restores SET generation = 0; ROLLBACK")
            self._connections = opened.pop_all()

    def read(self, name: Name) -> str | None:
        """Return the document's JSON text."""
        with translate_errors(self._path):
            rows = self._reader.execute(f"{_SELECT} WHERE kind = ? AND key = ?", name).fetchall()
        return next((text for _, _, text in _verified(self._path, rows)), None)

    def count(self, kind: str, unwritten: Iterable[str]) -> int:
        """Count the keys of ``kind``, stored and ``unwritten`` (without repetition) together."""
        exists = "SELECT 1 FROM documents WHERE kind = ? AND key = ?"
        with translate_errors(self._path):
            self._reader.execute("BEGIN")  # one snapshot for all statements: the writer may commit between them
            try:
                [[stored]] = self._reader.execute("SELECT count(*) FROM documents WHERE kind = ?", (kind,))
                return int(stored) + sum(
                    self._reader.execute(exists, (kind, key)).fetchone() is None for key in unwritten
                )
            finally:
                self._reader.execute("ROLLBACK")

    @contextmanager
    def snapshot(self) -> Iterator[Iterator[Row]]:
        """All rows as they are at this moment, ordered by kind and key.

        It uses a connection of its own. SQLite's log cannot shrink while it is open.
        """
        with translate_errors(self._path):
            self._refuse_moved()
            with closing(connect(self._path, "ro")) as connection:
                yield _verified(self._path, connection.execute(f"{_SELECT} ORDER BY kind, key"))

    def write(self, rows: Iterable[Row], *, replace: bool = False) -> None:
        """Add or overwrite rows, or ``replace`` everything by them, all at once.

        They are on the disk when this returns.
        """
        with translate_errors(self._path), self._writer:  # commits, or rolls back
            self._refuse_moved()
            self._writer.execute("BEGIN IMMEDIATE")
            refuse_foreign(self._path, self._writer, APPLICATION_ID, VERSION)  # a newer server may have migrated it
            if replace:
                self._writer.execute("DELETE FROM documents")
            self._writer.executemany(_UPSERT, ((*row, checksum(row[0], row[1], row[2].encode())) for row in rows))

    def close(self) -> None:
        self._connections.close()

    def _refuse_moved(self) -> None:
        if not (self._path.exists() and os.path.samestat(self._path.stat(), self._status)):
            raise StateError(f"{self._path} was moved or replaced while it was in use; put it back, or restart")


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Connect in autocommit mode, for any thread, one at a time. ``mode``: parameters of SQLite's URI."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def create(path: Path) -> None:
    """Create an empty state file, unless another process is first.

    It is written under another name and linked, so that it appears complete or not at all.
    """
    stray = Path(f"{path}-wal")
    if stray.exists() and not path.exists():  # in this order: SQLite creates the log after the file
        raise StateDamaged(f"{stray} exists without {path.name}: put that file back, or move this one away too")
    new = path.with_name(f"{path.name}.new-{secrets.token_hex(8)}")
    try:
        new.touch(exist_ok=False)  # with the umask's rights: SQLite would let only the owner write
        with closing(connect(new, "rw")) as connection:
            connection.executescript(
                f"PRAGMA journal_mode = WAL; PRAGMA application_id = {APPLICATION_ID}; BEGIN; "
                f"{'; '.join(_TABLES.values())}; INSERT INTO restores VALUES (0); "
                f"PRAGMA user_version = {VERSION}; COMMIT"
            )
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            Path(f"{new}{suffix}").unlink(missing_ok=True)


def refuse_special_files(path: Path) -> None:
    """Check that a file and its logs are regular files: SQLite would wait for ever for the writer of a pipe.

    Raises:
        StateDamaged: one is not.
    """
    for suffix in ("", "-wal", "-shm"):
        file = Path(f"{path}{suffix}")
        if file.exists() and not stat.S_ISREG(file.stat().st_mode):
            raise StateDamaged(f"{file} is not a regular file; it was not touched. Move it away")


def refuse_foreign(path: Path, connection: sqlite3.Connection, application_id: int, version: int) -> None:
    """
    Raises:
        StateDamaged: the file is another program's.
        StateTooNew: a newer version wrote it.
    """
    if _pragma(connection, "application_id") != application_id:
        raise damaged(path, "it is another program's file")
    found = _pragma(connection, "user_version")
    if isinstance(found, int) and found > version:
        raise StateTooNew(
            f"{path} was written by a newer darts-server (schema {found}, this one reads {version}); "
            "it was not touched. Upgrade, or give another --state-dir"
        )


def refuse_broken(path: Path, connection: sqlite3.Connection) -> None:
    """Let SQLite check the structure of the whole file. Raises ``StateDamaged``."""
    if (found := _pragma(connection, "quick_check(1)")) != "ok":
        raise damaged(path, str(found).splitlines()[-1])


def _check_file(path: Path) -> None:
    """Check the whole state file, and change nothing."""
    # Without its log at first (immutable): otherwise SQLite would create files beside one that is not ours.
    with closing(connect(path, "ro&immutable=1")) as connection:
        refuse_foreign(path, connection, APPLICATION_ID, VERSION)
    with closing(connect(path, "ro")) as connection:
        refuse_foreign(path, connection, APPLICATION_ID, VERSION)
        refuse_broken(path, connection)
        tables = dict(connection.execute("SELECT name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'"))
        if tables != _TABLES or _pragma(connection, "user_version") != VERSION:
            raise damaged(path, "its tables are not ours")
        if _pragma(connection, "journal_mode") != "wal":
            raise damaged(path, "it is not in WAL mode")
        for _ in _verified(path, connection.execute(_SELECT)):
            pass


def _verified(path: Path, rows: Iterable[tuple[object, ...]]) -> Iterator[Row]:
    """Yield the rows without their checksums. Raises ``StateDamaged`` at a row whose checksum is wrong."""
    with translate_errors(path):
        for kind, key, text, crc in rows:
            if not (isinstance(kind, str) and isinstance(key, str) and isinstance(text, str)):
                raise damaged(path, "a value is of the wrong type")
            if checksum(kind, key, text.encode()) != crc:
                raise damaged(path, f"the checksum of {kind} {key[:64]!r} is wrong")
            yield kind, key, text


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


def _pragma(connection: sqlite3.Connection, name: str) -> object:
    row: tuple[object, ...] = connection.execute(f"PRAGMA {name}").fetchone()
    return row[0]
