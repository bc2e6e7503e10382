"""Blobs in the store: any size, complete or absent."""

import logging
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.exceptions import StateError
from darts_server.policy.pruning.calibration import Calibration
from darts_server.rollout.learned.blobs import PART_BYTES, Blob, BlobStore
from darts_server.rollout.learned.documents import Scalar
from darts_server.rollout.pruning.detection_point import DetectionPoint
from darts_server.rollout.pruning.head_checkpoint import KEY, SECONDS, HeadCheckpoint
from darts_server.rollout.pruning.pending_labels import PendingLabels, PendingScore, compact
from darts_server.store import Store
from tests.rollout.helpers import Documents


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, 5 * PART_BYTES])
def test_a_blob_is_saved_to_and_loaded_from_a_real_store(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    with Store() as store:
        blobs = BlobStore(store, "test")
        assert blobs.load("a") is None
        assert blobs.digest("a") is None
        for numbers in ({"steps": 1}, {"steps": 2}, {}):
            digest = blobs.save("a", data, numbers)
            assert blobs.load("a") == Blob(data, numbers)
            assert blobs.digest("a") == digest
        saved = store.export()
        blobs.save("a", b"other", {})
        assert blobs.load("b") is None
        store.restore(saved)
        assert blobs.load("a") == Blob(data, {})


class Dying(Documents):
    """A store whose process is killed after some puts."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def put(self, kind: str, key: str, document: Mapping[str, Scalar]) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        super().put(kind, key, document)


@given(st.integers(0, 12))
def test_a_save_that_is_killed_leaves_one_blob_or_the_other_complete(puts: int) -> None:
    one, other = b"1" * (3 * PART_BYTES), b"2" * (2 * PART_BYTES + 1)
    store = Dying(100)
    blobs = BlobStore(store, "test")
    blobs.save("a", b"before", {})
    blobs.save("a", one, {})
    store.left = puts
    try:
        blobs.save("a", other, {})
        done = True
    except KeyboardInterrupt:
        done = False
    found = blobs.load("a")
    assert found in (Blob(one, {}), Blob(other, {}))
    assert found == Blob(other, {}) or not done
    store.left = 100
    blobs.save("a", one, {"steps": 3})
    assert blobs.load("a") == Blob(one, {"steps": 3})


def test_an_incomplete_or_unknown_blob_is_treated_as_missing(caplog: pytest.LogCaptureFixture) -> None:
    store = Documents()
    blobs = BlobStore(store, "test")
    blobs.save("a", b"x" * (2 * PART_BYTES), {})
    part = next(name for name in store.kept if name[0] == "test_part")
    for document in ({"data": "eA=="}, {"data": "no base64"}, {}, None):
        store.kept.pop(part)
        if document is not None:
            store.kept[part] = dict(document)
        assert blobs.load("a") is None
        store.kept[part] = {"data": ""}
    assert "is incomplete" in caplog.text
    store.kept["test", "a"] = {"version": 7}
    assert blobs.load("a") is None
    assert "cannot be read" in caplog.text


def test_the_parts_of_the_previous_blob_are_emptied() -> None:
    store = Documents()
    blobs = BlobStore(store, "test")
    for _ in range(4):
        blobs.save("a", b"x" * (4 * PART_BYTES), {})
    taken = sum(len(str(document)) for document in store.kept.values())
    assert taken < 1.5 * 4 * PART_BYTES * 4 / 3


# --- the head's state ---------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Restored:
    def __init__(self) -> None:
        self.told: list[bytes] = []

    def restore(self, data: bytes) -> None:
        self.told.append(data)


def test_a_head_is_saved_at_intervals_and_at_the_end() -> None:
    blobs, clock = BlobStore(Documents(), "test"), Clock()
    state = HeadCheckpoint(blobs, clock)
    state.trained(b"1")
    state.trained(b"2")
    state.trained(b"")
    assert blobs.load(KEY) == Blob(b"1", {})
    clock.now += SECONDS
    state.trained(b"3")
    state.trained(b"4")
    assert blobs.load(KEY) == Blob(b"3", {})
    state.keep()
    assert blobs.load(KEY) == Blob(b"4", {})
    digest = blobs.digest(KEY)
    state.keep()
    assert blobs.digest(KEY) == digest


def test_a_head_that_another_process_saved_is_restored_and_not_overwritten() -> None:
    store, clock, head = Documents(), Clock(), Restored()
    state = HeadCheckpoint(BlobStore(store, "test"), clock)
    state.refresh(head)
    assert head.told == []
    state.trained(b"mine")
    state.refresh(head)
    assert head.told == []
    BlobStore(store, "test").save(KEY, b"restored", {})
    clock.now += SECONDS
    state.trained(b"mine, later")
    state.refresh(head)
    state.keep()
    assert head.told == [b"restored"]
    assert BlobStore(store, "test").load(KEY) == Blob(b"restored", {})
    store.kept.clear()
    state.refresh(head)
    assert head.told[-1] == b""


def test_a_failing_store_loses_no_head(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Documents):
        fails = True

        def get(self, kind: str, key: str) -> dict[str, Scalar] | None:
            if self.fails:
                raise StateError("the disk is gone")
            return super().get(kind, key)

    caplog.set_level(logging.WARNING)
    store = Failing()
    state = HeadCheckpoint(BlobStore(store, "test"), Clock())
    state.trained(b"1")
    state.refresh(Restored())
    assert "the disk is gone" in caplog.text
    store.fails = False
    state.keep()
    assert BlobStore(store, "test").load(KEY) == Blob(b"1", {})


# --- trajectories in pending -----------------------------------------------------


def test_half_precision_is_used_where_it_can_represent_the_numbers() -> None:
    assert compact(np.asarray([1.5, -2.0], np.float32)).dtype == np.float16
    wide = np.asarray([1.5, 1e6], np.float32)
    assert compact(wide).dtype == np.float32
    assert compact(wide).tolist() == wide.tolist()


def test_memory_is_bounded_and_released() -> None:
    point = DetectionPoint(BlobStore(Documents(), "test"), "head@10", Calibration(), 100)
    pending = PendingLabels(10_000)
    forgotten = sum(pending.add(f"g{i}", 0, PendingScore(point, 10, np.zeros(100, np.float16))) for i in range(50))
    assert (len(pending), forgotten) == (14, 36)
    for i in range(50):
        pending.pop(f"g{i}", 0)
    assert pending._bytes == len(pending) == 0
    assert pending.add("large", 0, PendingScore(point, 10, np.zeros(100_000, np.float16))) == 0
    assert pending.find("large", 0) is not None
