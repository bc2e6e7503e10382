import asyncio
from collections.abc import Mapping

import pytest

from darts_server.exceptions import StateError
from darts_server.policy.allocation import ShadowPriceState
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.rollout.learned.documents import Scalar, StoredValues
from darts_server.rollout.plan import Plan
from tests.rollout.helpers import Documents, Harness, collect, lengths, new_allocator


class Faulty(Documents):
    """A store that can be read and written only while ``fault`` is ``None``."""

    fault: str | None = None

    def get(self, kind: str, key: str) -> dict[str, Scalar] | None:
        if self.fault is not None:
            raise StateError(self.fault)
        return super().get(kind, key)

    def put(self, kind: str, key: str, document: Mapping[str, Scalar]) -> None:
        if self.fault is not None:
            raise StateError(self.fault)
        super().put(kind, key, document)


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
    values = StoredValues(documents, "price", lambda value: ShadowPriceState(**value))
    assert values.load("a") is None
    assert values.load("a") is None
    assert caplog.text.count("the learned price a cannot be used, and is learned again") == 1
    values.save("a", {"recent": [1.5]})
    assert values.load("a") == ShadowPriceState((1.5,))


def test_a_store_that_cannot_be_read_is_logged_once_until_it_recovers(caplog: pytest.LogCaptureFixture) -> None:
    documents = Faulty()
    values = StoredValues(documents, "price")
    values.save("a", 1)
    for times in (1, 2):
        documents.fault = "the file was cut off"
        assert [values.load("a") for _ in range(5)] == [None] * 5
        assert caplog.text.count("the file was cut off") == times
        documents.fault = None
        assert values.load("a") == 1


def test_a_failed_save_is_logged_and_does_not_raise(caplog: pytest.LogCaptureFixture) -> None:
    documents = Faulty()
    documents.fault = "the store is closed"
    StoredValues(documents, "price").save("a", 1)
    assert documents.kept == {}
    assert "the learned price a was not stored: the store is closed" in caplog.text


# --- in the room ------------------------------------------------------------------

POLICY = Shaping(redundancy=1.5, adaptive=True, deadline=Deadline(exploration=0.0))


@pytest.mark.anyio
async def test_a_store_that_cannot_be_read_fails_no_rollout() -> None:
    harness = Harness(lengths(5), {"cut": POLICY}, store=Faulty())
    assert isinstance(harness.store, Faulty)
    harness.store.fault = "the file was cut off"
    runs = await harness.start_cohort(4, "cut", [f"p{i}" for i in range(9)])
    tasks = [asyncio.create_task(collect(run)) for run in runs]
    await asyncio.sleep(0)
    await harness.engine.run()
    assert [len(await task) for task in tasks] == [4] * 9


# --- a restart --------------------------------------------------------------------


async def spread(documents: Documents, restarts: bool) -> list[int]:
    """Candidates of prompts that arrive one at a time, with a restart before each or none."""
    given, allocator = [], new_allocator(documents)
    for number in range(60):
        if restarts:
            allocator = new_allocator(documents)
        given.append(
            (
                await allocator.allocate(Plan("darts", Shaping(redundancy=1.3, adaptive=True), 8), f"p{number}")
            ).candidates
        )
    return given


@pytest.mark.anyio
async def test_the_price_is_restored_after_a_restart() -> None:
    def known() -> Documents:
        return Documents().add_stds(**{f"p{number}": float(number * 37 % 60) ** 2 for number in range(60)})

    kept, restarted = known(), known()
    assert await spread(kept, restarts=False) == await spread(restarted, restarts=True)
    assert kept.kept["price", "darts/8"] == restarted.kept["price", "darts/8"]
    assert len(set(await spread(restarted, restarts=True))) > 1
