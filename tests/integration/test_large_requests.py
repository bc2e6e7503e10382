"""The largest requests that are allowed: whoever else calls the server is answered all the while."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from darts_server.demo.server import Server
from faults.stopwatch import Stopwatch
from tests.integration.waiting import wait_idle, wait_started

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

MAX_STALL = 5.0
"""Seconds. Each of these requests used to stop the event loop for twenty."""


@asynccontextmanager
async def asking_for_health(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """Ask for the server's health until the block ends, and require each answer within `MAX_STALL` seconds.

    Time in which the server had no processor, because the machine is busy with something else, does not count.
    """
    slowest = 0.0

    async def ask(client: httpx.AsyncClient) -> None:
        nonlocal slowest
        threads = {server.process.pid, threading.get_native_id()}
        while True:
            took = Stopwatch(threads)
            (await client.get("/health")).raise_for_status()
            slowest = max(slowest, took.seconds())
            await asyncio.sleep(0.02)

    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        asking = asyncio.create_task(ask(client))
        try:
            yield client
            await asyncio.sleep(0.1)
            assert not asking.done(), "a call of /health failed"
        finally:
            asking.cancel()
    assert slowest < MAX_STALL


async def test_a_group_of_the_largest_size_does_not_hold_up_others(server: Server) -> None:
    body = {"model": "tiny", "prompt": "11+1=", "n": 1024, "max_tokens": 1}
    async with asking_for_health(server) as client:
        answer = await client.post("/v1/completions", json=body)
    assert len(answer.raise_for_status().json()["choices"]) == 1024


async def test_a_large_batch_starts_and_is_cancelled_without_holding_up_others(server: Server) -> None:
    body = {"prompts": [{"text": "11+1="}] * 600, "group_size": 64, "sampling": {"max_tokens": 300}}
    async with asking_for_health(server) as client:
        before = await asyncio.to_thread(server.metric, "darts_candidates_started_total")
        posting = asyncio.create_task(client.post("/darts/v1/rollouts", json=body))
        await asyncio.to_thread(wait_started, server, before + 1)
        await asyncio.sleep(3)  # many more start, and run
        assert not posting.done()
        assert await asyncio.to_thread(server.busy)
        posting.cancel()
        await asyncio.to_thread(wait_idle, server, 180)
