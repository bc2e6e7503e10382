"""Calls of the client besides rollouts. The sync client is made of the async one: each test takes one of them."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from darts_client import AsyncClient, Client, ConnectionFailed, NotFound, Overloaded, TimedOut, Unauthorized

from .vllm_answers import MODELS, URL, full_completion


class FakeServer(httpx.MockTransport):
    """Answers vLLM's routes and records the requests. ``models``: of the completions."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.requests: list[httpx.Request] = []

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=MODELS)
        if request.url.path == "/v1/completions":
            return httpx.Response(200, json=full_completion(json.loads(request.content)))
        return httpx.Response(200)

    @property
    def paths(self) -> list[str]:
        return [request.url.path for request in self.requests]

    @property
    def models(self) -> set[str]:
        return {json.loads(request.content)["model"] for request in self.requests if request.method == "POST"}


@pytest.mark.anyio
async def test_concurrent_requests_look_the_model_up_once() -> None:
    server = FakeServer()
    async with AsyncClient(URL, transport=server) as client:
        await asyncio.gather(*(client.completions("a", group_size=1, max_tokens=16) for _ in range(5)))
    assert server.paths.count("/v1/models") == 1
    assert server.models == {"tiny"}


def test_threads_that_start_at_once_look_the_model_up_once() -> None:
    server = FakeServer()
    with Client(URL, transport=server) as client, ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda _: client.completions("a", group_size=1, max_tokens=16), range(5)))
    assert server.paths.count("/v1/models") == 1


def test_the_api_key_is_sent_and_a_model_named_in_the_call_overrides_the_default() -> None:
    server = FakeServer()
    with Client(URL, api_key="secret", model="tiny", transport=server) as client:
        client.health()
        assert client.models() == ["tiny", "tiny:raw"]
        client.completions("a", group_size=1, max_tokens=16, model="tiny:raw")
    assert server.models == {"tiny:raw"}
    assert {request.headers["Authorization"] for request in server.requests} == {"Bearer secret"}


def test_timeouts_are_passed_to_httpx_and_a_health_probe_has_its_own() -> None:
    server = FakeServer()
    with Client(URL, model="tiny", timeout=77.0, transport=server) as client:
        client.health()
        client.completions("a", group_size=1, max_tokens=16)
    assert [request.extensions["timeout"]["read"] for request in server.requests] == [10.0, 77.0]


@pytest.mark.anyio
async def test_an_unhealthy_server_is_an_error_until_it_is_healthy() -> None:
    answers = iter([503] * 3 + [200])
    transport = httpx.MockTransport(lambda request: httpx.Response(next(answers)))
    async with AsyncClient(URL, transport=transport) as client:
        with pytest.raises(Overloaded):
            await client.health()
        with pytest.raises(TimedOut, match="HTTP 503"):
            await client.wait_until_healthy(0)
        await client.wait_until_healthy(0.2)
    assert next(answers, None) is None


@pytest.mark.parametrize(("status", "kind"), [(401, Unauthorized), (404, NotFound)])
def test_waiting_ends_at_once_on_other_errors(status: int, kind: type[Exception]) -> None:
    start = time.monotonic()
    transport = httpx.MockTransport(lambda request: httpx.Response(status))
    with Client(URL, transport=transport) as client, pytest.raises(kind):
        client.wait_until_healthy(60)
    assert time.monotonic() - start < 10


def test_a_completion_is_retried_only_if_it_was_not_sent() -> None:
    errors: list[httpx.TransportError] = [httpx.ReadError("reset"), httpx.ConnectError("refused")]

    def handle(request: httpx.Request) -> httpx.Response:
        raise errors.pop()

    with (
        Client(URL, model="tiny", transport=httpx.MockTransport(handle)) as client,
        pytest.raises(ConnectionFailed, match="reset"),
    ):
        client.completions("a", group_size=1, max_tokens=16)
    assert not errors


@pytest.mark.anyio
async def test_cancelling_a_completion_cancels_its_request() -> None:
    waiting, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(request: httpx.Request) -> httpx.Response:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError("it was to be cancelled")

    async with AsyncClient(URL, model="tiny", transport=httpx.MockTransport(wait)) as client:
        task = asyncio.create_task(client.completions("a", group_size=1, max_tokens=16))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert cancelled.is_set()
