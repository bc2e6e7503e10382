"""Callers that go away."""

import asyncio

import httpx
import pytest

from examples.tiny_rl.server import Server
from tests.integration.waiting import wait_idle

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
# The tiny model never ends by itself within this limit, so that all groups are in the middle of it.
LONG = {"model": "tiny", "prompt": "7a-5b*4>", "n": 8, "max_tokens": 300, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_dies_in_the_middle_of_64_groups_leaves_nothing_running(
    server: Server, stream: bool
) -> None:
    cancelled = server.metric("darts_groups_total", outcome="cancelled")
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        url = f"{server.url}/v1/completions"
        requests = [asyncio.create_task(client.post(url, json=LONG | {"stream": stream})) for _ in range(64)]
        while await asyncio.to_thread(server.busy) < 128:
            await asyncio.sleep(0.05)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
    await asyncio.to_thread(wait_idle, server, 5.0)
    assert server.metric("darts_groups_total", outcome="cancelled") == cancelled + 64
    assert server.metric("darts_candidates_started_total") == server.metric("darts_candidates_ended_total")
    answer = httpx.post(f"{server.url}/v1/completions", json=LONG | {"ignore_eos": False}, timeout=60)
    assert len(answer.json()["choices"]) == 8


async def test_one_client_that_leaves_is_cleared_away_within_a_second(server: Server) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        request = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=LONG))
        while await asyncio.to_thread(server.busy) < 8:
            await asyncio.sleep(0.02)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    took = await asyncio.to_thread(wait_idle, server, 5.0)
    assert took < 1.0
