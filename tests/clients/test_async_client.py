"""Calls of the client besides rollouts. The sync client is generated from the async client; a test uses either."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from darts_client import AsyncClient, Client, ConnectionFailed, NotFound, Overloaded, TimedOut, Unauthorized

from .transcripts import FakeServer
from .vllm_answers import MODELS, URL, choice, completion

COMPLETION = completion(choice(0))
"""An answer with one trajectory."""


def models_of(server: FakeServer) -> list[str]:
    """Return the model of each request for completions."""
    return [json.loads(request.content)["model"] for request in server.requests if request.method == "POST"]


@pytest.mark.anyio
async def test_concurrent_requests_look_the_model_up_once() -> None:
    server = FakeServer(MODELS, *[COMPLETION] * 5)
    async with AsyncClient(URL, transport=server.transport) as client:
        await asyncio.gather(*(client.completions("a", group_size=1, max_tokens=16) for _ in range(5)))
    assert models_of(server) == ["tiny"] * 5


def test_threads_that_start_at_once_look_the_model_up_once() -> None:
    server = FakeServer(MODELS, *[COMPLETION] * 5)
    with Client(URL, transport=server.transport) as client, ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda _: client.completions("a", group_size=1, max_tokens=16), range(5)))
    assert len(server.requests) == 6


def test_the_api_key_is_sent_and_a_model_named_in_the_call_overrides_the_default() -> None:
    server = FakeServer({}, MODELS, COMPLETION)
    with Client(URL, api_key="secret", model="tiny", transport=server.transport) as client:
        client.health()
        assert client.models() == ["tiny", "tiny:raw"]
        client.completions("a", group_size=1, max_tokens=16, model="tiny:raw")
    assert models_of(server) == ["tiny:raw"]
    assert {request.headers["Authorization"] for request in server.requests} == {"Bearer secret"}


def test_timeouts_are_passed_to_httpx_and_a_health_probe_has_its_own() -> None:
    server = FakeServer({}, COMPLETION)
    with Client(URL, model="tiny", timeout=77.0, transport=server.transport) as client:
        client.health()
        client.completions("a", group_size=1, max_tokens=16)
    assert [request.extensions["timeout"]["read"] for request in server.requests] == [10.0, 77.0]


@pytest.mark.anyio
async def test_an_unhealthy_server_is_an_error_until_it_is_healthy() -> None:
    server = FakeServer(*(httpx.Response(status) for status in (503, 503, 503, 200)))
    async with AsyncClient(URL, transport=server.transport) as client:
        with pytest.raises(Overloaded):
            await client.health()
        with pytest.raises(TimedOut, match="HTTP 503"):
            await client.wait_until_healthy(0)
        await client.wait_until_healthy(0.2)
    assert server.answers == []


@pytest.mark.parametrize(("status", "kind"), [(401, Unauthorized), (404, NotFound)])
def test_waiting_ends_at_once_on_other_errors(status: int, kind: type[Exception]) -> None:
    start = time.monotonic()
    transport = httpx.MockTransport(lambda request: httpx.Response(status))
    with Client(URL, transport=transport) as client, pytest.raises(kind):
        client.wait_until_healthy(60)
    assert time.monotonic() - start < 10


def test_a_completion_is_retried_only_if_it_was_not_sent() -> None:
    server = FakeServer(httpx.ConnectError("refused"), httpx.ReadError("reset"))
    client = Client(URL, model="tiny", transport=server.transport)
    with client, pytest.raises(ConnectionFailed, match="reset"):
        client.completions("a", group_size=1, max_tokens=16)
    assert server.answers == []
