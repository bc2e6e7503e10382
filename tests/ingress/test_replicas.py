"""Replicas that are lost, unhealthy or misconfigured, and what callers see of it."""

import asyncio
import random
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.http import HttpReplica
from darts_server.ingress.replicas.member import State
from tests.ingress.servers import FakeServer, Handler, fake_servers, hang, ingress, ingress_over, until

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


async def test_requests_of_a_replica_that_dies_run_again_on_another_and_a_group_stays_together() -> None:
    async with ingress_over(3) as (running, servers):
        for server in servers:
            hang(server, PATH)
        calls = [asyncio.create_task(running.post(PATH, {"prompt": "one group"})) for _ in range(4)]
        await until(lambda: max(server.running for server in servers) == 4)
        dying = next(server for server in servers if server.running)
        others = [server for server in servers if server is not dying]
        for server in others:
            server.handlers.clear()
        await dying.kill()
        answers = [answer.json()["server"] for answer in await asyncio.gather(*calls)]
        assert len(set(answers)) == 1
        assert answers[0] in {server.name for server in others}
        states = {member.name: member.state for member in running.fleet.members}
        assert states[dying.url.removeprefix("http://")] is State.LOST


def breaking(server: FakeServer, part: bytes, media_type: str) -> Handler:
    async def chunks() -> AsyncIterator[bytes]:
        yield part
        await asyncio.sleep(60)

    async def handle(_: Request) -> Response:
        return StreamingResponse(chunks(), media_type=media_type)

    return handle


@pytest.mark.parametrize(("path", "named"), [(PATH, b""), ("/v1/responses", b"event: error\n")])
async def test_a_stream_that_had_begun_ends_with_an_error_that_says_so(path: str, named: bytes) -> None:
    async with ingress_over(1) as (running, [server]):
        server.on("POST", path, breaking(server, b"data: 1\n\ndata: ha", "text/event-stream"))
        async with running.client.stream("POST", path, json={"prompt": "p", "stream": True}) as answer:
            chunks = answer.aiter_raw()
            assert await anext(chunks) == b"data: 1\n\n"
            await server.kill()
            rest = b"".join([chunk async for chunk in chunks])
        assert rest.startswith(named + b'data: {"error": {"message": "the server ')
        assert b"send the request again" in rest


async def test_a_request_that_two_servers_were_lost_with_gets_no_third_one() -> None:
    async with ingress_over(4) as (running, servers):

        def poisoned(server: FakeServer) -> Handler:
            async def handle(request: Request) -> Response:
                await server.kill()
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                return Response()

            return handle

        for server in servers:
            server.on("POST", PATH, poisoned(server))
        answer = await running.post(PATH, {"prompt": "p"})
        killed = [server.url.removeprefix("http://") for server in servers if server.killed]
        assert (answer.status_code, len(killed)) == (502, 2)
        assert all(name in answer.json()["error"]["message"] for name in killed)


async def test_a_request_that_stopping_servers_refused_or_that_found_closed_ports_runs_on_the_last_one() -> None:
    async with ingress_over(4, poll_interval=3600.0) as (running, servers):
        last = servers.pop(random.randrange(4))
        for server in servers[:2]:
            server.health = 503
            server.retry_after = "30"

            async def refuse(_: Request) -> Response:
                return JSONResponse({"error": {"message": "stopping"}}, 503, headers={"Retry-After": "30"})

            server.on("POST", PATH, refuse)
        await servers[2].kill()
        assert (await running.post(PATH, {"prompt": "p"})).json() == {"server": last.name}


async def test_a_connection_that_is_not_made_in_time_is_one_missed_poll_and_a_refused_one_a_lost_server() -> None:
    def late(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectTimeout("late", request=request)

    replica = HttpReplica("http://127.0.0.1:9", [httpx.MockTransport(late)])
    fleet = Fleet([replica, HttpReplica("http://localhost:9")])
    for member in fleet.members:
        member.change(State.SERVING)
        await fleet.check(member)
    assert [member.state for member in fleet.members] == [State.SERVING, State.LOST]
    for _ in range(2):
        await fleet.check(fleet.members[0])
    assert fleet.members[0].state is State.LOST


async def test_a_stopping_server_gets_no_more_requests_and_what_it_refused_runs_elsewhere() -> None:
    async with ingress_over(2) as (running, servers):
        stopping, other = servers
        stopping.answer("POST", PATH, {"error": {"message": "stopping"}}, 503)
        stopping.health = 503
        found = {(await running.post(PATH, {"prompt": f"{i}", "n": 2})).json().get("server") for i in range(4)}
        assert found == {other.name}
        health = (await running.client.get("/health")).json()
        assert [each["state"] for each in health["replicas"]] == ["unhealthy", "serving"]
        assert health["replicas"][0]["detail"] == "it is stopping"


async def test_a_replica_that_no_longer_answers_polls_is_lost_and_its_requests_run_elsewhere() -> None:
    async with fake_servers(2) as servers, ingress(servers, poll_timeout=0.5) as running:
        for server in servers:
            hang(server, PATH)
        call = asyncio.create_task(running.post(PATH, {"prompt": "p", "n": 2}))
        await until(lambda: any(server.running for server in servers))
        frozen = next(server for server in servers if server.running)
        next(server for server in servers if server is not frozen).handlers.clear()
        frozen.frozen = True
        assert (await call).json()["server"] != frozen.name


async def test_a_server_that_does_not_know_its_name_is_not_used_and_says_why() -> None:
    async with ingress_over(1) as (running, [server]):
        server.models = 403
        await until(lambda: running.fleet.members[0].state is State.REFUSED)
        answer = await running.post(PATH, {"prompt": "p"})
        assert answer.status_code == 503
        assert "use its IP address" in answer.json()["error"]["message"]


async def test_metrics_are_those_of_all_replicas_and_its_own() -> None:
    async with ingress_over(2) as (running, servers):
        for number, server in enumerate(servers):
            text = f'# HELP x_total Help.\n# TYPE x_total counter\nx_total{{kind="k"}} {number}.0\nplain 2.0\n'

            async def metrics(_: Request, text: str = text) -> Response:
                return Response(text, media_type="text/plain")

            server.on("GET", "/metrics", metrics)
        await running.post(PATH, {"prompt": "p", "n": 2})
        lines = (await running.client.get("/metrics")).text.splitlines()
        first, second = (member.name for member in running.fleet.members)
        assert lines.count("# TYPE x_total counter") == 1
        assert f'x_total{{replica="{first}",kind="k"}} 0.0' in lines
        assert f'x_total{{replica="{second}",kind="k"}} 1.0' in lines
        assert f'plain{{replica="{first}"}} 2.0' in lines
        assert 'darts_ingress_replicas{state="serving"} 2.0' in lines
        assert sum(line.startswith("darts_ingress_requests_total{") and 'outcome="answered"' in line for line in lines)
        assert "darts_ingress_added_seconds_count 1.0" in lines
