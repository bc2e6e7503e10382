import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from darts_server.exceptions import StateDamaged, StateFull
from darts_server.store.transactions import FILE_NAME, CarriedFile


@pytest.fixture(params=["memory", "file"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "state" if request.param == "file" else None


def test_values_are_written_together_and_read_back(folder: Path | None) -> None:
    with CarriedFile(folder) as store:
        store.write({("a", "2"): b"\x00x", ("a", "1"): b"", ("b", "1"): b"y"})
        store.write({("a", "2"): b"z"})
        assert (store.keys("a"), store.read("a", "2"), store.read("a", "1")) == (["1", "2"], b"z", b"")
        assert (store.read("b", "1"), store.read("b", "2")) == (b"y", None)


def test_what_was_written_is_there_after_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from darts_server.store.transactions import CarriedFile\n"
        "store = CarriedFile(Path(sys.argv[1]))\n"
        "for i in range(20): store.write({('a', str(i)): b'x' * i})\n"
        "store._connection.execute('BEGIN'); store._connection.execute('DELETE FROM entries')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, cwd=os.getcwd())
    assert killed.returncode == -signal.SIGKILL
    with CarriedFile(tmp_path) as store:
        assert len(store.keys("a")) == 20
        assert store.read("a", "19") == b"x" * 19


def test_a_second_server_on_the_same_folder_keeps_what_it_carries_over_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CarriedFile(tmp_path) as first:
        first.write({("a", "1"): b"x"})
        with CarriedFile(tmp_path) as second:
            assert "does not outlive it" not in caplog.text, "it may end before the file is needed"
            assert second.open().read("a", "1") is None
            assert not second.open().is_durable
        assert "does not outlive it" in caplog.text
        waiting = CarriedFile(tmp_path)
    with waiting:
        assert waiting.open().read("a", "1") == b"x"
        assert waiting.open().is_durable
    with CarriedFile(tmp_path) as third:
        assert third.open().read("a", "1") == b"x"


def test_a_file_without_a_folder_is_not_durable() -> None:
    with CarriedFile() as file:
        assert not file.open().is_durable


def _garble(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b"precious", b"Precious"))


def _replace(path: Path) -> None:
    path.write_bytes(b"not a database" * 100)


@pytest.mark.parametrize("damage", [_garble, _replace])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with CarriedFile(tmp_path) as store:
        store.write({("a", "1"): b"precious"})
    damage(tmp_path / FILE_NAME)
    with pytest.raises(StateDamaged), CarriedFile(tmp_path) as store:
        store.read("a", "1")


def test_a_failed_write_changes_nothing(folder: Path | None) -> None:
    with CarriedFile(folder) as store:
        store.write({("a", "1"): b"x"})
        store._connection.execute("PRAGMA max_page_count = 8")  # as if the disk was full
        with pytest.raises(StateFull):
            store.write({("a", "1"): b"y", ("a", "2"): b"z" * 100_000})
        assert (store.keys("a"), store.read("a", "1")) == (["1"], b"x")


def test_it_is_cleared_whatever_its_state(tmp_path: Path) -> None:
    with CarriedFile(tmp_path) as store:
        store.write({("a", "1"): b"x", ("a", "2"): b"y", ("b", "1"): b"z"})
        store._connection.execute("UPDATE entries SET value = x'00' WHERE kind = 'a'")
        store.clear()
    with CarriedFile(tmp_path) as store:
        assert store.keys("a") == store.keys("b") == []
