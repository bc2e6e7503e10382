"""Learned values and blobs in the store: complete or absent, and learned again if they cannot be used."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.allocation import ShadowPrice
from darts_server.policy.shaping import Shaping
from darts_server.rollout.allocation.allocator import PRICE
from darts_server.rollout.learned.documents import PART_BYTES, Blob, BlobStore, Scalar, StoredValues
from darts_server.rollout.plan import Plan
from darts_server.store import Store
from tests.rollout.helpers import Documents, new_allocator


@pytest.mark.parametrize(
    "document",
    [
        {"value": "[1, 2"},
        {"value": None},
        {"something": "else"},
        {"value": '{"recent": [1.5], "unknown": 1}'},
        {"value": '{"recent": ["x"]}'},
        {"value": '{"debt": NaN}'},
        {"value": "[1]"},
        {"value": "7"},
    ],
)
def test_an_invalid_value_is_treated_as_missing(document: dict[str, Scalar], caplog: pytest.LogCaptureFixture) -> None:
    documents = Documents()
    documents.put("price", "a", document)
    values = StoredValues(documents, PRICE)
    assert values.load("a") is None
    assert values.load("a") is None
    assert caplog.text.count("the learned price a cannot be used, and is learned again") == 1
    values.save("a", {"recent": [1.5]})
    assert values.load("a") == ShadowPrice([1.5])


# --- a restart --------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_price_is_restored_after_a_restart() -> None:
    async def spread(documents: Documents, restarts: bool) -> list[int]:
        """Candidates of prompts that arrive one at a time, with a restart before each or none."""
        given, allocator = [], new_allocator(documents)
        for number in range(60):
            if restarts:
                allocator = new_allocator(documents)
            plan = Plan("darts", Shaping(redundancy=1.3, adaptive=True), 8)
            given.append((await allocator.allocate(plan, f"p{number}")).candidates)
        return given

    stds = {f"p{number}": float(number * 37 % 60) ** 2 for number in range(60)}
    kept, restarted = Documents().add_stds(**stds), Documents().add_stds(**stds)
    found = await spread(kept, restarts=False)
    assert found == await spread(restarted, restarts=True)
    assert kept.kept["price", "darts/8"] == restarted.kept["price", "darts/8"]
    assert len(set(found)) > 1


# --- blobs ------------------------------------------------------------------------


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
def test_a_killed_save_leaves_the_old_or_the_new_blob_complete(puts: int) -> None:
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


def test_an_incomplete_blob_is_treated_as_missing(caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize(
    "wrong",
    [
        *({"parts": parts} for parts in (10**9, -1, 1.0)),
        {"side": 2},
        {"digest": None},
        {"steps": 10**400},
        {"steps": "x"},
    ],
)
@pytest.mark.timeout(20)
def test_a_manifest_that_was_made_up_is_treated_as_missing_and_replaced(wrong: dict[str, Scalar]) -> None:
    store = Documents()
    blobs = BlobStore(store, "test")
    blobs.save("a", b"x", {"steps": 1})
    store.kept["test", "a"] |= wrong
    assert blobs.load("a") is None
    assert blobs.digest("a") is None
    blobs.save("a", b"y", {"steps": 2})
    assert blobs.load("a") == Blob(b"y", {"steps": 2})
