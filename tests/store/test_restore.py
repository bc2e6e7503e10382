"""Export from one store and restore into another."""

import time
from pathlib import Path

import pytest

from darts_server.exceptions import StateDamaged
from darts_server.store import Store
from tests.store.reading import saved_documents


def test_everything_can_be_exported_and_restored(store: Store, tmp_path: Path) -> None:
    for number in range(2000):
        store.put("prompt", f"ü{number}", {"number": number, "mean": number / 3})
    store.flush()
    store.put("singleton", "dataset", {"mean": 1.0})  # not written yet
    data = store.export()
    for other in (Store(), Store(tmp_path / "other")):
        with other:
            other.put("prompt", "flushed", {})
            other.flush()
            other.put("prompt", "waiting", {})
            assert other.get("prompt", "absent") is None
            other.restore(data)
            assert saved_documents(other, "prompt") == saved_documents(store, "prompt")
            assert other.get("prompt", "waiting") is None
            assert other.get("singleton", "dataset") == {"mean": 1.0}
            assert other.export() == data
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
        assert (store.export(), store.generation()) == (data, 0)
    store.restore(data)
    assert store.generation() == 1


def test_documents_that_push_out_older_ones_take_no_longer() -> None:
    """To find the oldest one took longer the more had been pushed out before it."""
    number = 2**15
    seconds = []
    with Store(max_in_memory=number) as store:
        for begin in (0, number):
            began = time.process_time()
            for i in range(begin, begin + number):
                store.put("prompt", f"{i:06d}", {})
            seconds.append(time.process_time() - began)
        assert store.count("prompt") == number
        assert store.get("prompt", f"{number - 1:06d}") is None
        assert store.get("prompt", f"{number:06d}") == {}
    assert seconds[1] < 5 * seconds[0]
