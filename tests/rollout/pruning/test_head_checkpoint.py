import logging

import pytest

from darts_server.exceptions import StateError
from darts_server.rollout.learned.documents import Blob, BlobStore, Scalar
from darts_server.rollout.pruning.head_checkpoint import KEY, SAVE_SECONDS, HeadCheckpoint
from tests.rollout.helpers import Documents


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeHead:
    def __init__(self) -> None:
        self.restored: list[bytes] = []

    def restore(self, data: bytes) -> None:
        self.restored.append(data)


def test_a_head_is_saved_at_intervals_and_at_the_end() -> None:
    blobs, clock = BlobStore(Documents(), "test"), Clock()
    checkpoint = HeadCheckpoint(blobs, clock)
    checkpoint.update(b"1")
    checkpoint.update(b"2")
    checkpoint.update(b"")
    assert blobs.load(KEY) == Blob(b"1", {})
    clock.now += SAVE_SECONDS
    checkpoint.update(b"3")
    checkpoint.update(b"4")
    assert blobs.load(KEY) == Blob(b"3", {})
    checkpoint.save()
    assert blobs.load(KEY) == Blob(b"4", {})
    digest = blobs.digest(KEY)
    checkpoint.save()
    assert blobs.digest(KEY) == digest


def test_a_head_that_a_restore_put_into_the_store_is_loaded_and_not_overwritten() -> None:
    store, clock, head = Documents(), Clock(), FakeHead()
    checkpoint = HeadCheckpoint(BlobStore(store, "test"), clock)
    checkpoint.reload(head)
    assert head.restored == []
    checkpoint.update(b"own")
    checkpoint.reload(head)
    assert head.restored == []
    BlobStore(store, "test").save(KEY, b"restored", {})
    clock.now += SAVE_SECONDS
    checkpoint.update(b"own, later")
    checkpoint.reload(head)
    checkpoint.save()
    assert head.restored == [b"restored"]
    assert BlobStore(store, "test").load(KEY) == Blob(b"restored", {})
    store.kept.clear()
    checkpoint.reload(head)
    assert head.restored[-1] == b""


def test_a_head_is_saved_once_a_store_that_failed_works_again(caplog: pytest.LogCaptureFixture) -> None:
    class FailingStore(Documents):
        fails = True

        def get(self, kind: str, key: str) -> dict[str, Scalar] | None:
            if self.fails:
                raise StateError("the disk is gone")
            return super().get(kind, key)

    caplog.set_level(logging.WARNING)
    store = FailingStore()
    checkpoint = HeadCheckpoint(BlobStore(store, "test"), Clock())
    checkpoint.update(b"1")
    checkpoint.reload(FakeHead())
    assert "the disk is gone" in caplog.text
    store.fails = False
    checkpoint.save()
    assert BlobStore(store, "test").load(KEY) == Blob(b"1", {})
