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
"""To what a restore's large log shrinks again."""
_PLACEHOLDERS = 500
"""Keys asked for in one statement; the oldest SQLite takes 999."""
_SELECT = "SELECT kind, key, document, crc FROM documents"
_UPSERT = (
    "INSERT INTO documents VALUES (?, ?, ?, ?) "
    "ON CONFLICT (kind, key) DO UPDATE SET document = excluded.document, crc = excluded.crc"
)


class Database:
    """The file ``state.db`` in ``folder``, created if missing. A backend.

    One connection reads and one writes, so that a reader never waits for a writer. Commits are synced to the disk.

    Raises:
        StateDamaged, StateTooNew: the file is not one we may use; it was not touched.
        StateError: the folder or file cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not self._path.exists():
                with schema.refusing(self._path):
                    schema.create(self._path)
        except OSError as error:
            raise StateError(f"{self._path} cannot be created: {error}; give another --state-dir") from error
        schema.inspect(self._path)
        with schema.refusing(self._path), ExitStack() as opened:
            self._writer = opened.enter_context(closing(schema.connect(self._path, "rw")))
            self._reader = opened.enter_context(closing(schema.connect(self._path, "ro")))
            self._writer.execute("PRAGMA synchronous = FULL")
            self._writer.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            self._identity = self._identify()
            self._writer.execute("BEGIN IMMEDIATE")
            self._writer.execute("UPDATE restores SET generation = 0")  # it only shows whether this may write
            self._writer.execute("ROLLBACK")
            self._connections = opened.pop_all()

    def read(self, name: Name) -> str | None:
        with schema.refusing(self._path):
            rows = self._reader.execute(f"{_SELECT} WHERE kind = ? AND key = ?", name).fetchall()
        return next((text for _, _, text in schema.checked(self._path, rows)), None)

    def count(self, kind: str, others: list[str]) -> int:
        with schema.refusing(self._path):
            self._reader.execute("BEGIN")  # all of it at one moment: the other connection may commit at any
            try:
                [[here]] = self._reader.execute("SELECT count(*) FROM documents WHERE kind = ?", (kind,))
                return int(here) + len(others) - self._known(kind, others)
            finally:
                self._reader.execute("ROLLBACK")

    def _known(self, kind: str, keys: list[str]) -> int:
        known, remaining = 0, iter(keys)
        while some := list(islice(remaining, _PLACEHOLDERS)):
            marks = ", ".join("?" * len(some))
            statement = f"SELECT count(*) FROM documents WHERE kind = ? AND key IN ({marks})"
            known += int(self._reader.execute(statement, (kind, *some)).fetchone()[0])
        return known

    @contextmanager
    def snapshot(self, kind: str | None) -> Iterator[Iterator[Row]]:
        """Has its own connection, and keeps the log from shrinking while it is open."""
        with schema.refusing(self._path), closing(schema.connect(self._path, "ro")) as connection:
            where, arguments = ("", ()) if kind is None else ("WHERE kind = ?", (kind,))
            rows = connection.execute(f"{_SELECT} {where} ORDER BY kind, key", arguments)
            yield schema.checked(self._path, rows)

    def generation(self) -> int:
        with schema.refusing(self._path):
            return _generation(self._reader)

    def write(self, texts: Mapping[Name, str], generation: int | None) -> bool:
        with self._transaction():
            if generation not in (None, _generation(self._writer)):
                return False
            self._writer.executemany(_UPSERT, _summed((*name, text) for name, text in texts.items()))
        return True

    def replace(self, rows: Iterable[Row]) -> None:
        with self._transaction():
            self._writer.execute("DELETE FROM documents")
            self._writer.executemany("INSERT INTO documents VALUES (?, ?, ?, ?)", _summed(rows))
            self._writer.execute("UPDATE restores SET generation = generation + 1")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        if self._identify() != self._identity:
            raise StateError(f"{self._path} was moved or replaced while it was in use; put it back, or restart")
        with schema.refusing(self._path):
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                schema.refuse_newer(self._path, self._writer)
                yield
                self._writer.execute("COMMIT")
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def _identify(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def close(self) -> None:
        self._connections.close()


def _generation(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT generation FROM restores").fetchone()[0])


def _summed(rows: Iterable[Row]) -> Iterator[tuple[str, str, str, int]]:
    return ((*row, checksum(*row)) for row in rows)
