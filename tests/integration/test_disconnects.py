"""Clients that disconnect."""

import asyncio
from typing import Any

import httpx
import pytest

from darts_server.demo.server import Server
from tests.integration.waiting import wait_idle, wait_started

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
# Without the end-of-sequence token no candidate finishes before this limit.
LONG: dict[str, Any] = {"model": "tiny", "prompt": "7a-5b*4>", "n": 8, "max_tokens": 300, "ignore_eos": True}


async def disconnect(server: Server, groups: int, stream: bool) -> tuple[float, float]:
    """Request groups and disconnect once all candidates have started; count the cancelled and completed groups."""
    outcomes = ("cancelled", "completed")
    before = [server.metric("darts_groups_total", outcome=outcome) for outcome in outcomes]
    started = server.metric("darts_candidates_started_total")
    async with httpx.AsyncClient(timeout=240, limits=httpx.Limits(max_connections=None)) as client:
        url = f"{server.url}/v1/completions"
        requests = [asyncio.create_task(client.post(url, json=LONG | {"stream": stream})) for _ in range(groups)]
        await asyncio.to_thread(wait_started, server, started + groups * 12)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
    await asyncio.to_thread(wait_idle, server)  # also until each candidate has ended
    cancelled, completed = (
        server.metric("darts_groups_total", outcome=outcome) - count
        for outcome, count in zip(outcomes, before, strict=True)
    )
    return cancelled, completed


@pytest.mark.parametrize(
    ("groups", "stream"), [(64, False), pytest.param(64, True, marks=pytest.mark.nightly), (1, False)]
)
async def test_groups_of_a_client_that_disconnects_are_cancelled(server: Server, groups: int, stream: bool) -> None:
    for _ in range(5):  # on a busy machine some groups complete before the client disconnects
        generated = server.metric("darts_tokens_total", kind="generated")
        cancelled, completed = await disconnect(server, groups, stream)
        assert cancelled + completed == groups
        if not completed:
            break
    assert completed == 0
    generated = server.metric("darts_tokens_total", kind="generated") - generated
    assert generated < groups * 12 * LONG["max_tokens"], "candidates were stopped before they finished"
    answer = httpx.post(f"{server.url}/v1/completions", json=LONG | {"ignore_eos": False}, timeout=240)
    assert len(answer.json()["choices"]) == 8
