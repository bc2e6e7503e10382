"""Batches on several replicas."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from darts_server.http.sse import encode
from tests.ingress.servers import FakeServer, Handler, RunningIngress, ingress_over, until

pytestmark = pytest.mark.anyio
PATH = "/darts/v1/rollouts"


@dataclass
class FakeBatches:
    """Answers batches as a server does: a group of two trajectories for each prompt, with its text.

    ``gate``: groups from this one on wait for it. ``errors``: of prompts, by their text.
    """

    server: FakeServer
    open_groups: int = 1_000_000
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    errors: Mapping[str, str] = field(default_factory=dict)
    opened: int = 0
    closed: int = 0

    async def __call__(self, request: Request) -> Response:
        body = json.loads(await request.body())
        for number, prompt in enumerate(body["prompts"]):
            if prompt.get("text") == "invalid":
                field = f"prompts[{number}].text"
                return JSONResponse({"error": {"message": f"{field}: bad", "param": field, "code": 400}}, 400)
        if not body.get("stream"):
            return JSONResponse({"whole": self.server.name})
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    async def events(self, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        head = {"id": f"batch-{self.server.name}", "policy": "uniform", "groups": len(body["prompts"])}
        yield encode("batch", {**head, "survivors": False, "sampling": {"n": 1}}, 1)
        yield b": ping\n\n"
        self.opened += 1
        try:
            for number, prompt in reversed(list(enumerate(body["prompts"]))):
                if number >= self.open_groups:
                    await self.gate.wait()
                if body["stream"] == "tokens":
                    yield encode("delta", {"trajectory_id": f"{number}:0", "number": number, "token_ids": [1]})
                    await asyncio.sleep(0)
                    if number >= self.open_groups:
                        await asyncio.sleep(3600)
                yield encode("group", self.group(number, prompt))
            usage = {"generated": 10 * len(body["prompts"]), "returned": 0, "wasted": 0, "seconds": 1.0}
            yield encode("done", {"id": head["id"], "usage": usage, "unfinished": [], "carried": 0})
        finally:
            self.closed += 1

    def group(self, number: int, prompt: Mapping[str, Any]) -> dict[str, Any]:
        error = self.errors.get(prompt["text"])
        text = f'{prompt["text"]} "length":77 "number":5'
        trajectories = [{"text": text, "length": 3}, {"text": "", "length": 2}]
        return {
            "number": number,
            "group_id": f"{self.server.name}-{number}",
            "prompt_key": prompt.get("key", "hash"),
            "metadata": prompt.get("metadata"),
            "trajectories": [] if error else trajectories,
            "discarded": [{"trajectory_id": "x", "length": 4, "reason": "middle"}],
            "error": {"message": error, "code": 500} if error else None,
        }


def install(servers: list[FakeServer], **options: Any) -> list[FakeBatches]:
    found = [FakeBatches(server, **options) for server in servers]
    for each in found:
        each.server.on("POST", PATH, each)
    return found


def request(count: int, **fields: Any) -> dict[str, Any]:
    return {"prompts": [{"text": f"p{number}"} for number in range(count)], "group_size": 2, **fields}


def texts(groups: list[dict[str, Any]]) -> list[str]:
    return [group["trajectories"][0]["text"].split()[0] for group in groups]


async def events_of(running: RunningIngress, body: dict[str, Any]) -> list[tuple[str, Any]]:
    answer = await running.post(PATH, body)
    assert answer.status_code == 200, answer.text
    return parse(answer)


def parse(answer: httpx.Response) -> list[tuple[str, Any]]:
    found = []
    for text in answer.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in text.splitlines() if not line.startswith(":"))
        if "data" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


async def test_prompts_are_divided_and_answers_merged_in_their_order() -> None:
    async with ingress_over(3) as (running, servers):
        install(servers)
        body = (await running.post(PATH, request(12))).json()
        assert [group["number"] for group in body["groups"]] == list(range(12))
        assert texts(body["groups"]) == [f"p{number}" for number in range(12)]
        assert [len(server.bodies(PATH)[0]["prompts"]) for server in servers] == [4, 4, 4]
        assert (body["policy"], body["survivors"], body["unfinished"]) == ("uniform", False, [])
        usage = body["usage"]
        assert (usage["generated"], usage["returned"], usage["wasted"]) == (120, 60, 60)


async def test_a_prompt_with_a_key_stays_where_it_was() -> None:
    async with ingress_over(3) as (running, servers):
        install(servers)
        keyed = [{"text": f"p{number}", "key": f"k{number}"} for number in range(6)]
        await running.post(PATH, {"prompts": keyed, "group_size": 2})
        first = {p["key"]: server.name for server in servers for p in server.bodies(PATH)[0]["prompts"]}
        await running.post(PATH, {"prompts": keyed[::-1], "group_size": 2})
        assert first == {p["key"]: server.name for server in servers for p in server.bodies(PATH)[1]["prompts"]}


async def test_a_stream_has_the_events_of_all_with_the_numbers_of_the_batch() -> None:
    async with ingress_over(2) as (running, servers):
        install(servers)
        events = await events_of(running, request(6, stream="groups"))
        assert [name for name, _ in events] == ["batch", *["group"] * 6, "done"]
        assert events[0][1]["groups"] == 6
        assert {data["number"]: data["trajectories"][0]["text"].split()[0] for _, data in events[1:-1]} == {
            number: f"p{number}" for number in range(6)
        }
        assert events[-1][1]["id"] == events[0][1]["id"]
        assert events[-1][1]["usage"]["generated"] == 60


async def test_enough_groups_stop_the_others_on_all_replicas() -> None:
    async with ingress_over(2) as (running, servers):
        batches = install(servers, open_groups=1)  # each returns one group, and waits before the others
        for each in batches:
            each.open_groups = 10
        batches[1].open_groups = 0
        metadata = [{"text": f"p{number}", "metadata": {"at": number}} for number in range(6)]
        body = (await running.post(PATH, {"prompts": metadata, "group_size": 2, "num_groups": 3})).json()
        assert len(body["groups"]) == 3
        assert len(body["unfinished"]) == 3
        assert all(each["error"] is None for each in body["unfinished"])
        assert all(each["metadata"] == {"at": each["number"]} for each in body["unfinished"])
        assert {each["number"] for each in body["unfinished"] + body["groups"]} == set(range(6))
        await until(lambda: all(each.closed for each in batches))


@pytest.mark.parametrize("stream", [False, "groups"])
async def test_prompts_of_a_replica_that_dies_run_again_on_the_others(stream: object) -> None:
    async with ingress_over(3) as (running, servers):
        batches = install(servers, open_groups=1)
        call = asyncio.create_task(running.post(PATH, request(12, stream=stream)))
        await until(lambda: all(server.received for server in servers))
        await servers[0].kill()
        for each in batches[1:]:
            each.gate.set()
        answer = await call
        groups = [d for name, d in parse(answer) if name == "group"] if stream else answer.json()["groups"]
        assert sorted(texts(groups)) == sorted(f"p{number}" for number in range(12))
        assert {group["group_id"][0] for group in groups} <= {"a", "b", "c"}


def aborting(server: FakeServer, *, stops: bool) -> Handler:
    """Abort the groups of a batch that was half generated. ``stops``: since the server does."""
    aborted = [{"trajectory_id": "x", "length": 9, "token_ids": [1] * 9, "finish_reason": "abort"}]

    async def events(count: int) -> AsyncIterator[bytes]:
        yield encode("batch", {"policy": "off", "survivors": False, "sampling": {}})
        if stops:
            server.health, server.retry_after = 503, "30"
        for number in range(count):
            error = {"message": "it ended", "code": 503}
            yield encode("group", {"number": number, "aborted": aborted, "trajectories": [], "error": error})
        usage = {"generated": 9 * count, "returned": 0, "wasted": 9 * count, "seconds": 1.0}
        yield encode("done", {"usage": usage, "unfinished": [], "carried": 0})

    async def handle(request: Request) -> Response:
        count = len(json.loads(await request.body())["prompts"])
        return StreamingResponse(events(count), media_type="text/event-stream")

    return handle


@pytest.mark.parametrize("stream", [False, "groups"])
async def test_groups_that_were_aborted_on_servers_that_are_well_are_returned(stream: object) -> None:
    async with ingress_over(2) as (running, servers):
        install(servers)
        servers[1].on("POST", PATH, aborting(servers[1], stops=False))
        answer = await running.post(PATH, request(4, stream=stream))
        body = [data for name, data in parse(answer) if name == "group"] if stream else answer.json()["groups"]
        assert sorted(group["number"] for group in body) == [0, 1, 2, 3]
        assert [len(group["aborted"]) for group in body if group["error"]] == [1, 1]
        for server in servers:
            server.on("POST", PATH, aborting(server, stops=False))
        answer = await running.post(PATH, request(4, stream=stream))
        assert answer.status_code == 200, "there is something to return"
        if not stream:
            assert {group["error"]["message"] for group in answer.json()["groups"]} == {"it ended"}
            assert answer.json()["usage"]["generated"] == 36


@pytest.mark.parametrize("stream", [False, "groups"])
async def test_groups_that_a_server_hands_back_as_it_stops_run_again_on_the_others(stream: object) -> None:
    async with ingress_over(2) as (running, servers):
        install(servers)
        servers[1].on("POST", PATH, aborting(servers[1], stops=True))
        answer = await running.post(PATH, request(4, stream=stream))
        body = [data for name, data in parse(answer) if name == "group"] if stream else answer.json()["groups"]
        assert sorted(texts(body)) == ["p0", "p1", "p2", "p3"]
        assert [group["error"] for group in body] == [None] * 4


async def test_a_token_stream_that_lost_a_replica_says_so_if_parts_of_groups_were_sent() -> None:
    async with ingress_over(2) as (running, servers):
        batches = install(servers, open_groups=0)
        for each in batches:
            each.gate.set()
        call = asyncio.create_task(running.post(PATH, request(4, stream="tokens")))
        await until(lambda: all(server.received for server in servers))
        await asyncio.sleep(0.2)
        await servers[0].kill()
        name, data = parse(await call)[-1]
        assert name == "error"
        assert "send the rest again" in data["error"]["message"]


async def test_a_refusal_names_the_prompt_of_the_whole_batch_and_stops_the_others() -> None:
    async with ingress_over(2) as (running, servers):
        batches = install(servers, open_groups=0)
        body = request(6)
        body["prompts"][5]["text"] = "invalid"
        answer = await running.post(PATH, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompts[5].text")
        await until(lambda: all(each.opened == each.closed for each in batches))


async def test_failed_groups_are_returned_and_an_error_if_there_are_no_others() -> None:
    async with ingress_over(2) as (running, servers):
        batches = install(servers, errors={"p1": "engine"})
        groups = (await running.post(PATH, request(4))).json()["groups"]
        assert [group["error"] is None for group in groups] == [True, False, True, True]
        for each in batches:
            each.errors = {f"p{number}": f"no {number}" for number in range(4)}
        answer = await running.post(PATH, request(4))
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "no 0")


async def test_a_caller_that_disconnects_stops_all_parts() -> None:
    async with ingress_over(2) as (running, servers):
        batches = install(servers, open_groups=0)
        for stream in (False, "groups"):
            call = asyncio.create_task(running.post(PATH, request(4, stream=stream)))
            await until(lambda: all(each.opened == each.closed + 1 for each in batches))
            call.cancel()
            await until(lambda: all(each.opened == each.closed for each in batches))
        await until(lambda: [member.load for member in running.fleet.members] == [0, 0])


async def test_batches_that_one_replica_keeps_run_on_the_same_one() -> None:
    async with ingress_over(3) as (running, servers):
        install(servers)
        for fields, headers in (
            ({}, {"Idempotency_Key": "k"}),
            ({"carry": "resume", "num_groups": 2}, {}),
            ({"carry": "restart", "min_groups": 2}, {}),
            ({"carried": True}, {}),
        ):
            answers = [await running.post(PATH, request(6, **fields), **headers) for _ in range(4)]
            assert len({answer.json()["whole"] for answer in answers}) == 1
