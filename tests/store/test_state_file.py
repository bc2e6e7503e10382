"""State files: which are accepted, how they are created, and how they are shared."""

import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from darts_server.exceptions import StateDamaged, StateError, StateTooNew
from darts_server.store import Store
from darts_server.store.database import _create, checksum
from darts_server.store.store import FILE_NAME


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_the_database_of_another_program_is_refused_and_no_file_is_created_beside_it(
    tmp_path: Path, journal: str
) -> None:
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.execute("CREATE TABLE theirs (a)")
    with pytest.raises(StateDamaged, match="another program's file"):
        Store(tmp_path)
    assert os.listdir(tmp_path) == [FILE_NAME]


@pytest.mark.parametrize(
    ("statement", "error", "message"),
    [
        ("PRAGMA user_version = 2", StateTooNew, r"state\.db was written by a newer .*schema 2.* Upgrade"),
        ("ALTER TABLE documents RENAME TO others", StateDamaged, "no such table"),
        ("INSERT INTO documents VALUES ('prompt', 'a', '{}', 1)", StateDamaged, "checksum of prompt 'a'"),
        ("INSERT INTO documents VALUES ('prompt', 'a', x'00', 1)", StateDamaged, "wrong type"),
    ],
)
def test_a_file_that_is_newer_or_that_another_program_changed_is_refused(
    tmp_path: Path, statement: str, error: type[StateError], message: str
) -> None:
    Store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as connection:
        connection.execute(statement)
    data = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(error, match=message):
        Store(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == data


def test_if_two_processes_create_the_file_the_first_file_stays(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.put("prompt", "a", {"n": 1})
        store.flush()
        _create(tmp_path / FILE_NAME)
    with Store(tmp_path) as store:
        assert store.get("prompt", "a") == {"n": 1}
    assert {*os.listdir(tmp_path)} == {FILE_NAME}


def test_a_log_without_its_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"{FILE_NAME}-wal").write_bytes(b"anything")
    with pytest.raises(StateDamaged, match=r"state\.db-wal exists without state\.db"):
        Store(tmp_path)
    assert os.listdir(tmp_path) == [f"{FILE_NAME}-wal"]


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StateError, match="--state-dir"):
        Store(tmp_path / "file" / "deeper")


def test_only_the_database_stays_in_the_folder(tmp_path: Path) -> None:
    for _ in range(2):
        with Store(tmp_path / "a ?#%20ü") as store:
            store.put("prompt", "a", {"n": 1})
        assert set(os.listdir(tmp_path / "a ?#%20ü")) == {FILE_NAME}


@pytest.mark.parametrize("mask", [0o022, 0o007])
def test_the_file_has_the_permissions_of_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with Store(tmp_path) as store:
            store.put("prompt", "p", {})
            store.flush()
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes.keys() >= {FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"}
    assert set(modes.values()) == {0o666 & ~mask}


def test_the_checksum_covers_kind_key_and_text_separately() -> None:
    rows = [("a", "b", b"{}"), ("a", "b{}", b""), ("ab", "", b"{}"), ("a", "b", b"{ }")]
    assert len({checksum(*row) for row in rows}) == len(rows)


def test_the_next_server_sees_the_last_writes_of_the_previous_server(tmp_path: Path) -> None:
    with Store(tmp_path) as one, Store(tmp_path) as two:
        two.put("prompt", "b", {"n": 0})
        one.put("prompt", "a", {"n": 1})
        one.flush()
        # Its own document is newer.
        two.put("prompt", "b", {"n": 2})
        two.flush()
        assert (two.get("prompt", "a"), two.get("prompt", "b"), two.count("prompt")) == ({"n": 1}, {"n": 2}, 2)


def test_a_write_waits_for_the_write_of_another_process(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            store.put("prompt", "a", {"n": 1})
            # The thread waits now, but callers do not.
            time.sleep(0.7)
            store.put("prompt", "b", {"n": 2})
            other.execute("COMMIT")
        store.flush()
        assert store.fault is None
    with Store(tmp_path) as store:
        assert store.count("prompt") == 2


def test_a_file_that_was_moved_away_is_a_fault_and_not_written(tmp_path: Path) -> None:
    with Store(tmp_path / "state") as store:
        (tmp_path / "state").rename(tmp_path / "elsewhere")
        store.put("prompt", "a", {"n": 1})
        with pytest.raises(StateError, match="No such file"):
            store.flush()
        assert store.get("prompt", "a") == {"n": 1}
        (tmp_path / "elsewhere").rename(tmp_path / "state")
        store.flush()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    with Store(tmp_path / "copy") as store:
        assert store.get("prompt", "a") == {"n": 1}


def test_a_file_that_a_newer_version_has_migrated_is_not_written(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as other:
            other.execute("PRAGMA user_version = 2")
        store.put("prompt", "a", {"n": 1})
        with pytest.raises(StateError, match="newer darts-server"):
            store.flush()
        with pytest.raises(StateError, match="newer darts-server"):
            store.restore(Store().export())
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as other:
            other.execute("PRAGMA user_version = 1")
        store.flush()
        assert store.fault is None


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_the_file_is_refused_at_once(tmp_path: Path, suffix: str) -> None:
    if suffix:
        Store(tmp_path).close()
    path = tmp_path / f"state.db{suffix}"
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(StateDamaged, match=f"state.db{suffix} is not a regular file"):
        Store(tmp_path)
