"""Requests and answers pass through an ingress unchanged."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tests.ingress.servers import fake_servers, hang, ingress, ingress_over, until

pytestmark = pytest.mark.anyio
SSE = "text/event-stream"


async def test_method_path_query_headers_and_body_arrive_as_they_were_sent() -> None:
    async with ingress_over(1) as (running, [server]):
        body = bytes(range(256))
        answer = await running.client.post(
            "/v1/any%2Fthing?a=1&b=%20x", content=body, headers={b"Authorization": b"Bearer k", b"X-Own": b"\xe4"}
        )
        [got] = server.received
        assert answer.json() == {"server": "a"}
        assert (got.method, got.path, got.query, got.body) == ("POST", "/v1/any%2Fthing", "a=1&b=%20x", body)
        assert got.headers["authorization"] == "Bearer k"
        assert got.headers["x-own"] == "\xe4"
        assert got.headers["host"] == server.url.removeprefix("http://")


async def test_headers_of_one_connection_are_dropped_in_both_directions() -> None:
    async with ingress_over(1) as (running, [server]):

        async def handle(_: Request) -> Response:
            return Response(b"x", headers={"Connection": "x-hop", "X-Hop": "1", "X-Kept": "2", "Keep-Alive": "3"})

        server.on("GET", "/v1/thing", handle)
        headers = {"Connection": "x-mine", "X-Mine": "1", "TE": "trailers", "X-Kept": "2"}
        answer = await running.client.get("/v1/thing", headers=headers)
        assert answer.headers["x-kept"] == "2"
        assert not {"x-hop", "keep-alive"} & set(answer.headers)
        assert server.received[0].headers["x-kept"] == "2"
        assert not {"x-mine", "te"} & set(server.received[0].headers)


async def test_an_answer_larger_than_what_is_held_is_passed_on_whole() -> None:
    async with ingress_over(1) as (running, [server]):
        large = bytes(20_000_000)

        async def handle(_: Request) -> Response:
            return Response(large)

        server.on("GET", "/v1/thing", handle)
        assert (await running.client.get("/v1/thing")).content == large


async def test_events_are_passed_on_as_they_come() -> None:
    async with ingress_over(1) as (running, [server]):
        go_on = asyncio.Event()

        async def events() -> AsyncIterator[bytes]:
            yield b"data: 1\n\nda"
            await go_on.wait()
            yield b"ta: 2\n\n"

        async def handle(_: Request) -> Response:
            return StreamingResponse(events(), media_type=SSE)

        server.on("POST", "/v1/completions", handle)
        async with running.client.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True}) as answer:
            chunks = answer.aiter_raw()
            assert await anext(chunks) == b"data: 1\n\n"  # the second event is not sent in pieces
            go_on.set()
            assert b"".join([chunk async for chunk in chunks]) == b"data: 2\n\n"
        assert answer.headers["content-type"].startswith(SSE)


async def test_a_caller_that_disconnects_closes_the_request_to_the_replica() -> None:
    async with ingress_over(1) as (running, [server]):
        hang(server, "/v1/completions")
        call = asyncio.create_task(running.post("/v1/completions", {"prompt": "p"}))
        await until(lambda: server.running == 1)
        call.cancel()
        await until(lambda: server.disconnects == 1)
        assert running.fleet.members[0].in_flight == 0
        assert running.fleet.members[0].load == 0


async def test_a_body_beyond_the_limit_is_refused_and_not_sent() -> None:
    async with ingress_over(1, max_body_bytes=100) as (running, [server]):
        answer = await running.client.post("/v1/completions", content=bytes(101))
        assert answer.status_code == 413
        assert answer.json()["error"]["param"] == "body"
        assert not server.received


async def test_what_is_each_servers_own_is_refused_with_the_remedy() -> None:
    async with ingress_over(2) as (running, servers):
        answer = await running.client.get("/darts/v1/state")
        assert answer.status_code == 501
        assert "each server" in answer.json()["error"]["message"]
        assert not any(server.received for server in servers)


async def test_a_web_page_of_another_site_and_an_unknown_name_are_refused_while_a_server_needs_no_key() -> None:
    async with ingress_over(1) as (running, [server]):
        page = await running.client.get("/v1/thing", headers={"Origin": "https://evil.example"})
        name = await running.client.get("/v1/thing", headers={"Host": "evil.example"})
        assert (page.status_code, name.status_code, server.received) == (403, 403, [])
        assert (await running.client.get("/health", headers={"Host": "evil.example"})).status_code == 200


async def test_with_keys_on_all_servers_these_judge_the_callers() -> None:
    async with fake_servers(2) as servers:
        for server in servers:
            server.needs_key = True
        async with ingress(servers) as running:
            named = {"Host": "darts.example"}
            assert (await running.client.get("/v1/thing", headers=named)).status_code == 401
            answer = await running.client.get("/v1/thing", headers=named | {"Authorization": "Bearer k"})
            assert answer.status_code == 200


async def test_a_caller_of_another_machine_does_not_look_like_one_of_this_machine_to_the_server() -> None:
    async with ingress_over(1) as (running, [server]):
        await running.client.post("/pause")
        await running.client.post("/pause", headers={"X-Forwarded-For": "10.0.0.1"})
        await running.client.post("/pause", headers={"Via": "1.1 proxy"})
        here, forwarded, through = server.received
        assert "x-forwarded-for" not in here.headers
        assert forwarded.headers["x-forwarded-for"] == "10.0.0.1, 127.0.0.1"
        assert through.headers["x-forwarded-for"] == "127.0.0.1"


async def test_a_server_without_keys_is_not_opened_to_other_machines() -> None:
    async with fake_servers(1) as servers:
        async with ingress(servers, host="0.0.0.0") as running:
            answer = await running.client.get("/v1/thing")
            assert answer.status_code == 503
            assert "--allow-unauthenticated" in answer.json()["error"]["message"]
        async with ingress(servers, host="0.0.0.0", allow_unauthenticated=True) as running:
            assert (await running.client.get("/v1/thing")).status_code == 200
