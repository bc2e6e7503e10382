"""Fill an engine, and time how soon the slot of an aborted sequence is reused."""

import asyncio
import time

from vllm.outputs import RequestOutput

from benchmarks.gpu.bench import Bench
from darts_server.engine.port import RunningCandidate
from darts_server.vllm.prompt_request import PromptRequest

PAUSE_SECONDS = 0.01


class FullEngine:
    """As many sequences as the engine runs at once. Call `fill` first, then `time_aborts`, and `empty` in any case."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._candidates: list[RunningCandidate[RequestOutput]] = []
        self._started = 0

    async def fill(self) -> None:
        """Start sequences and wait until all of them run."""
        # All have the same prompt and share its cache; only the number of running sequences matters here.
        await self._bench.request(0, self._bench.params(1), "shared-prompt")
        self._candidates = [await self._start() for _ in range(self._bench.sizes.capacity)]
        while not all(candidate.tokens() for candidate in self._candidates):
            await asyncio.sleep(PAUSE_SECONDS)

    async def time_aborts(self, count: int) -> tuple[list[float], list[int]]:
        """Return seconds and decode steps from a ``stop()`` to the first token of the request waiting for the slot."""
        seconds, steps = [], []
        for _ in range(count):
            stopped, other, waiting = self._candidates.pop(0), self._candidates[-1], await self._start()
            await self._wait_steps(other, 3)
            if waiting.tokens():
                raise RuntimeError("the engine was not full: the request that should wait is running")
            before, start = other.tokens() or 0, time.perf_counter()
            stopped.stop()
            while not waiting.tokens():
                await asyncio.sleep(0)
            seconds.append(time.perf_counter() - start)
            steps.append((other.tokens() or 0) - before)
            self._candidates.append(waiting)
        return seconds, steps

    def empty(self) -> None:
        for candidate in self._candidates:
            candidate.stop()

    async def _start(self) -> RunningCandidate[RequestOutput]:
        self._started += 1
        params = self._bench.params(self._bench.sizes.model_length - self._bench.sizes.prompt - 1)
        request = PromptRequest(self._bench.prompt(0), params, f"full-{self._started}")
        return await self._bench.port.start(request, 0)

    async def _wait_steps(self, other: RunningCandidate[RequestOutput], count: int) -> None:
        until = (other.tokens() or 0) + count
        while (other.tokens() or 0) < until:
            await asyncio.sleep(0)
