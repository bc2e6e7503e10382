"""What one server adds and the next one takes."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from darts_server.exceptions import StateFull
from darts_server.store.carried import FILE_NAME, CarriedFile
from darts_server.store.database import checksum


@pytest.fixture
def file(tmp_path: Path) -> Iterator[CarriedFile]:
    with closing(CarriedFile(tmp_path)) as file:
        yield file


def test_values_are_taken_once_in_their_order_also_by_a_server_that_starts_before_the_last_one_ended(
    file: CarriedFile, tmp_path: Path
) -> None:
    file.add([])
    file.add([b"\x00x", b""])
    with closing(CarriedFile(tmp_path)) as other:
        file.add([b"y" * 100_000])
        assert other.take() == [b"\x00x", b"", b"y" * 100_000]
        file.add([b"late"])
        other.add([b"later"])
        assert file.take() == [b"late", b"later"]
        assert other.take() == file.take() == []


def test_what_was_added_is_there_after_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from darts_server.store.carried import CarriedFile\n"
        "file = CarriedFile(Path(sys.argv[1]))\n"
        "for i in range(20): file.add([b'x' * i])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, cwd=os.getcwd())
    assert killed.returncode == -signal.SIGKILL
    with closing(CarriedFile(tmp_path)) as file:
        assert file.take() == [b"x" * i for i in range(20)]


def test_a_file_of_an_earlier_version_that_was_killed_is_read(tmp_path: Path) -> None:
    """It locked the file, numbered its values from 0, and had a queue of other kinds in it."""
    code = (
        "import os, sqlite3, sys\n"
        "connection = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "connection.execute('PRAGMA locking_mode = EXCLUSIVE')\n"
        "connection.execute('PRAGMA journal_mode = WAL')\n"
        "connection.executescript('BEGIN IMMEDIATE; CREATE TABLE IF NOT EXISTS entries (kind TEXT NOT NULL, '\n"
        "    'key TEXT NOT NULL, value BLOB NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (kind, key)); '\n"
        "    'PRAGMA application_id = 0x44415251; PRAGMA user_version = 1; COMMIT')\n"
        f"rows = [('carried', '00000001', b'b', {checksum('carried', '00000001', b'b')}),\n"
        f"    ('carried', '00000000', b'a', {checksum('carried', '00000000', b'a')}), ('queued', '1', b'', 0)]\n"
        "connection.executemany('INSERT INTO entries VALUES (?, ?, ?, ?)', rows)\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / FILE_NAME)], check=True)
    with closing(CarriedFile(tmp_path)) as file:
        file.add([b"c"])
        assert file.take() == [b"a", b"b", b"c"]
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        assert connection.execute("SELECT * FROM entries").fetchall() == []


def test_a_damaged_value_is_an_error_in_place_of_it(file: CarriedFile) -> None:
    file.add([b"x", b"y"])
    file._connection.execute("UPDATE entries SET value = x'00' WHERE value = x'78'")
    [error, value] = file.take()
    assert "the checksum of carried" in str(error)
    assert (value, file.take()) == (b"y", [])


def test_a_failed_write_changes_nothing(file: CarriedFile) -> None:
    file.add([b"x"])
    file._connection.execute("PRAGMA max_page_count = 8")  # as if the disk was full
    with pytest.raises(StateFull, match=r"full.*SQLITE_FULL.*look for a full disk"):
        file.add([b"y", b"z" * 100_000])
    assert file.take() == [b"x"]
