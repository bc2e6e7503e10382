import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from darts_server.exceptions import StateError
from darts_server.policy.allocation.shadow_price import ShadowPriceState
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.rollout.learned.documents import Scalar, StoredValues
from darts_server.rollout.plan import Plan
from tests.rollout.helpers import Documents, House, an_allocator, collect, lengths


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


@pytest.mark.parametrize("value", [0, "text", None, [1, 2.5, "x"], {"a": {"b": [None]}}])
def test_what_was_saved_is_loaded_by_kind_and_key(value: Any) -> None:
    documents = Documents()
    StoredValues(documents, "price").save("a", value)
    assert StoredValues(documents, "price").load("a") == value
    assert StoredValues(documents, "price").load("b") is None
    assert StoredValues(documents, "needs").load("a") is None


def test_they_are_read_anew_each_time() -> None:
    documents = Documents()
    mine, anothers = StoredValues(documents, "price"), StoredValues(documents, "price")
    mine.save("a", 1)
    assert mine.load("a") == 1
    anothers.save("a", 2)
    assert mine.load("a") == 2
    documents.kept.clear()
    assert mine.load("a") is None


def test_what_is_loaded_is_made_of_the_json() -> None:
    documents = Documents()
    notes = StoredValues(documents, "price", lambda value: ShadowPriceState(**value))
    notes.save("a", {"recent": [1.5], "debt": 2, "carry": 0})
    assert notes.load("a") == ShadowPriceState((1.5,), 2, 0)
    assert notes.load("b") is None


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
def test_what_is_not_what_it_should_be_counts_as_not_there(
    document: dict[str, Scalar], caplog: pytest.LogCaptureFixture
) -> None:
    documents = Documents()
    documents.put("price", "a", document)
    notes = StoredValues(documents, "price", lambda value: ShadowPriceState(**value))
    assert notes.load("a") is None
    assert notes.load("a") is None
    assert caplog.text.count("what was learned as price cannot be read; it is learned anew") == 1
    notes.save("a", {"recent": [1.5]})
    assert notes.load("a") == ShadowPriceState((1.5,))


def test_a_store_that_cannot_be_read_is_said_once_until_it_can_be_again(caplog: pytest.LogCaptureFixture) -> None:
    documents = Faulty()
    notes = StoredValues(documents, "price")
    notes.save("a", 1)
    for times in (1, 2):
        documents.fault = "the file was cut off"
        assert [notes.load("a") for _ in range(5)] == [None] * 5
        assert caplog.text.count("the file was cut off") == times
        documents.fault = None
        assert notes.load("a") == 1


def test_one_that_cannot_be_read_is_said_once_though_others_can_be(caplog: pytest.LogCaptureFixture) -> None:
    documents = Documents()
    notes = StoredValues(documents, "price")
    notes.save("good", 1)
    documents.put("price", "bad", {"value": "{"})
    for _ in range(5):
        assert (notes.load("good"), notes.load("bad")) == (1, None)
    assert len(caplog.records) == 1


def test_what_cannot_be_kept_is_said_and_costs_nobody_anything(caplog: pytest.LogCaptureFixture) -> None:
    documents = Faulty()
    documents.fault = "the store is closed"
    StoredValues(documents, "price").save("a", 1)
    assert documents.kept == {}
    assert "price a was not kept: the store is closed" in caplog.text


# --- in the room ------------------------------------------------------------------

POLICY = Shaping(redundancy=1.5, adaptive=True, deadline=Deadline(exploration=0.0))


@pytest.mark.anyio
@pytest.mark.parametrize("value", ["{", "7", "[1.5]", '"text"', '{"recent": 1}', '["12"]', "null"])
async def test_a_restored_state_that_nobody_can_read_costs_nobody_a_rollout(
    value: str, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(lengths(5), {"cut": POLICY})
    for kind, key in (("price", "cut/4"), ("deadline", "cut/4")):
        house.store.put(kind, key, {"value": value})
    for name in ("a", "b"):
        [run] = await house.together(4, "cut", [name])
        assert len(await house.group(run)) == 4
    assert json.loads(str(house.store.kept["deadline", "cut/4"]["value"])) == [5, 5]
    assert house.recorder.batches[-1].groups == 1
    assert len(caplog.records) <= 2


@pytest.mark.anyio
async def test_a_store_that_cannot_be_read_costs_nobody_a_rollout() -> None:
    house = House(lengths(5), {"cut": POLICY}, store=Faulty())
    assert isinstance(house.store, Faulty)
    house.store.fault = "the file was cut off"
    runs = await house.together(4, "cut", [f"p{i}" for i in range(9)])
    tasks = [asyncio.create_task(collect(run)) for run in runs]
    await asyncio.sleep(0)
    await house.engine.run()
    assert [len(await task) for task in tasks] == [4] * 9


# --- a restart --------------------------------------------------------------------


async def spread(documents: Documents, restarts: bool) -> list[int]:
    """What prompts that come one at a time are given, with a new server for each or one for all."""
    given, allocator = [], an_allocator(documents)
    for number in range(60):
        if restarts:
            allocator = an_allocator(documents)
        given.append(
            (
                await allocator.allocate(Plan("darts", Shaping(redundancy=1.3, adaptive=True), 8), f"p{number}")
            ).candidates
        )
    return given


@pytest.mark.anyio
async def test_after_a_restart_the_price_goes_on_where_it_was() -> None:
    def known() -> Documents:
        return Documents().know(**{f"p{number}": float(number * 37 % 60) ** 2 for number in range(60)})

    once, anew = known(), known()
    assert await spread(once, restarts=False) == await spread(anew, restarts=True)
    assert once.kept["price", "darts/8"] == anew.kept["price", "darts/8"]
    assert len(set(await spread(anew, restarts=True))) > 1


@pytest.mark.anyio
async def test_after_a_restart_the_deadline_goes_on_where_it_was() -> None:
    script = lengths(*range(3, 20))
    first = House(script, {"cut": POLICY})
    for number in range(10):
        [run] = await first.together(4, "cut", [f"p{number}"])
        await first.group(run)
    second = House(script, {"cut": POLICY}, store=first.store)
    for house in (first, second):
        house.engine.now = 0
        [run] = await house.together(4, "cut", ["next"])
        await house.group(run)
    assert second.record("next").deadline == first.record("next").deadline == 6
    assert first.recorder.batches[-1].deadline == second.recorder.batches[-1].deadline == 6
