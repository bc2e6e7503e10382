"""An answer to a batch has the same content as JSON and as tensors, on the scripted engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import safetensors.numpy
from fastapi import FastAPI

from darts_server.engine.scripted import Script
from darts_server.http import errors
from darts_server.http.resources.rollouts import _answer, routes
from darts_server.http.token_tensors import MEDIA_TYPE as TENSORS
from darts_server.rollout.batches.registry import BatchRegistry
from tests.rollout.batches.streams import new_registry, run_on_stepped_clock
from tests.rollout.batches.test_aborted import begin, finish, request
from tests.rollout.helpers import Harness, lengths

pytestmark = pytest.mark.anyio
PROMPTS: list[dict[str, Any]] = [{"text": "1", "metadata": {"n": 2**70, "ü": "日\u2028"}}, {"text": "2"}]
BODY = {"prompts": PROMPTS, "group_size": 4}
KEY = {"Idempotency-Key": "one"}


@pytest.fixture
async def harness() -> Harness:
    return Harness(lengths(5, 60, 7, 50, 1, 30))


@pytest.fixture
async def registry(harness: Harness) -> BatchRegistry[str, list[int]]:
    return new_registry(harness, "shortest")


@pytest.fixture
async def client(registry: BatchRegistry[str, list[int]]) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    errors.install(app)
    app.include_router(routes(registry))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as made:
        yield made


def with_lists(tensors: dict[str, Any]) -> Any:
    """The JSON answer, from one with tensors."""
    answer = json.loads(tensors["answer"].tobytes())
    offsets = tensors["offsets"].tolist()
    for holder in [*answer["groups"], *answer["unfinished"]]:
        for name in ("aborted", "trajectories"):
            for item in holder.get(name) or ():
                for field in ("token_ids", "logprobs"):
                    if (row := item[field]) is not None:
                        item[field] = tensors[field][offsets[row] : offsets[row + 1]].tolist()
    return answer


async def post(client: httpx.AsyncClient, harness: Harness, body: Any, **headers: str) -> httpx.Response:
    sending = asyncio.ensure_future(client.post("/rollouts", json=body, headers=headers))
    while not sending.done():
        await harness.engine.step()
    return await sending


async def test_both_forms_have_the_same_trajectories(harness: Harness, client: httpx.AsyncClient) -> None:
    plain = await post(client, harness, BODY, **KEY)
    assert plain.headers["content-type"] == "application/json"
    assert [len(group["trajectories"]) for group in plain.json()["groups"]] == [4, 4]
    assert plain.json()["groups"][0]["metadata"] == PROMPTS[0]["metadata"]
    again = await post(client, harness, BODY, **KEY, Accept=TENSORS)
    fetched = await client.get(f"/rollouts/{plain.json()['id']}", headers={"Accept": f"{TENSORS}, */*;q=0.1"})
    for answer in (again, fetched):
        assert (answer.status_code, answer.headers["content-type"]) == (200, TENSORS)
        assert with_lists(safetensors.numpy.load(answer.content)) == plain.json()


@pytest.mark.parametrize(
    ("stream", "accept", "offers"),
    [
        (False, "text/event-stream", "application/json or application/vnd.safetensors"),
        (False, "application/msgpack", "application/json or application/vnd.safetensors"),
        ("groups", TENSORS, "text/event-stream"),
        ("tokens", "text/html", "text/event-stream"),
    ],
)
async def test_another_form_is_refused_before_anything_starts(
    harness: Harness, client: httpx.AsyncClient, stream: object, accept: str, offers: str
) -> None:
    answer = await post(client, harness, {**BODY, "stream": stream}, Accept=accept)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (406, "NotAcceptableError", "Accept")
    assert f"can be {offers};" in error["message"]
    assert not harness.engine.started


@pytest.mark.parametrize("accept", ["*/*", "text/event-stream", "application/json"])
async def test_a_stream_is_a_stream_also_for_callers_that_always_accept_json(
    harness: Harness, client: httpx.AsyncClient, accept: str
) -> None:
    answer = await post(client, harness, {**BODY, "stream": "groups"}, **KEY, Accept=accept)
    assert answer.headers["content-type"].startswith("text/event-stream")
    batch_id = json.loads(answer.text.split("data: ", 1)[1].split("\n", 1)[0])["id"]
    refused = await client.get(f"/rollouts/{batch_id}", headers={"Accept": TENSORS})
    assert refused.status_code == 406


def test_what_aborted_candidates_had_generated_is_the_same_in_both_forms() -> None:
    async def scenario() -> None:
        harness = Harness(lambda text, _: Script(int(text)))
        batch = await begin(harness, new_registry(harness, "shortest"), request("30", "5"), 9)
        harness.rollouts.abort_all("an update")
        await finish(harness, batch)
        plain = json.loads(bytes((await _answer(batch)).body))
        assert len(plain["groups"][0]["aborted"]) == 6
        response: Any = await _answer(batch, TENSORS)
        body = b"".join([chunk async for chunk in response.body_iterator])
        assert with_lists(safetensors.numpy.load(body)) == plain

    run_on_stepped_clock(scenario())
