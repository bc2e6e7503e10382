"""Values that may be lost survive a restart, and no damage of their file keeps a server from starting."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from darts_server.store import numbered
from darts_server.store.database import checksum
from darts_server.store.numbered import NumberedFile

NAME = "values.db"


def values(folder: Path | None) -> dict[int, bytes | None]:
    with NumberedFile(folder, NAME) as file:
        return dict(file.read())


def test_values_survive_a_restart_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    with NumberedFile(tmp_path, NAME) as file:
        assert list(file.read()) == []
        for number in (3, 1, 2):
            file.put(number, bytes(number))
        file.put(1, None)
    with NumberedFile(tmp_path, NAME) as file:
        assert list(file.read()) == [(2, bytes(2)), (3, bytes(3))]
        file.put(2, None)
        file.put(3, b"new")
        file.put(7, None)
    assert values(tmp_path) == {3: b"new"}


def test_a_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_slowly(kind: str, key: str, value: bytes) -> int:
        time.sleep(0.1)
        return checksum(kind, key, value)

    monkeypatch.setattr(numbered, "WRITE_SECONDS", 0.01)
    monkeypatch.setattr(numbered, "checksum", check_slowly)
    with NumberedFile(tmp_path, NAME) as file:
        file.put(1, b"x")
        end = time.monotonic() + 30
        while file._unwritten and time.monotonic() < end:
            time.sleep(0.01)
        file.flush()
        with closing(sqlite3.connect(tmp_path / NAME)) as connection:
            assert connection.execute("SELECT number, value FROM numbered").fetchall() == [(1, b"x")]


def test_nothing_is_kept_without_a_folder() -> None:
    with NumberedFile(None, NAME) as file:
        file.put(1, b"x")
        file.flush()
        assert list(file.read()) == []


@pytest.mark.parametrize("change", ["value = x'00'", "crc = crc + 1", "number = 9", "value = 'text'"])
def test_a_damaged_value_is_none(tmp_path: Path, change: str) -> None:
    with NumberedFile(tmp_path, NAME) as file:
        file.put(1, b"one")
        file.put(2, b"two")
    with sqlite3.connect(tmp_path / NAME) as connection:
        connection.execute(f"UPDATE numbered SET {change} WHERE number = 1")
    connection.close()
    found = values(tmp_path)
    assert found.pop(2) == b"two"
    assert list(found.values()) == [None]


@pytest.mark.parametrize("damage", ["cut", "overwritten", "other", "version", "folder"])
def test_a_file_that_cannot_be_used_is_moved_away(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / NAME
    if damage == "folder":
        path.mkdir()
    else:
        with NumberedFile(tmp_path, NAME) as file:
            for number in range(100):
                file.put(number, bytes(1000))
        data = bytearray(path.read_bytes())
        if damage == "cut":
            path.write_bytes(data[: len(data) // 2])
        elif damage == "overwritten":
            data[4096:40960] = b"\xff" * 36864
            path.write_bytes(data)
        elif damage == "other":
            path.write_bytes(b"text of another program" * 100)
        else:
            with sqlite3.connect(path) as connection:
                connection.execute("PRAGMA user_version = 2")
            connection.close()
    with NumberedFile(tmp_path, NAME) as file:
        assert list(file.read()) == []
        file.put(1, b"x")
    assert "moved away" in caplog.text
    assert (tmp_path / f"{NAME}.unusable").exists()
    assert values(tmp_path) == {1: b"x"}


def test_a_folder_that_cannot_be_made_loses_only_the_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    with NumberedFile(tmp_path / "file", NAME) as file:
        file.put(1, b"x")
        assert list(file.read()) == []
    assert "cannot be" in caplog.text


def test_a_failed_write_is_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with NumberedFile(tmp_path, NAME) as file:
        other = sqlite3.connect(tmp_path / NAME, isolation_level=None)
        assert file._connection is not None
        file._connection.execute("PRAGMA busy_timeout = 1")
        other.execute("BEGIN IMMEDIATE")
        file.put(1, b"one")
        file.put(2, b"two")
        file.flush()
        file.put(1, None)
        assert file._unwritten == {2: b"two"}, "only kept values take memory while writes fail"
        file.put(3, b"three")
        file.flush()
        assert file.fault is not None
        assert caplog.text.count("cannot be written") == 1
        other.execute("ROLLBACK")
        other.close()
        file.flush()
        assert file.fault is None
    assert values(tmp_path) == {2: b"two", 3: b"three"}
