"""Documents in a SQLite file that several processes of one host may share."""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from pathlib import Path

from darts_server.exceptions import StateError
from darts_server.store import schema
from darts_server.store.document import Name, Row, checksum

FILE_NAME = "state.db"
_LOG_BYTES = 64 * 1024 * 1024
"""Size to which SQLite shrinks its log again after a restore."""
_PLACEHOLDERS = 500
"""Keys in one statement; the oldest SQLite takes 999."""
_SELECT = "SELECT kind, key, document, crc FROM documents"
_UPSERT = (
    "INSERT INTO documents VALUES (?, ?, ?, ?) "
    "ON CONFLICT (kind, key) DO UPDATE SET document = excluded.document, crc = excluded.crc"
)


class SqliteBackend:
    """Stores rows in the file ``state.db`` in ``folder``, created if missing.

    One connection reads and one writes, so that a reader never waits for a writer. Commits are synced to the disk.

    Raises:
        StateDamaged, StateTooNew: the file cannot be used; it was not touched.
        StateError: the folder or file cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not self._path.exists():
                with schema.translate_errors(self._path):
                    schema.create(self._path)
        except OSError as error:
            raise StateError(f"{self._path} cannot be created: {error}; give another --state-dir") from error
        schema.refuse_special_files(self._path)
        schema.check_file(self._path)
        with schema.translate_errors(self._path), ExitStack() as opened:
            self._writer = opened.enter_context(closing(schema.connect(self._path, "rw")))
            self._reader = opened.enter_context(closing(schema.connect(self._path, "ro")))
            self._writer.execute("PRAGMA synchronous = FULL")
            self._writer.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            self._file_id = _file_id(self._path)
            self._writer.execute("BEGIN IMMEDIATE")
            # Fails if the file is read-only: the start is the time to say so.
            self._writer.execute("UPDATE restores SET generation = 0")
            self._writer.execute("ROLLBACK")
            self._connections = opened.pop_all()

    def read(self, name: Name) -> str | None:
        with schema.translate_errors(self._path):
            rows = self._reader.execute(f"{_SELECT} WHERE kind = ? AND key = ?", name).fetchall()
        return next((text for _, _, text in schema.verify_rows(self._path, rows)), None)

    def count(self, kind: str, pending: list[str]) -> int:
        with schema.translate_errors(self._path):
            self._reader.execute("BEGIN")  # one snapshot for all statements: the writer may commit between them
            try:
                [[stored]] = self._reader.execute("SELECT count(*) FROM documents WHERE kind = ?", (kind,))
                return int(stored) + len(pending) - self._count_stored(kind, pending)
            finally:
                self._reader.execute("ROLLBACK")

    def _count_stored(self, kind: str, keys: list[str]) -> int:
        count, remaining = 0, iter(keys)
        while some := list(islice(remaining, _PLACEHOLDERS)):
            marks = ", ".join("?" * len(some))
            statement = f"SELECT count(*) FROM documents WHERE kind = ? AND key IN ({marks})"
            count += int(self._reader.execute(statement, (kind, *some)).fetchone()[0])
        return count

    @contextmanager
    def snapshot(self, kind: str | None) -> Iterator[Iterator[Row]]:
        """Uses a connection of its own. SQLite's log cannot shrink while it is open."""
        self._refuse_replaced()
        with schema.translate_errors(self._path), closing(schema.connect(self._path, "ro")) as connection:
            where, arguments = ("", ()) if kind is None else ("WHERE kind = ?", (kind,))
            rows = connection.execute(f"{_SELECT} {where} ORDER BY kind, key", arguments)
            yield schema.verify_rows(self._path, rows)

    def generation(self) -> int:
        with schema.translate_errors(self._path):
            return _generation(self._reader)

    def write(self, texts: Mapping[Name, str], generation: int | None) -> bool:
        with self._transaction():
            if generation not in (None, _generation(self._writer)):
                return False
            self._writer.executemany(_UPSERT, _with_checksums((*name, text) for name, text in texts.items()))
        return True

    def replace(self, rows: Iterable[Row]) -> None:
        with self._transaction():
            self._writer.execute("DELETE FROM documents")
            self._writer.executemany("INSERT INTO documents VALUES (?, ?, ?, ?)", _with_checksums(rows))
            self._writer.execute("UPDATE restores SET generation = generation + 1")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._refuse_replaced()
        with schema.translate_errors(self._path):
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                schema.refuse_newer(self._path, self._writer)
                yield
                self._writer.execute("COMMIT")
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def _refuse_replaced(self) -> None:
        if _file_id(self._path) != self._file_id:
            raise StateError(f"{self._path} was moved or replaced while it was in use; put it back, or restart")

    def close(self) -> None:
        self._connections.close()


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _generation(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT generation FROM restores").fetchone()[0])


def _with_checksums(rows: Iterable[Row]) -> Iterator[tuple[str, str, str, int]]:
    return ((*row, checksum(*row)) for row in rows)
