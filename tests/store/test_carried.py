"""Values that a server adds for the next server."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from darts_server.exceptions import StateError, StateFull
from darts_server.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path) as store:
        yield store


def connection(store: Store) -> sqlite3.Connection:
    assert store._connection is not None
    return store._connection


def test_values_are_taken_once_and_in_order_even_if_two_servers_overlap(store: Store, tmp_path: Path) -> None:
    store.add_carried([])
    store.add_carried([b"\x00x", b""])
    with Store(tmp_path) as other:
        store.add_carried([b"y" * 100_000])
        assert other.take_carried() == [b"\x00x", b"", b"y" * 100_000]
        store.add_carried([b"late"])
        other.add_carried([b"later"])
        assert store.take_carried() == [b"late", b"later"]
        assert other.take_carried() == store.take_carried() == []


def test_added_values_survive_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from darts_server.store import Store\n"
        "store = Store(Path(sys.argv[1]))\n"
        "for i in range(20): store.add_carried([b'x' * i])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, cwd=os.getcwd())
    assert killed.returncode == -signal.SIGKILL
    with Store(tmp_path) as store:
        assert store.take_carried() == [b"x" * i for i in range(20)]


def test_values_cannot_be_added_without_a_folder() -> None:
    with Store() as store, pytest.raises(StateError, match="without --state-dir"):
        store.add_carried([b"x"])


def test_take_carried_returns_an_error_for_a_damaged_value(store: Store) -> None:
    store.add_carried([b"x", b"y"])
    connection(store).execute("UPDATE carried SET value = x'00' WHERE value = x'78'")
    [error, value] = store.take_carried()
    assert "the checksum of number 1 that is carried over in" in str(error)
    assert (value, store.take_carried()) == (b"y", [])


def test_a_failed_write_changes_nothing(store: Store) -> None:
    store.add_carried([b"x"])
    # The disk seems to be full.
    connection(store).execute("PRAGMA max_page_count = 10")
    with pytest.raises(StateFull, match=r"full.*SQLITE_FULL.*look for a full disk"):
        store.add_carried([b"y", b"z" * 100_000])
    assert store.take_carried() == [b"x"]
