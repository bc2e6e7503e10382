"""An engine that dies, one that hangs, and one with too little memory."""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import httpx

from darts_server.demo.server import DARTS, Server, serving
from faults.bystanders import ANSWER_SECONDS, LONG, bystanders, wait_until_started
from faults.case import Fault, Outcome, Scene, Target
from tests.integration.waiting import engine_processes

GROUPS = 16
FEW_SEQUENCES = ("--max-num-seqs", "8")
"""No group can complete before the engine is gone."""
WATCHDOG_SECONDS = 5.0
SMALL_CACHE = ("--num-gpu-blocks-override", "30", "--max-num-seqs", "64", "--block-size", "32")
"""For the second server: room for three of its longest sequences."""


async def killed(scene: Scene) -> Outcome:
    """Kill the engine's process: callers get an error, and the server exits with one."""
    return await _signal_engine(scene, signal.SIGKILL, "killed.log")


async def hung(scene: Scene) -> Outcome:
    """Suspend the engine's process for longer than the watchdog allows."""
    return await _signal_engine(scene, signal.SIGSTOP, "hung.log", "--engine-watchdog", str(WATCHDOG_SECONDS))


async def small_cache(scene: Scene) -> Outcome:
    """Run more sequences than the KV cache holds: some are preempted and recomputed, and all groups are complete."""
    outcome, server = Outcome(), scene.target
    before = server.metric("vllm:num_preemptions_total")
    async with bystanders(server, outcome), httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
        bodies = [{**LONG, "stream": bool(number % 2)} for number in range(scene.count(64, 6))]
        began = time.monotonic()
        answers = await asyncio.gather(*(client.post(f"{server.url}/v1/completions", json=body) for body in bodies))
        outcome.stall = max(outcome.stall or 0.0, time.monotonic() - began)
        for body, answer in zip(bodies, answers, strict=True):
            complete = "[DONE]" in answer.text if body["stream"] else len(answer.json().get("choices", [])) == LONG["n"]
            outcome.survived += complete
            outcome.lost += not complete
    outcome.injected = int(server.metric("vllm:num_preemptions_total") - before)
    outcome.expect(outcome.injected > 0, "nothing was preempted: the cache is too large for this test")
    return outcome


async def _signal_engine(scene: Scene, number: signal.Signals, log: str, *flags: str) -> Outcome:
    outcome = Outcome(injected=1)
    with serving(DARTS, scene.folder / log, *FEW_SEQUENCES, *flags) as server:
        async with httpx.AsyncClient(timeout=ANSWER_SECONDS, limits=httpx.Limits(max_connections=None)) as client:
            bodies = [{**LONG, "stream": bool(number % 2)} for number in range(GROUPS)]
            requests = [asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body)) for body in bodies]
            await wait_until_started(server, 6 * GROUPS)
            engines = engine_processes(server)
            for engine in engines:
                os.kill(engine, number)
            began = time.monotonic()
            for answer in await asyncio.gather(*requests, return_exceptions=True):
                failed = isinstance(answer, httpx.Response) and (answer.status_code >= 500 or '"error"' in answer.text)
                outcome.survived += failed
                outcome.lost += not failed
            outcome.stall = time.monotonic() - began
        await _check_exit(server, engines, outcome)
    return outcome


async def _check_exit(server: Server, engines: list[int], outcome: Outcome) -> None:
    code = await asyncio.to_thread(server.process.wait, ANSWER_SECONDS)
    outcome.expect(code not in (0, None), f"exit code {code}: {server.log_tail()}")
    outcome.expect(await _becomes_true(lambda: not any(map(_is_running, engines))), "the engine is still running")


async def _becomes_true(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return False
        await asyncio.sleep(0.1)
    return True


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


FAULTS = [
    Fault("small-cache", "more sequences than the KV cache holds", Target.SECOND, small_cache),
    Fault("engine-killed", "SIGKILL to the engine", Target.OWN, killed),
    Fault("engine-hung", f"SIGSTOP to the engine, watchdog of {WATCHDOG_SECONDS:.0f} s", Target.OWN, hung),
]
