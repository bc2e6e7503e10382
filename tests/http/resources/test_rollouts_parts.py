"""Batches that are a part of a cohort, as an ingress sends them, on the scripted engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from darts_server.http import errors
from darts_server.http.resources.rollouts import routes
from darts_server.http.resources.rollouts_answers import encode_event
from darts_server.rollout.allocation.shared import CohortPart
from darts_server.rollout.batches.registry import BatchRegistry
from darts_server.rollout.batches.run import AnswerFormat, BatchRun, StreamMode
from tests.rollout.batches.streams import batch_request, new_registry, play, read_events
from tests.rollout.helpers import Harness, lengths

pytestmark = pytest.mark.anyio
KNOWN = {"tokens": 20, "waits_beyond": None, "explored": False, "stretch": 1.5, "bound": 3.0}


@pytest.fixture
async def harness() -> Harness:
    return Harness(lengths(5, 6, 7, 50))


@pytest.fixture
async def registry(harness: Harness) -> BatchRegistry[str, list[int]]:
    return new_registry(harness, "cut")


@pytest.fixture
async def client(registry: BatchRegistry[str, list[int]]) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    errors.install(app)
    app.include_router(routes(registry))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as made:
        yield made


async def open_part(registry: BatchRegistry[str, list[int]]) -> BatchRun:
    request = replace(batch_request(3), part=CohortPart(24, leads=True))
    return await registry.open(request, AnswerFormat(StreamMode.GROUPS))


async def test_its_stream_says_how_it_was_allocated_and_what_groups_need(
    harness: Harness, registry: BatchRegistry[str, list[int]]
) -> None:
    batch = await open_part(registry)
    events = await play(harness, asyncio.ensure_future(read_events(batch)))
    texts = [encode_event(number, event, StreamMode.GROUPS).decode() for number, event in events]
    parsed = [(text.split("event: ", 1)[1].split("\n", 1)[0], json.loads(text.split("data: ", 1)[1])) for text in texts]
    assert [name for name, _ in parsed] == ["batch", "needs", "group", "group", "group", "done"]
    cohort = parsed[0][1]["cohort"]
    assert (cohort["few"], cohort["tokens"], cohort["explored"]) == (False, None, False)
    assert (cohort["rule"]["quantile"], cohort["rule"]["bound"]) == (0.5, 2.0)
    assert parsed[1][1] == {"needs": [[0, 50], [1, 50], [2, 50]], "minimums": []}


async def test_its_deadline_is_set_once(
    harness: Harness, registry: BatchRegistry[str, list[int]], client: httpx.AsyncClient
) -> None:
    batch = await open_part(registry)
    listening = asyncio.ensure_future(read_events(batch))
    path = f"/rollouts/{batch.batch_id}/deadline"
    waiting = await client.put(path, json={**KNOWN, "tokens": None, "waits_beyond": 40})
    assert (waiting.status_code, waiting.json()) == (200, {"id": batch.batch_id, "tokens": None})
    for _ in range(2):
        assert (await client.put(path, json=KNOWN)).json() == {"id": batch.batch_id, "tokens": 20}
    other = await client.put(path, json={**KNOWN, "tokens": 21})
    assert (other.status_code, other.json()["error"]["param"]) == (409, "tokens")
    await play(harness, listening)
    assert {(record.bound, record.stretch) for record in harness.recorder.records} == {(60, 1.5)}
    assert (await client.put(path, json=KNOWN)).status_code == 404


async def test_a_batch_that_is_no_part_takes_no_deadline(
    registry: BatchRegistry[str, list[int]], client: httpx.AsyncClient
) -> None:
    batch = await registry.open(batch_request(3), AnswerFormat(StreamMode.GROUPS))
    with batch.listen():
        assert (await client.put(f"/rollouts/{batch.batch_id}/deadline", json=KNOWN)).status_code == 409


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 0),
        ("tokens", 10**400),
        ("waits_beyond", 2**53),
        ("stretch", 0.5),
        ("bound", None),
        ("x", 1),
    ],
)
async def test_an_impossible_deadline_is_refused(client: httpx.AsyncClient, field: str, value: object) -> None:
    answer = await client.put("/rollouts/batch-1/deadline", json={**KNOWN, field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"cohort": {"groups": 24}}, "cohort"),
        ({"cohort": {"groups": 24}, "stream": "groups", "carry": "restart", "num_groups": 1}, "cohort"),
        ({"cohort": {"groups": 24}, "stream": "groups", "carried": True}, "cohort"),
        ({"cohort": {"groups": 0}, "stream": "groups"}, "cohort.groups"),
        ({"cohort": {"groups": 24, "leads": "yes"}, "stream": "groups"}, "cohort.leads"),
        ({"cohort": {"groups": 24, "size": 1}, "stream": "groups"}, "cohort.size"),
    ],
)
async def test_a_field_for_parts_that_makes_no_sense_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], named: str
) -> None:
    body = {"prompts": [{"text": "1"}, {"text": "2"}], "group_size": 4, **fields}
    answer = await client.post("/rollouts", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)
