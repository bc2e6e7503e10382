"""Requests and answers pass through an ingress unchanged."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from darts_server.ingress.forwarding.headers import to_caller
from darts_server.ingress.forwarding.reply import Reply
from darts_server.ingress.replicas.replica import Headers
from tests.ingress.servers import FakeServer, fake_servers, ingress, ingress_over, until

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


def test_all_connection_headers_count() -> None:
    headers = [(b"connection", b"x-one"), (b"X-One", b"1"), (b"Connection", b"x-two, x-three"), (b"x-two", b"2")]
    assert to_caller([*headers, (b"x-kept", b"3")]) == [(b"x-kept", b"3")]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
async def test_events_are_not_divided_however_they_arrive(end: bytes) -> None:
    text = end.join([b"data: 1", b"data: 22", b"data: 3", b""]) + b"data: rest"
    for size in range(1, len(text) + 1):
        sent: list[bytes] = []

        async def send(message: Message, sent: list[bytes] = sent) -> None:
            sent.append(message.get("body", b""))

        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert await Reply("/v1/completions", send).pass_on(StreamedAnswer(pieces)) == text
        assert b"".join(sent) == text
        assert all(part.endswith(end) for part in sent[:-2] if part)


async def test_a_large_event_costs_time_in_proportion_to_its_size() -> None:
    async def send(_: Message) -> None:
        pass

    async def seconds(count: int) -> float:
        began = time.process_time()
        await Reply("/v1/completions", send).pass_on(StreamedAnswer([b"x" * 16_384] * count))
        return time.process_time() - began

    assert await seconds(4096) < 5.0  # with each part copied to the end of all earlier ones it takes many times that


@dataclass
class StreamedAnswer:
    """A stream that arrives in pieces."""

    pieces: list[bytes]
    status: int = 200
    headers: Headers = ((b"content-type", SSE.encode()),)

    async def chunks(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece

    async def aclose(self) -> None:
        """There is no connection."""


async def test_statuses_and_compressed_bodies_are_not_touched() -> None:
    async with ingress_over(1) as (running, [server]):

        async def handle(_: Request) -> Response:
            return Response(b"\x1f\x8bnot really", 418, headers={"Content-Encoding": "x-own", "Set-Cookie": "a=b"})

        server.on("GET", "/v1/thing", handle)
        async with running.client.stream("GET", "/v1/thing") as answer:
            raw = b"".join([chunk async for chunk in answer.aiter_raw()])
        assert (answer.status_code, raw) == (418, b"\x1f\x8bnot really")
        assert answer.headers["content-encoding"] == "x-own"
        assert answer.headers["set-cookie"] == "a=b"


async def test_an_answer_larger_than_what_is_held_is_passed_on_whole() -> None:
    async with ingress_over(1) as (running, [server]):
        large = bytes(20_000_000)

        async def handle(_: Request) -> Response:
            return Response(large)

        server.on("GET", "/v1/thing", handle)
        assert (await running.client.get("/v1/thing")).content == large


async def test_a_head_request_gets_headers_alone() -> None:
    async with ingress_over(1) as (running, [server]):
        answer = await running.client.head("/v1/thing")
        assert (answer.status_code, answer.content, server.received[0].method) == (200, b"", "HEAD")


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


async def hang(server: FakeServer) -> None:
    async def handle(request: Request) -> Response:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        server.disconnects += 1
        return Response()

    server.on("POST", "/v1/completions", handle)


async def test_a_caller_that_disconnects_closes_the_request_to_the_replica() -> None:
    async with ingress_over(1) as (running, [server]):
        await hang(server)
        call = asyncio.create_task(running.post("/v1/completions", {"prompt": "p"}))
        await until(lambda: server.running == 1)
        call.cancel()
        await until(lambda: server.disconnects == 1)
        assert running.fleet.members[0].in_flight == 0
        assert running.fleet.members[0].load == 0


async def test_a_caller_that_disconnects_during_a_stream_closes_it() -> None:
    async with ingress_over(1) as (running, [server]):
        closed = asyncio.Event()

        async def events() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"data: 1\n\n"
                    await asyncio.sleep(0.01)
            finally:
                closed.set()

        async def handle(_: Request) -> Response:
            return StreamingResponse(events(), media_type=SSE)

        server.on("POST", "/v1/completions", handle)
        async with running.client.stream("POST", "/v1/completions", json={"prompt": "p"}) as answer:
            await anext(answer.aiter_raw())
        await asyncio.wait_for(closed.wait(), 30)


async def test_a_body_beyond_the_limit_is_refused_and_not_sent() -> None:
    async with ingress_over(1, max_body_bytes=100) as (running, [server]):
        answer = await running.client.post("/v1/completions", content=bytes(101))
        assert answer.status_code == 413
        assert answer.json()["error"]["param"] == "body"
        assert not server.received


@pytest.mark.parametrize("path", ["/darts/v1/state", "/darts/v1/queue"])
async def test_what_is_each_servers_own_is_refused_with_the_remedy(path: str) -> None:
    async with ingress_over(2) as (running, servers):
        answer = await running.client.get(path)
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


async def test_origins_that_are_allowed_may_read_the_answers() -> None:
    async with ingress_over(1, allowed_origins=["https://page.example"]) as (running, [server]):
        answer = await running.client.get("/v1/thing", headers={"Origin": "https://page.example"})
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert "origin" not in server.received[0].headers


async def test_errors_have_openais_form() -> None:
    async with fake_servers(0) as none, ingress(none, server_list=["http://127.0.0.1:9"]) as running:
        answer = await running.post("/v1/completions", {"prompt": "p"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        error = answer.json()["error"]
        assert error["code"] == 503
        assert "127.0.0.1:9 is lost" in error["message"]


async def test_a_misspelt_header_of_ours_is_refused_before_it_reaches_a_server() -> None:
    async with ingress_over(1) as (running, [server]):
        answer = await running.post("/v1/completions", {"prompt": "p"}, X_Darts_Polcy="off")
        assert (answer.status_code, server.received) == (400, [])


async def test_what_is_not_json_is_left_to_the_server() -> None:
    async with ingress_over(1) as (running, [server]):
        for body in (b"{", b"[1]", b"[" * 100_000, b'{"prompt": [1, "a", {}], "n": "x"}', json.dumps({}).encode()):
            assert (await running.client.post("/v1/completions", content=body)).status_code == 200
        assert len(server.received) == 5
