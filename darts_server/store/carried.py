"""What is carried over from one server to the next: bytes, on the disk when a write returns."""

from collections.abc import Iterable
from pathlib import Path

from darts_server.exceptions import StateDamaged
from darts_server.store.database import checksum, damaged, open_database, transaction

FILE_NAME = "queue.db"
"""As earlier versions named it, which kept a queue there too: what is carried over outlives an upgrade."""
KIND = "carried"
APPLICATION_ID = 0x44415251  # "DARQ"
_TABLES = (
    "CREATE TABLE entries (kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, "
    "crc INTEGER NOT NULL, PRIMARY KEY (kind, key))"
)


class CarriedFile:
    """Values in ``folder``/queue.db, in the order in which they were added. One thread at a time may use it.

    A server that starts takes them when it is about to serve; one that still ends may add more meanwhile.

    Raises:
        StateDamaged, StateTooNew: the file is damaged, another program's or newer; it was not touched.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._connection = open_database(self._path, APPLICATION_ID, _TABLES)

    def add(self, values: Iterable[bytes]) -> None:
        """Add all values at once; they are on the disk when this returns.

        Raises:
            StateError: nothing was changed.
        """
        with transaction(self._path, self._connection):
            # Behind what others have added; a server that ends may do so while the next one runs.
            query = "SELECT coalesce(max(CAST(key AS INTEGER)) + 1, 0) FROM entries WHERE kind = ?"
            [first] = self._connection.execute(query, (KIND,)).fetchone()
            named = ((f"{number:08}", value) for number, value in enumerate(values, first))
            rows = [(KIND, key, value, checksum(KIND, key, value)) for key, value in named]
            self._connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", rows)

    def take(self) -> list[bytes | StateDamaged]:
        """Remove all values and return them, with an error in place of each damaged one.

        Raises:
            StateError: nothing was removed.
        """
        with transaction(self._path, self._connection):
            rows = self._connection.execute("SELECT key, value, crc FROM entries WHERE kind = ? ORDER BY key", (KIND,))
            taken: list[bytes | StateDamaged] = [
                value
                if isinstance(value, bytes) and checksum(KIND, key, value) == crc
                else damaged(self._path, f"the checksum of {KIND} {key[:64]!r} is wrong")
                for key, value, crc in rows
            ]
            self._connection.execute("DELETE FROM entries")  # also the rows of the queue of earlier versions
        return taken

    def close(self) -> None:
        self._connection.close()
