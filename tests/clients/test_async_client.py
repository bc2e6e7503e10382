import asyncio
import gc
import json
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from darts_client import AsyncClient, BadRequest, Overloaded, TimedOut

from .vllm_answers import MODELS, URL, full_completion

pytestmark = pytest.mark.anyio


class FakeServer:
    """Answers some prompts at once; the others wait, and are recorded when their request is cancelled."""

    def __init__(self, *answered: str, refused: tuple[str, ...] = ()) -> None:
        self.answered = set(answered)
        self.refused = set(refused)
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
        if name in self.refused:
            while not self.waiting:
                await asyncio.sleep(0)
            return httpx.Response(400, json={"error": {"message": "no such prompt", "param": "prompt"}})
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


async def test_streamed_groups_are_one_request_each_and_have_the_index_of_their_prompt() -> None:
    server = FakeServer("a", "b", "c")
    async with AsyncClient(URL, transport=server.transport) as client:
        stream = client.stream_groups(["a", "b", "c"], group_size=2, max_tokens=16, policy="darts", top_k=4)
        groups = {index: group async for index, group in stream}
    assert {index: group.group_id for index, group in groups.items()} == {0: "cmpl-a", 1: "cmpl-b", 2: "cmpl-c"}
    assert {index: group.number for index, group in groups.items()} == {0: 0, 1: 1, 2: 2}
    assert [body["prompt"] for body in server.bodies()] == [["a"], ["b"], ["c"]]
    assert {(body["n"], body["top_k"], body["model"]) for body in server.bodies()} == {(2, 4, "tiny")}
    assert {r.headers["X-Darts-Policy"] for r in server.requests if r.method == "POST"} == {"darts"}


async def test_streamed_prompts_may_mix_text_and_tokens() -> None:
    mixed: list[str | list[int]] = ["a", [1, 2]]
    server = FakeServer("a", "[1, 2]")
    async with AsyncClient(URL, model="tiny", transport=server.transport) as client:
        groups = [_ async for _ in client.stream_groups(mixed, group_size=1, max_tokens=16)]
    assert len(groups) == 2


async def test_closing_a_stream_early_cancels_pending_requests() -> None:
    server = FakeServer("b")
    async with (
        AsyncClient(URL, model="tiny", transport=server.transport) as client,
        aclosing(client.stream_groups(["a", "b", "c"], group_size=1, max_tokens=16)) as stream,
    ):
        async for index, _ in stream:
            assert index == 1
            break
    assert server.cancelled == server.waiting == {"a", "c"}


async def test_leaving_a_stream_by_break_cancels_pending_requests_soon_after() -> None:
    server = FakeServer("b")
    async with AsyncClient(URL, model="tiny", transport=server.transport) as client:
        async for _ in client.stream_groups(["a", "b", "c"], group_size=1, max_tokens=16):
            break
        gc.collect()
        async with asyncio.timeout(10):
            while server.cancelled != {"a", "c"}:
                await asyncio.sleep(0)


async def test_an_error_ends_the_stream_and_cancels_pending_requests() -> None:
    server = FakeServer(refused=("b",))
    async with AsyncClient(URL, model="tiny", transport=server.transport) as client:
        groups = client.stream_groups(["a", "b", "c"], group_size=1, max_tokens=16)
        with pytest.raises(BadRequest, match="no such prompt") as caught:
            await anext(groups)
    assert caught.value.param == "prompt"
    assert server.cancelled == server.waiting == {"a", "c"}


async def test_requests_that_wait_for_a_slot_are_not_sent_after_the_end() -> None:
    server = FakeServer("a")
    async with (
        AsyncClient(URL, model="tiny", transport=server.transport) as client,
        aclosing(client.stream_groups(["a", "b", "c"], group_size=1, max_tokens=16, concurrency=1)) as stream,
    ):
        await anext(stream)
    assert "c" not in {body["prompt"][0] for body in server.bodies()}


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
