"""Several processes that share a state file."""

import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from darts_server.exceptions import StateError
from darts_server.store import Store
from darts_server.store.database import FILE_NAME
from darts_server.store.store import CACHE_SECONDS
from tests.store.children import start
from tests.store.reading import saved_documents

OVER = CACHE_SECONDS + 0.1


def test_puts_of_two_processes_are_merged(tmp_path: Path) -> None:
    with start("share", tmp_path) as one, start("share", tmp_path) as two:
        for child, name in ((one, "one"), (two, "two")):
            assert child.stdin is not None
            child.stdin.write(f"{name}\n")
            child.stdin.flush()
        for child in (one, two):
            assert child.stdout is not None
            assert child.stdout.readline() == "done\n"
        said = [child.communicate("\n", timeout=120) for child in (one, two)]
    assert said[0] == said[1]  # both see the same
    assert said[0][0].startswith("610 ")
    assert set(said[0][0].split()[1:]) <= {"one", "two"}
    with Store(tmp_path) as store:
        documents = saved_documents(store, "prompt")
    assert all(documents[f"{name} {n}"] == {"by": name, "number": n} for name in ("one", "two") for n in range(300))
    assert all(documents[f"common {n}"]["number"] == 290 + n for n in range(10))


def test_a_document_of_another_process_is_seen_when_the_cache_expires(tmp_path: Path) -> None:
    with Store(tmp_path) as one, Store(tmp_path) as two:
        assert two.get("prompt", "a") is None
        one.put("prompt", "a", {"n": 1})
        one.flush()
        time.sleep(OVER)
        assert two.get("prompt", "a") == {"n": 1}
        two.put("prompt", "a", {"n": 2})  # its own at once
        assert two.get("prompt", "a") == {"n": 2}


def test_a_restore_by_another_process_drops_earlier_puts_and_keeps_later_ones(tmp_path: Path) -> None:
    with Store(tmp_path) as one, Store(tmp_path) as two, Store() as saved:
        saved.put("prompt", "saved", {"n": 1})
        two.put("prompt", "before", {"n": 2})
        assert two.get("prompt", "saved") is None
        one.restore(saved.export())
        two.flush()
        assert two.get("prompt", "saved") == {"n": 1}
        assert list(saved_documents(two, "prompt")) == ["saved"]
        one.restore(saved.export())  # two has nothing waiting now
        two.put("prompt", "after", {"n": 3})
        two.flush()
        assert list(saved_documents(one, "prompt")) == ["after", "saved"]


def test_puts_that_could_not_be_written_before_a_restore_are_dropped_too(tmp_path: Path) -> None:
    with Store(tmp_path) as one, Store(tmp_path) as two, Store() as saved:
        saved.put("prompt", "saved", {"n": 1})
        with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
            other.execute("PRAGMA user_version = 2")
            two.put("prompt", "before", {"n": 2})
            with pytest.raises(StateError):
                two.flush()
            two.put("prompt", "later", {"n": 3})
            other.execute("PRAGMA user_version = 1")
        one.restore(saved.export())
        two.flush()
        assert list(saved_documents(two, "prompt")) == ["saved"]


def test_a_write_waits_for_that_of_another_process(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            store.put("prompt", "a", {"n": 1})
            time.sleep(1.0)  # the thread is waiting now; callers are not
            store.put("prompt", "b", {"n": 2})
            assert store.count("prompt") == 2
            other.execute("COMMIT")
        store.flush()
        assert store.fault is None
    with Store(tmp_path) as store:
        assert store.count("prompt") == 2


def test_a_file_that_a_newer_version_has_migrated_is_not_written(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as other:
            other.execute("PRAGMA user_version = 2")
        store.put("prompt", "a", {"n": 1})
        with pytest.raises(StateError, match="newer darts-server"):
            store.flush()
        assert "newer" in (store.fault or "")
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as other:
            other.execute("PRAGMA user_version = 1")
        store.flush()
        assert store.fault is None


def test_a_file_that_was_moved_away_is_a_fault_and_not_written(tmp_path: Path) -> None:
    with Store(tmp_path / "state") as store:
        (tmp_path / "state").rename(tmp_path / "elsewhere")
        store.put("prompt", "a", {"n": 1})
        with pytest.raises(StateError, match="was moved or replaced"):
            store.flush()
        assert store.get("prompt", "a") == {"n": 1}
        (tmp_path / "elsewhere").rename(tmp_path / "state")
        store.flush()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    with Store(tmp_path / "copy") as store:
        assert store.get("prompt", "a") == {"n": 1}
