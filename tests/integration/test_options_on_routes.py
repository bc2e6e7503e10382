"""Options and aliases work alike on every route of vLLM's that generates."""

import asyncio
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
PROMPT = "7a-5b*4>"
MESSAGES = [{"role": "user", "content": PROMPT}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 20, "temperature": 1.0},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 20, "temperature": 1.0},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 20, "temperature": 1.0},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20, "temperature": 1.0},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 20}},
}
HEADER = "X-Darts-Group-Id"


async def send(
    server: Server, route: str, model: str = "tiny", headers: dict[str, str] | None = None, **more: Any
) -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        body = ROUTES[route] | {"model": model} | more
        return await client.post(route, json=body, headers=headers or {})


@pytest.mark.parametrize("route", ROUTES)
async def test_a_group_may_be_named_in_a_header_and_in_the_body(server: Server, route: str) -> None:
    """One of its requests does it in each way."""
    name = route.replace("/", ".")
    before = server.metric("darts_groups_total", outcome="completed")
    in_body = {"darts_group_id": name, "darts_group_size": 2}
    answers = await asyncio.gather(
        send(server, route, headers={"X-Darts-Group": f"id={name};size=2"}), send(server, route, vllm_xargs=in_body)
    )
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert len({answer.headers[HEADER] for answer in answers}) == 1
    assert server.metric("darts_groups_total", outcome="completed") == before + 1


@pytest.mark.parametrize("route", ROUTES)
async def test_shaping_is_switched_off_by_alias_header_or_body_also_of_a_stream(server: Server, route: str) -> None:
    before = server.metric("darts_groups_total")
    group = {"X-Darts-Group": "size=2"}  # would wait for another one
    answers = await asyncio.gather(
        send(server, route, "tiny:raw", group, stream=True),
        send(server, route, headers=group | {"X-Darts-Policy": "off"}, stream=True),
        send(server, route, headers=group, stream=True, vllm_xargs={"darts_policy": "off"}),
    )
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    assert not any(HEADER in answer.headers for answer in answers)
    assert server.metric("darts_groups_total") == before
