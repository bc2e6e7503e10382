"""An engine that dies, that hangs, and that has too little memory."""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import httpx

from darts_server.demo.server import DARTS, Server, serving
from faults.case import Fault, Outcome, Scene, Where
from faults.others import ANSWER_SECONDS, LONG, others, until_started
from tests.integration.waiting import engine_processes

GROUPS = 16
FEW_SEATS = ("--max-num-seqs", "8")
"""So that no group is complete before the engine is gone."""
WATCHDOG_SECONDS = 5.0
SMALL_CACHE = ("--num-gpu-blocks-override", "30", "--max-num-seqs", "64", "--block-size", "32")
"""For the second server: room for three of its longest sequences."""


async def killed(scene: Scene) -> Outcome:
    """SIGKILL to the engine's process: callers are told, and the server ends with an error."""
    return await _ended(scene, signal.SIGKILL, "killed.log")


async def hung(scene: Scene) -> Outcome:
    """SIGSTOP to it, for longer than the watchdog allows."""
    return await _ended(scene, signal.SIGSTOP, "hung.log", "--engine-watchdog", str(WATCHDOG_SECONDS))


async def small_cache(scene: Scene) -> Outcome:
    """More sequences than the KV cache holds: some are preempted and computed again, and all groups are whole."""
    outcome, server = Outcome(), scene.target
    before = server.metric("vllm:num_preemptions_total")
    async with others(server, outcome), httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
        bodies = [{**LONG, "stream": bool(number % 2)} for number in range(scene.few(64, 6))]
        began = time.monotonic()
        answers = await asyncio.gather(*(client.post(f"{server.url}/v1/completions", json=body) for body in bodies))
        outcome.stall = max(outcome.stall or 0.0, time.monotonic() - began)
        for body, answer in zip(bodies, answers, strict=True):
            whole = "[DONE]" in answer.text if body["stream"] else len(answer.json().get("choices", [])) == LONG["n"]
            outcome.survived += whole
            outcome.lost += not whole
    outcome.injected = int(server.metric("vllm:num_preemptions_total") - before)
    outcome.expect(outcome.injected > 0, "nothing was preempted: the cache was not too small")
    return outcome


async def _ended(scene: Scene, by: signal.Signals, log: str, *flags: str) -> Outcome:
    outcome = Outcome(injected=1)
    with serving(DARTS, scene.folder / log, *FEW_SEATS, *flags) as server:
        async with httpx.AsyncClient(timeout=ANSWER_SECONDS, limits=httpx.Limits(max_connections=None)) as client:
            bodies = [{**LONG, "stream": bool(number % 2)} for number in range(GROUPS)]
            asking = [asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body)) for body in bodies]
            await until_started(server, 6 * GROUPS)
            engines = engine_processes(server)
            for engine in engines:
                os.kill(engine, by)
            began = time.monotonic()
            for answer in await asyncio.gather(*asking, return_exceptions=True):
                told = isinstance(answer, httpx.Response) and (answer.status_code >= 500 or '"error"' in answer.text)
                outcome.survived += told
                outcome.lost += not told
            outcome.stall = time.monotonic() - began
        await _gone(server, engines, outcome)
    return outcome


async def _gone(server: Server, engines: list[int], outcome: Outcome) -> None:
    code = await asyncio.to_thread(server.process.wait, ANSWER_SECONDS)
    outcome.expect(code not in (0, None), f"exit code {code}: {server.log_tail()}")
    outcome.expect(await _holds(lambda: not any(map(_runs, engines))), "the engine's process is still there")


async def _holds(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > seconds:
            return False
        await asyncio.sleep(0.1)
    return True


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


FAULTS = [
    Fault("small-cache", "more sequences than the KV cache holds", Where.SECOND, small_cache),
    Fault("engine-killed", "SIGKILL to the engine", Where.OWN, killed),
    Fault("engine-hung", f"SIGSTOP to the engine, watchdog of {WATCHDOG_SECONDS:.0f} s", Where.OWN, hung),
]
