"""New weights for all replicas."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from darts_server.http.sse import encode
from tests.ingress.fake_weights import PATH, install, state
from tests.ingress.servers import Handler, fake_servers, ingress, ingress_over, until

pytestmark = pytest.mark.anyio


async def chunks(count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield bytes([number % 256]) * 100_000


async def test_pushed_weights_are_staged_everywhere_and_switched_under_one_version() -> None:
    async with ingress_over(3) as (running, servers):
        weights = install(servers)
        weights[1].version = 7
        answer = await running.client.put(
            f"{PATH}?rule=keep", content=chunks(40), headers={"Authorization": "Bearer k"}
        )
        assert (answer.status_code, answer.json()) == (200, {"version": 8, "staged": None})
        whole = b"".join([chunk async for chunk in chunks(40)])
        assert state(weights) == [(whole, 8)] * 3
        assert all(got.headers["authorization"] == "Bearer k" for server in servers for got in server.received)
        assert "rule=keep" in next(got.query for got in servers[0].received if got.method == "PUT")


@pytest.mark.parametrize("at", ["stage", "switch"])
@pytest.mark.parametrize("ends", ["caller", "ingress"])
async def test_an_update_that_has_begun_ends_on_all_servers(at: str, ends: str) -> None:
    async with fake_servers(2) as servers:
        weights = install(servers)
        gate = weights[1].stage_gate if at == "stage" else weights[1].gate
        gate.clear()
        async with ingress(servers) as running:
            call = asyncio.create_task(running.post(PATH, {"path": "/w"}))
            await until(lambda: any(got.path == PATH or ":switch" in got.path for got in servers[1].received))
            await until(lambda: servers[1].running == 1 and servers[0].running == 0)
            if ends == "caller":
                call.cancel()
                await asyncio.sleep(0.2)
                gate.set()
                await until(lambda: [each.version for each in weights] == [4, 4])
            else:
                asyncio.get_running_loop().call_later(2.0, gate.set)  # after connections were cut
        with suppress(asyncio.CancelledError, httpx.TransportError):
            await call
        assert [version for _, version in state(weights)] == [4, 4]


async def test_a_caller_without_a_key_neither_reaches_the_lock_nor_the_servers_memory() -> None:
    async with ingress_over(2) as (running, servers):
        install(servers)
        for server in servers:
            server.needs_key = True
        await until(lambda: all(member.needs_key for member in running.fleet.members))
        reading = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            yield bytes(100_000)
            reading.set()
            await asyncio.sleep(3600)

        stranger = asyncio.create_task(running.client.put(PATH, content=endless()))
        await reading.wait()
        await asyncio.sleep(0.2)
        answer = await running.client.put(PATH, content=b"new", headers={"Authorization": "Bearer k"})
        assert answer.status_code == 200
        stranger.cancel()
        refused = await running.client.put(PATH, content=b"new")
        assert (refused.status_code, refused.headers["connection"]) == (401, "close")


async def test_a_batch_starts_on_all_servers_before_weights_are_switched_or_after() -> None:
    async with ingress_over(2) as (running, servers):
        weights = install(servers)
        begin, seen = asyncio.Event(), list[int]()

        def batches(at: int) -> Handler:
            async def events() -> AsyncIterator[bytes]:
                if at == 1:
                    await begin.wait()
                seen.append(weights[at].version)
                yield encode("batch", {"policy": "off", "survivors": False, "sampling": {}})
                group = {"number": 0, "trajectories": [{"length": 1}], "discarded": [], "error": None}
                yield encode("group", group)
                yield encode("done", {"usage": {"generated": 1}, "carried": 0})

            async def handle(_: Request) -> Response:
                return StreamingResponse(events(), media_type="text/event-stream")

            return handle

        for at, server in enumerate(servers):
            server.on("POST", "/darts/v1/rollouts", batches(at))
        call = asyncio.create_task(running.post("/darts/v1/rollouts", {"prompts": [{"text": "a"}, {"text": "b"}]}))
        await until(lambda: len(seen) == 1 and all(server.bodies("/darts/v1/rollouts") for server in servers))
        update = asyncio.create_task(running.client.put(PATH, content=b"new"))
        await until(lambda: all(each.staged for each in weights))
        await asyncio.sleep(0.2)
        begin.set()
        assert (await call).status_code == 200
        assert (await update).status_code == 200
        assert seen == [3, 3]


@pytest.mark.parametrize("refusing", [[1], [0, 1, 2]])
async def test_if_one_refuses_to_stage_none_switches(refusing: list[int]) -> None:
    async with ingress_over(3) as (running, servers):
        weights = install(servers)
        for number in refusing:
            weights[number].refuses = "stage"
        answer = await running.client.put(PATH, content=chunks(40))
        assert answer.status_code == (502 if len(refusing) == 1 else 413)
        assert "too large" in answer.json()["error"]["message"]
        assert state(weights) == [(b"old", 3)] * 3


async def test_if_one_cannot_switch_the_others_go_back() -> None:
    async with ingress_over(3) as (running, servers):
        weights = install(servers)
        weights[1].refuses = "switch"
        answer = await running.client.put(PATH, content=b"new")
        assert answer.status_code == 502
        assert "all servers serve the weights that they had" in answer.json()["error"]["message"]
        assert f"{running.fleet.members[1].name}: 503 no switch" in answer.json()["error"]["message"]
        assert state(weights) == [(b"old", 3)] * 3


async def test_a_lora_adapter_is_switched_without_a_way_back() -> None:
    async with ingress_over(3) as (running, servers):
        weights = install(servers)
        for each in weights:
            each.server.on("PUT", f"{PATH}/lora/x", each.stage)
        answer = await running.client.put(f"{PATH}/lora/x?config=c", content=b"new")
        assert answer.status_code == 200, answer.text
        assert state(weights) == [(b"new", 4)] * 3
        weights[1].refuses = "switch"
        answer = await running.client.put(f"{PATH}/lora/x?config=c", content=b"newer")
        names = [running.fleet.members[number].name for number in (0, 2)]
        assert f"{', '.join(names)} serve version 5, and cannot go back" in answer.text
        assert not any("keep_previous" in got.query for server in servers for got in server.received)
        assert state(weights) == [(b"newer", 5), (b"new", 4), (b"newer", 5)]


async def test_new_requests_wait_while_the_servers_switch_and_those_of_running_groups_do_not() -> None:
    async with ingress_over(2) as (running, servers):
        weights = install(servers)
        single = {"prompt": "of a group that runs"}
        await running.post("/v1/completions", single)
        for each in weights:
            each.gate.clear()
        update = asyncio.create_task(running.client.put(PATH, content=b"new"))
        await until(lambda: all(any(":switch" in got.path for got in server.received) for server in servers))
        calls = [asyncio.create_task(running.post("/v1/completions", {"prompt": "p", "n": 2}))]
        calls.append(asyncio.create_task(running.post("/darts/v1/rollouts", {"prompts": []})))
        assert (await running.post("/v1/completions", single)).status_code == 200
        await asyncio.sleep(0.1)
        assert not any(call.done() for call in calls)
        second = await running.client.put(PATH, content=b"newer")
        assert second.status_code == 409
        for each in weights:
            each.gate.set()
        assert (await update).status_code == 200
        assert [(await call).status_code for call in calls] == [200, 200]


async def test_weights_are_not_changed_while_a_server_cannot_be_reached() -> None:
    async with ingress_over(2) as (running, servers):
        weights = install(servers)
        await servers[1].kill()
        await running.fleet.check(running.fleet.members[1])
        answer = await running.client.put(PATH, content=b"new")
        assert answer.status_code == 502
        assert running.fleet.members[1].name in answer.json()["error"]["message"]
        assert state(weights) == [(b"old", 3)] * 2


async def test_a_push_that_breaks_off_changes_nothing() -> None:
    async with ingress_over(2) as (running, servers):
        weights = install(servers)

        async def broken() -> AsyncIterator[bytes]:
            yield bytes(100_000)
            raise ValueError("the trainer died")

        with pytest.raises(ValueError, match="trainer"):
            await running.client.put(PATH, content=broken())
        assert state(weights) == [(b"old", 3)] * 2
        while (answer := await running.client.put(PATH, content=b"new")).status_code == 409:
            await asyncio.sleep(0.01)  # the first one is still ending
        assert answer.status_code == 200
