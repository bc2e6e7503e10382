"""Requests that concern all replicas, or the one that has something."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.ingress.servers import FakeServer, RunningIngress, fake_servers, ingress, ingress_over

pytestmark = pytest.mark.anyio
NOT_FOUND = {"error": {"message": "no such id"}}


async def test_an_id_is_found_whichever_ingress_gets_the_request() -> None:
    async with fake_servers(3) as servers, ingress(servers) as one, ingress(servers) as two:
        for server in servers:
            server.answer("POST", "/v1/responses/r/cancel", NOT_FOUND, 404)
        servers[1].answer("POST", "/v1/responses/r/cancel", {"id": "r"})
        for running in (one, two):
            assert (await running.post("/v1/responses/r/cancel")).json() == {"id": "r"}


async def test_a_running_batch_is_followed_event_by_event_and_its_loss_is_said() -> None:
    async with ingress_over(3) as (running, servers):
        path = "/darts/v1/rollouts/b"
        for server in servers:
            server.answer("GET", path, NOT_FOUND, 404)

        async def events() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            await asyncio.sleep(3600)

        async def handle(_: Request) -> Response:
            return StreamingResponse(events(), media_type="text/event-stream")

        servers[1].on("GET", path, handle)
        async with asyncio.timeout(30), running.client.stream("GET", path) as answer:
            chunks = answer.aiter_raw()
            assert await anext(chunks) == b"data: 1\n\n"
            await servers[1].kill()
            rest = b"".join([chunk async for chunk in chunks])
        assert b"was lost while it answered" in rest


async def test_an_unknown_id_is_a_404_unless_a_replica_could_not_be_reached() -> None:
    async with ingress_over(2) as (running, servers):
        for server in servers:
            server.answer("GET", "/darts/v1/groups/g", NOT_FOUND, 404)
        assert (await running.client.get("/darts/v1/groups/g")).status_code == 404
        await servers[0].kill()
        await running.fleet.check(running.fleet.members[0])
        answer = await running.client.get("/darts/v1/groups/g")
        assert answer.status_code == 502
        assert running.fleet.members[0].name in answer.json()["error"]["message"]


async def test_statistics_of_a_prompt_are_those_of_the_replica_with_the_most_groups() -> None:
    async with ingress_over(3) as (running, servers):
        for server, groups in zip(servers, (2, 5, 0), strict=True):
            server.answer(
                "GET", "/darts/v1/prompts/a/b", {"groups": groups} if groups else NOT_FOUND, 200 if groups else 404
            )
        assert (await running.client.get("/darts/v1/prompts/a/b")).json() == {"groups": 5}


def keeps_rewards(server: FakeServer, known: set[str]) -> None:
    """Count rewards as a server does that returned these trajectories, and names at most 100 unknown ones."""
    rewarded: set[str] = set()

    async def handle(request: Request) -> Response:
        ids = [each["trajectory_id"] for each in json.loads(await request.body())["rewards"]]
        matched = [each for each in ids if each in known and each not in rewarded]
        repeated = [each for each in ids if each in rewarded]
        rewarded.update(matched)
        unknown = [index for index, each in enumerate(ids) if each not in known]
        answer = {"matched": len(matched), "repeated": len(repeated), "unknown": len(unknown)}
        return JSONResponse({**answer, "unknown_indices": unknown[:100]})

    server.on("POST", "/darts/v1/rewards", handle)


async def report(running: RunningIngress, ids: list[str]) -> Any:
    body = {"rewards": [{"trajectory_id": each, "reward": 1.0} for each in ids]}
    return await running.post("/darts/v1/rewards", body)


async def test_rewards_find_the_replicas_that_returned_their_trajectories() -> None:
    async with ingress_over(3) as (running, servers):
        ids = [f"g{number}:0" for number in range(450)]
        for number, server in enumerate(servers):
            keeps_rewards(server, set(ids[:390][number::3]))
        assert (await report(running, ids)).json() == {
            "matched": 390,
            "repeated": 0,
            "unknown": 60,
            "unknown_indices": list(range(390, 450)),
        }
        again = (await report(running, ids[:10])).json()
        assert (again["matched"], again["repeated"], again["unknown"]) == (0, 10, 0)


async def test_a_control_goes_to_all_replicas_and_their_common_answer_comes_back() -> None:
    async with ingress_over(3) as (running, servers):
        for server in servers:
            server.answer("POST", "/pause", {"status": "paused"})
        assert (await running.client.post("/pause?mode=keep")).json() == {"status": "paused"}
        assert [server.received[-1].query for server in servers] == ["mode=keep"] * 3


async def test_answers_that_differ_come_back_with_their_replicas() -> None:
    async with ingress_over(2) as (running, servers):
        for number, server in enumerate(servers):
            server.answer("GET", "/darts/v1/weights", {"version": 7 - number, "state": "serving"})
        body = (await running.client.get("/darts/v1/weights")).json()
        assert (body["version"], body["state"]) == (6, "serving")
        assert {answer["version"] for answer in body["replicas"].values()} == {6, 7}


async def test_a_refusal_by_some_names_them_and_those_that_did_it() -> None:
    async with ingress_over(2) as (running, servers):
        servers[1].answer("PATCH", "/darts/v1/policy", {"error": {"message": "redundancy: too large"}}, 400)
        answer = await running.client.patch("/darts/v1/policy", json={"redundancy": 17})
        message = answer.json()["error"]["message"]
        did, refused = (member.name for member in running.fleet.members)
        assert answer.status_code == 502
        assert f"{did} carried it out" in message
        assert f"{refused}: 400 redundancy: too large" in message


async def test_a_replica_that_could_not_be_reached_is_named_in_a_header() -> None:
    async with ingress_over(2) as (running, servers):
        await servers[1].kill()
        await running.fleet.check(running.fleet.members[1])
        answer = await running.client.post("/resume")
        assert answer.status_code == 200
        assert answer.headers["x-darts-unreachable"] == running.fleet.members[1].name


@pytest.mark.parametrize("path", ["/update_weights", "/darts/v1/weights/staged/x:switch"])
async def test_weights_in_other_ways_are_refused_with_the_remedy_before_they_are_read(path: str) -> None:
    async with ingress_over(2) as (running, servers):
        answer = await running.client.post(path, content=b"x" * 1000)
        assert answer.status_code == 501
        assert "PUT or POST /darts/v1/weights" in answer.json()["error"]["message"]
        assert not any(server.received for server in servers)
