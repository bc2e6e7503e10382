import asyncio
import json
from typing import Any

import httpx
import pytest

from darts_client import AsyncClient, Overloaded, TimedOut

from .vllm_answers import MODELS, URL, full_completion

pytestmark = pytest.mark.anyio


class FakeServer:
    """Answers some prompts at once; the others wait, and are recorded when their request is cancelled."""

    def __init__(self, *answered: str) -> None:
        self.answered = set(answered)
        self.requests: list[httpx.Request] = []
        self.waiting: set[str] = set()
        self.cancelled: set[str] = set()
        self.transport = httpx.MockTransport(self.handle)

    async def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.method == "GET":
            await asyncio.sleep(0)
            return httpx.Response(200, json=MODELS)
        body = json.loads(request.content)
        name = str(body["prompt"][0])
        if name not in self.answered:
            await self.wait(name)
        return httpx.Response(200, json=full_completion(body) | {"id": f"cmpl-{name}"})

    async def wait(self, name: str) -> None:
        self.waiting.add(name)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.add(name)
            raise

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests if request.method == "POST"]


async def test_completions_are_one_request_with_groups_in_prompt_order() -> None:
    server = FakeServer("[1]")
    async with AsyncClient(URL, model="tiny", transport=server.transport) as client:
        groups = await client.completions([[1], [2]], group_size=3, max_tokens=16, policy="off", seed=5)
    assert [group.prompt_token_ids for group in groups] == [(1,), (2,)]
    assert [group.lengths for group in groups] == [(1, 2, 3), (1, 2, 3)]
    [request] = server.requests
    assert request.headers["X-Darts-Policy"] == "off"
    assert json.loads(request.content)["seed"] == 5


async def test_concurrent_requests_look_the_model_up_once() -> None:
    server = FakeServer("a")
    async with AsyncClient(URL, transport=server.transport) as client:
        await asyncio.gather(*(client.completions("a", group_size=1, max_tokens=16) for _ in range(5)))
    assert [request.url.path for request in server.requests].count("/v1/models") == 1
    assert {body["model"] for body in server.bodies()} == {"tiny"}


async def test_an_unhealthy_server_is_an_error() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(503))
    async with AsyncClient(URL, transport=transport) as client:
        with pytest.raises(Overloaded):
            await client.health()
        with pytest.raises(TimedOut, match="HTTP 503"):
            await client.wait_until_healthy(0)


async def test_waiting_ends_when_the_server_is_healthy() -> None:
    answers = iter([503, 200])
    transport = httpx.MockTransport(lambda request: httpx.Response(next(answers)))
    async with AsyncClient(URL, transport=transport) as client:
        await client.wait_until_healthy(0.2)
    assert next(answers, None) is None


async def test_timeouts_are_passed_to_httpx_and_a_health_probe_has_its_own() -> None:
    server = FakeServer("a")
    async with AsyncClient(URL, model="tiny", timeout=77.0, transport=server.transport) as client:
        await client.health()
        await client.completions("a", group_size=1, max_tokens=16)
    assert [request.extensions["timeout"]["read"] for request in server.requests] == [10.0, 77.0]


async def test_cancelling_a_completion_cancels_its_request() -> None:
    server = FakeServer()
    async with AsyncClient(URL, model="tiny", transport=server.transport) as client:
        task = asyncio.create_task(client.completions("a", group_size=1, max_tokens=16))
        while not server.waiting:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert server.cancelled == {"a"}
