"""Reading and writing documents, and restoring them all, with and without a folder."""

import threading
from pathlib import Path

import pytest

from darts_server.exceptions import StateDamaged, StateError
from darts_server.store import Store
from darts_server.store.archive import Scalar
from tests.store.reading import saved_documents

KEYS = ["", "a", "A", "ä", "a\u0308", "😀", "नमस्ते", "line\nbreak", "nul\0in it", "'; DROP TABLE x; --", "x" * 65536]


def test_each_key_has_its_own_document(store: Store) -> None:
    for number, key in enumerate(KEYS):
        assert store.get("prompt", key) is None
        store.put("prompt", key, {"number": number})
        store.put("other", key, {"number": -1})
    store.flush()
    assert [store.get("prompt", key) for key in KEYS] == [{"number": number} for number in range(len(KEYS))]
    assert list(saved_documents(store, "prompt").items()) == sorted(
        (key, {"number": number}) for number, key in enumerate(KEYS)
    )
    assert store.count("prompt") == store.count("other") == len(KEYS)
    assert (store.count("none"), saved_documents(store, "none")) == (0, {})


def test_values_are_returned_unchanged_and_as_copies(store: Store) -> None:
    for value in (0, -(10**30), 1.5, 5e-324, 1e308, True, None, "", 'quote " \0 😀'):
        document: dict[str, Scalar] = {"v": value}
        store.put("prompt", "a", document)
        document["v"] = "changed"
        for _ in range(2):
            got = store.get("prompt", "a")
            assert got == {"v": value}
            assert type(got["v"]) is type(value)
            got["v"] = "changed"


def test_get_returns_the_newest_document_whether_it_is_written_or_not(store: Store) -> None:
    for number in range(3):
        for key in range(number, 6):
            store.put("prompt", str(key), {"number": number})
        if number < 2:
            store.flush()
    assert [document["number"] for document in saved_documents(store, "prompt").values()] == [0, 1, 2, 2, 2, 2]
    assert store.count("prompt") == 6


def test_threads_may_share_a_store(store: Store) -> None:
    def work(name: int) -> None:
        for number in range(200):
            store.put("prompt", f"{name} {number}", {"n": number})
            assert store.get("prompt", f"{name} {number}") == {"n": number}
            if number % 50 == 0:
                store.flush()
                assert len(saved_documents(store, "prompt")) >= number

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.count("prompt") == 800


def test_a_closed_store_raises(store: Store) -> None:
    store.put("prompt", "a", {})
    store.close()
    store.close()
    for use in (lambda: store.put("prompt", "a", {}), lambda: store.get("prompt", "a"), store.flush, store.export):
        with pytest.raises(StateError, match="closed"):
            use()


def test_a_file_keeps_every_document(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        for number in range(500):
            store.put("prompt", f"{number:064x}", {"mean": number / 7, "std": 1.5, "count": number})
    with Store(tmp_path) as store:
        assert store.count("prompt") == len(saved_documents(store, "prompt")) == 500
        assert store.get("prompt", f"{499:064x}") == {"mean": 499 / 7, "std": 1.5, "count": 499}


def test_a_file_drops_the_oldest_documents_beyond_its_limit(tmp_path: Path) -> None:
    kept = {f"{number}": {"n": number} for number in range(5, 9)}
    with Store(tmp_path, limit=4) as store:
        for number in range(9):
            store.put("prompt", str(number), {"n": number})
            store.flush()
        assert saved_documents(store, "prompt") == kept
    # A file of a server with a larger limit.
    with Store(tmp_path, limit=3) as store:
        assert store.count("prompt") == 3
        store.flush()
        store.put("prompt", "9", {"n": 9})
    with Store(tmp_path) as store:
        assert saved_documents(store, "prompt") == {name: kept[name] for name in ("7", "8")} | {"9": {"n": 9}}


def test_a_file_that_another_process_has_changed_drops_no_document_that_was_just_put(tmp_path: Path) -> None:
    with Store(tmp_path, limit=3) as first, Store(tmp_path, limit=3) as second:
        for key in "cde":
            second.put("prompt", key, {"n": 1})
        second.flush()
        second.put("prompt", "a", {"n": 2})
        first.put("prompt", "f", {"n": 3})
        first.flush()
        second.flush()
        assert second.get("prompt", "a") == {"n": 2}
        assert second.count("prompt") == 3


def test_memory_drops_the_oldest_documents_of_each_kind() -> None:
    with Store(limit=3) as store:
        store.put("other", "a", {"n": 0})
        for number in range(3):
            store.put("prompt", str(number), {"n": number})
        store.flush()
        # This document is the newest now.
        store.put("prompt", "0", {"n": 10})
        store.put("prompt", "3", {"n": 3})
        store.flush()
        assert saved_documents(store, "prompt") == {"0": {"n": 10}, "2": {"n": 2}, "3": {"n": 3}}
        assert (store.count("prompt"), store.count("other")) == (3, 1)
        store.restore(store.export())
        assert store.count("prompt") == 3


def test_everything_can_be_exported_and_restored(store: Store, tmp_path: Path) -> None:
    for number in range(200):
        store.put("prompt", f"ü{number}", {"number": number, "mean": number / 3})
    store.flush()
    # This document is not written yet.
    store.put("singleton", "dataset", {"mean": 1.0})
    data = store.export()
    for other in (Store(), Store(tmp_path / "other")):
        with other:
            other.put("prompt", "flushed", {})
            other.flush()
            other.put("prompt", "waiting", {})
            other.restore(data)
            assert saved_documents(other, "prompt") == saved_documents(store, "prompt")
            assert other.get("prompt", "waiting") is None
            assert other.get("singleton", "dataset") == {"mean": 1.0}
            assert (other.export(), other.generation) == (data, 1)
    with Store(tmp_path / "other") as other:
        assert other.export() == data


def test_a_refused_restore_changes_nothing(store: Store) -> None:
    store.put("prompt", "flushed", {"n": 1})
    store.flush()
    store.put("prompt", "waiting", {"n": 2})
    data = store.export()
    for bad, limit in ((data[:-1], 10**9), (b"", 10**9), (data, 10)):
        with pytest.raises(StateDamaged):
            store.restore(bad, limit)
        assert (store.export(), store.generation) == (data, 0)
