"""Callers that a fault must not affect, and the checks after it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from darts_server.demo.server import Server
from faults.case import PROMPT, Outcome

GROUP: dict[str, Any] = {"prompts": [{"text": PROMPT}], "group_size": 4, "sampling": {"max_tokens": 60}}
LONG: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "n": 4, "max_tokens": 280, "ignore_eos": True}
"""It runs to its token limit, so that groups are still running when the fault is injected."""
ANSWER_SECONDS = 120.0
IDLE_SECONDS = 60.0


@asynccontextmanager
async def bystanders(server: Server, outcome: Outcome, callers: int = 3) -> AsyncIterator[None]:
    """Let callers request one group after the other while the block runs; count each group as survived or lost.

    Every caller requests at least one group.
    """
    finished = asyncio.Event()

    async def request_groups(client: httpx.AsyncClient) -> None:
        while True:
            began = time.monotonic()
            complete = await get_group(client, server)
            outcome.stall = max(outcome.stall or 0.0, time.monotonic() - began)
            outcome.survived += complete
            outcome.lost += not complete
            if finished.is_set():
                return

    async with httpx.AsyncClient(timeout=ANSWER_SECONDS, limits=httpx.Limits(max_connections=None)) as client:
        requests = [asyncio.create_task(request_groups(client)) for _ in range(callers)]
        try:
            yield
        finally:
            finished.set()
            await asyncio.gather(*requests)


async def get_group(client: httpx.AsyncClient, server: Server) -> bool:
    """Request a group; return whether it came back complete."""
    try:
        answer = await client.post(f"{server.url}/darts/v1/rollouts", json=GROUP, timeout=ANSWER_SECONDS)
    except httpx.TransportError:
        return False
    if answer.status_code != httpx.codes.OK:
        return False
    return [len(group["trajectories"]) for group in answer.json()["groups"]] == [GROUP["group_size"]]


async def check_idle(server: Server, outcome: Outcome) -> None:
    """Check that the engine becomes idle and that every started candidate was selected or discarded."""
    began = time.monotonic()
    while True:
        remaining = await asyncio.to_thread(server.busy)
        started = await asyncio.to_thread(server.metric, "darts_candidates_started_total")
        ended = await asyncio.to_thread(server.metric, "darts_candidates_ended_total")
        if (remaining == 0 and started == ended) or time.monotonic() - began > IDLE_SECONDS:
            break
        await asyncio.sleep(0.05)
    outcome.expect(remaining == 0, f"{remaining:.0f} requests still on the engine after {IDLE_SECONDS:.0f} s")
    outcome.expect(started == ended, f"{started:.0f} candidates were started, {ended:.0f} ended")


async def wait_until_started(server: Server, candidates: float) -> None:
    """Wait until the server has started this many candidates in total, or until the timeout."""
    began = time.monotonic()
    while await asyncio.to_thread(server.metric, "darts_candidates_started_total") < candidates:
        if time.monotonic() - began > ANSWER_SECONDS:
            return
        await asyncio.sleep(0.02)
