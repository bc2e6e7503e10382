"""Options and aliases work alike on every route of vLLM's that generates."""

import asyncio
from typing import Any

import httpx
import pytest

from darts_server.demo.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
PROMPT = "7a-5b*4>"
SIZE = 2
MESSAGES = [{"role": "user", "content": PROMPT}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 20},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 20},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 20},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 20}},
}
HEADER = "X-Darts-Group-Id"


async def send(
    server: Server, route: str, model: str = "tiny", headers: dict[str, str] | None = None, **more: Any
) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        body = ROUTES[route] | {"model": model, "temperature": 1.0} | more
        if "token_ids" in body:
            del body["temperature"]
        posts = (client.post(route, json=body, headers=headers or {}) for _ in range(SIZE))
        return list(await asyncio.gather(*posts))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("in_header", [True, False])
async def test_a_group_is_named_in_a_header_or_in_the_body(server: Server, route: str, in_header: bool) -> None:
    name = f"{route.replace('/', '.')}-{in_header}"
    before = server.metric("darts_groups_total", outcome="completed")
    if in_header:
        answers = await send(server, route, headers={"X-Darts-Group": f"id={name};size={SIZE}"})
    else:
        answers = await send(server, route, vllm_xargs={"darts_group_id": name, "darts_group_size": SIZE})
    assert {answer.status_code for answer in answers} == {200}, answers[0].text
    assert len({answer.headers[HEADER] for answer in answers}) == 1
    assert server.metric("darts_groups_total", outcome="completed") == before + 1


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["alias", "header", "body"])
async def test_shaping_is_switched_off_by_alias_header_or_body(
    server: Server, route: str, stream: bool, where: str
) -> None:
    before = server.metric("darts_groups_total")
    group = {"X-Darts-Group": f"size={SIZE + 1}"}  # would wait for one more
    match where:
        case "alias":
            answers = await send(server, route, "tiny:raw", group, stream=stream)
        case "header":
            answers = await send(server, route, headers=group | {"X-Darts-Policy": "off"}, stream=stream)
        case _:
            answers = await send(server, route, headers=group, stream=stream, vllm_xargs={"darts_policy": "off"})
    assert {answer.status_code for answer in answers} == {200}, answers[0].text
    assert not any(HEADER in answer.headers for answer in answers)
    assert server.metric("darts_groups_total") == before
