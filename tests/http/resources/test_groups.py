"""Provenance of groups, on our routes alone."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from unittest.mock import Mock

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message

from darts_server.caller import Caller, caller
from darts_server.http import errors
from darts_server.http.answers import MAX_READERS, SLICE_BYTES
from darts_server.http.resources.groups import INLINE_CANDIDATES, LISTED_GROUPS, add_routes
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.observers.reward_matching import RewardMatcher
from darts_server.store import Store
from darts_server.types import FinishReason, SelectedAs
from tests.rollout.batches.conftest import anyio_backend
from tests.rollout.learned.test_prompts import candidate, record

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio
LARGE = 12_000


@pytest.fixture
async def app() -> AsyncIterator[FastAPI]:
    with Store() as store:
        statistics = Statistics(store)
        provenance = Provenance()
        for group_id, size in (("batch-a-0", LARGE), ("batch-a-1", 2), ("batch-b-0", INLINE_CANDIDATES)):
            ended = record(*(candidate(i, 5 + i, FinishReason.STOP, SelectedAs.SHORT) for i in range(size)))
            provenance.group_ended(replace(ended, group_id=group_id))
        made = FastAPI()
        errors.install_handlers(made)
        add_routes(made.router, provenance, statistics, RewardMatcher(statistics.rewards, Mock(), Mock()))
        yield made


async def test_a_large_answer_has_all_candidates_and_is_made_in_parts_while_the_event_loop_is_served(
    app: FastAPI,
) -> None:
    parts: list[int] = []

    async def counted(scope: object, receive: object, send: object) -> None:
        async def count(message: Message) -> None:
            parts.append(len(message.get("body", b"")))
            await send(message)  # type: ignore[operator]

        await app(scope, receive, count)  # type: ignore[arg-type]

    async with httpx.AsyncClient(transport=httpx.ASGITransport(counted), base_url="http://test") as client:
        large, small = (await client.get("/groups/batch-a")).json()["groups"]
        assert len(parts) > 20
        assert max(parts) < 2 * SLICE_BYTES
        [alone] = (await client.get("/groups/batch-a-1")).json()["groups"]
        assert alone == small
        parts.clear()
        [inline] = (await client.get("/groups/batch-b-0")).json()["groups"]
        assert len(parts) == 2
    assert [c["index"] for c in large["candidates"]] == [c["rank"] for c in large["candidates"]] == [*range(LARGE)]
    for group in (large, inline, small):
        assert list(group["candidates"][0]) == list(large["candidates"][0])
        assert group["candidates"][1]["trajectory_id"] == f"{group['group_id']}:1"
        assert group["generated"] == sum(c["length"] for c in group["candidates"])


async def test_the_newest_groups_of_a_caller_are_listed() -> None:
    with Store() as store:
        provenance = Provenance()
        for number in range(3 * LISTED_GROUPS):
            ended = record(*(candidate(i, 5, FinishReason.STOP, SelectedAs.SHORT if i else None) for i in range(3)))
            owner = ("one", "other", None)[number % 3]
            provenance.group_ended(replace(ended, group_id=f"g{number}", owner=owner, ended_at=float(number)))
        app = FastAPI()
        statistics = Statistics(store)
        add_routes(app.router, provenance, statistics, RewardMatcher(statistics.rewards, Mock(), Mock()))

        async def listed(who: Caller) -> list[dict[str, object]]:
            token = caller.set(who)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                answer = (await client.get("/groups")).json()
            caller.reset(token)
            groups: list[dict[str, object]] = answer["groups"]
            return groups

        for place, name in enumerate(("one", "other", None)):
            groups = await listed(Caller(name))
            assert [group["group_id"] for group in groups] == [f"g{n}" for n in range(297 + place, -1, -3)]
            assert (groups[0]["candidates"], groups[0]["returned"], groups[0]["outcome"]) == (3, 2, "completed")
        groups = await listed(Caller("root", is_admin=True))
        assert [group["group_id"] for group in groups] == [f"g{n}" for n in range(299, 199, -1)]
        assert await listed(Caller("third")) == []


async def test_sessions_have_their_turns_and_tool_seconds() -> None:
    session = replace(candidate(0, 5, FinishReason.STOP, SelectedAs.SHORT), turns=3, tool_seconds=1.5)
    with Store() as store:
        statistics = Statistics(store)
        provenance = Provenance()
        provenance.group_ended(record(session, candidate(1, 5, FinishReason.STOP, SelectedAs.SHORT)))
        app = FastAPI()
        add_routes(app.router, provenance, statistics, RewardMatcher(statistics.rewards, Mock(), Mock()))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            [group] = (await client.get("/groups/g")).json()["groups"]
    assert [(c["turns"], c["tool_seconds"]) for c in group["candidates"]] == [(3, 1.5), (None, None)]


async def test_connections_of_a_key_that_read_large_answers_are_limited(app: FastAPI) -> None:
    may_read = asyncio.Event()

    async def get(status: list[int]) -> None:
        async def receive() -> Message:
            await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            status.append(message.get("status", 0))
            await may_read.wait()

        path = {"path": "/groups/batch-a", "raw_path": b"/groups/batch-a", "query_string": b"", "headers": []}
        await app({"type": "http", "method": "GET", "root_path": "", "scheme": "http", **path}, receive, send)

    began: list[list[int]] = [[] for _ in range(MAX_READERS + 1)]
    reading = [asyncio.create_task(get(status)) for status in began]
    while not all(began):
        await asyncio.sleep(0)
    assert sorted(status[0] for status in began) == [200] * MAX_READERS + [429]
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    again: list[int] = []
    may_read.set()
    await get(again)
    assert again[0] == 200
