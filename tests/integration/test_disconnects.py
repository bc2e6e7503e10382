"""Clients that disconnect."""

import asyncio
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.server import Server
from tests.integration.waiting import wait_idle, wait_started

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
# Without the end-of-sequence token no candidate finishes before this limit.
TOKENS = 300
SAMPLING: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "7a-5b*4>", "n": 8, **SAMPLING}
BATCH: dict[str, Any] = {"prompts": [{"text": "7a-5b*4>"}] * 16, "group_size": 8, "sampling": SAMPLING}
COMPLETIONS, ROLLOUTS = "/v1/completions", "/darts/v1/rollouts"


async def disconnect(server: Server, path: str, body: dict[str, Any], count: int, groups: int) -> tuple[float, float]:
    """Send requests and disconnect once all candidates have started; count the cancelled and completed groups."""
    outcomes = ("cancelled", "completed")
    before = [server.metric("darts_groups_total", outcome=outcome) for outcome in outcomes]
    started = server.metric("darts_candidates_started_total")
    async with httpx.AsyncClient(timeout=240, limits=httpx.Limits(max_connections=None)) as client:
        requests = [asyncio.create_task(client.post(server.url + path, json=body)) for _ in range(count)]
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
    ("path", "body", "count"),
    [
        (COMPLETIONS, COMPLETION, 32),
        pytest.param(COMPLETIONS, COMPLETION | {"stream": True}, 32, marks=pytest.mark.nightly),
        (ROLLOUTS, BATCH, 1),
        pytest.param(ROLLOUTS, BATCH | {"stream": "groups"}, 1, marks=pytest.mark.nightly),
    ],
    ids=["requests", "streams", "batch", "streamed batch"],
)
async def test_groups_of_a_client_that_disconnects_are_cancelled(
    server: Server, path: str, body: dict[str, Any], count: int
) -> None:
    groups = count * len(body["prompts"]) if path == ROLLOUTS else count
    for _ in range(5):  # on a busy machine some groups complete before the client disconnects
        generated = server.metric("darts_tokens_total", kind="generated")
        cancelled, completed = await disconnect(server, path, body, count, groups)
        assert cancelled + completed == groups
        if not completed:
            break
    assert completed == 0
    generated = server.metric("darts_tokens_total", kind="generated") - generated
    assert generated < groups * 12 * TOKENS, "candidates were stopped before they finished"
    answer = httpx.post(server.url + COMPLETIONS, json=COMPLETION | {"ignore_eos": False}, timeout=240)
    assert len(answer.json()["choices"]) == 8
