"""Callers who have nothing to do with a fault, and what must hold when it is over."""

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
"""The model never ends it by itself, so that its groups run for a while."""
ANSWER_SECONDS = 120.0
REST_SECONDS = 30.0


@asynccontextmanager
async def others(server: Server, outcome: Outcome, callers: int = 3) -> AsyncIterator[None]:
    """While the block runs, callers ask for one group after the other; each is counted as survived or lost.

    They had at least one each when it ends.
    """
    over = asyncio.Event()

    async def ask(client: httpx.AsyncClient) -> None:
        while True:
            began = time.monotonic()
            whole = await is_answered(client, server)
            outcome.stall = max(outcome.stall or 0.0, time.monotonic() - began)
            outcome.survived += whole
            outcome.lost += not whole
            if over.is_set():
                return

    async with httpx.AsyncClient(timeout=ANSWER_SECONDS, limits=httpx.Limits(max_connections=None)) as client:
        asking = [asyncio.create_task(ask(client)) for _ in range(callers)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*asking)


async def is_answered(client: httpx.AsyncClient, server: Server) -> bool:
    """Whether a group comes back whole."""
    try:
        answer = await client.post(f"{server.url}/darts/v1/rollouts", json=GROUP)
    except httpx.TransportError:
        return False
    if answer.status_code != httpx.codes.OK:
        return False
    return [len(group["trajectories"]) for group in answer.json()["groups"]] == [GROUP["group_size"]]


async def at_rest(server: Server, outcome: Outcome) -> None:
    """Nothing is left on the engine, and every candidate was selected or discarded for a reason."""
    began = time.monotonic()
    while await asyncio.to_thread(server.busy) and time.monotonic() - began < REST_SECONDS:
        await asyncio.sleep(0.05)
    left = await asyncio.to_thread(server.busy)
    outcome.expect(left == 0, f"{left:.0f} requests still on the engine after {REST_SECONDS:.0f} s")
    started = await asyncio.to_thread(server.metric, "darts_candidates_started_total")
    ended = await asyncio.to_thread(server.metric, "darts_candidates_ended_total")
    outcome.expect(started == ended, f"{started:.0f} candidates were started, {ended:.0f} ended")


async def until_started(server: Server, candidates: float) -> None:
    """Wait until so many candidates were started in all, or for long enough."""
    began = time.monotonic()
    while await asyncio.to_thread(server.metric, "darts_candidates_started_total") < candidates:
        if time.monotonic() - began > ANSWER_SECONDS:
            return
        await asyncio.sleep(0.02)
