"""Fill an engine; time polls of all candidates, and how soon the slot of an aborted one is reused."""

import asyncio
import time

from vllm.outputs import RequestOutput

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.policies import SIZE
from darts_server.engine.port import RunningCandidate
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, Tail
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec
from darts_server.types import FinishReason, RequestOptions
from darts_server.vllm.prompt_request import PromptRequest

SHORT_TOKENS = 8
"""Length of those candidates of a group that finish early."""
POLLS = 30
PAUSE_SECONDS = 0.01
"""Between two polls, so that the engine's outputs are processed meanwhile."""
POLICY = "full"


class FullEngine:
    """Groups of which M candidates have finished and M are running, each with an alarm at a distant deadline.

    Call `fill` first, then `time_polls` and `time_aborts`, and `empty` in any case.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._long = bench.sizes.model_length - bench.sizes.prompt - 1
        self._runs: list[GroupRun[PromptRequest, RequestOutput]] = []
        self._single: list[RunningCandidate[RequestOutput]] = []
        self._started = 0

    @property
    def groups(self) -> int:
        return self._bench.sizes.capacity // SIZE

    async def fill(self) -> None:
        """Start groups and wait until the engine runs as many sequences as it can."""
        bench = self._bench
        distant = Deadline(floor=self._long, exploration=0.0)
        policies = {POLICY: Shaping(redundancy=2.0, tail=Tail.LONGEST, deadline=distant)}
        rollouts = bench.shape_with(policies, bench.empty_store(), self._length, [])
        plan = rollouts.plan(SIZE, RequestOptions(policy=POLICY))
        assert plan is not None
        # All groups have the same prompt and share its cache; only the number of running sequences matters here.
        await bench.request(0, bench.params(1), "shared-prompt")
        allocations = await asyncio.gather(*(rollouts.allocator.allocate(plan, "prompt") for _ in range(self.groups)))
        for i, allocation in enumerate(allocations):
            request = PromptRequest(bench.prompt(0), bench.params(self._long, SIZE), f"{POLICY}-{i}")
            spec = GroupSpec.of_plan(plan, request, request.request_id)
            self._runs.append(rollouts.start(spec, plan, allocation))
        await self._wait_until_running(self.groups * SIZE)

    async def time_polls(self) -> list[float]:
        """Return the seconds of each of some polls of all groups."""
        seconds = []
        for _ in range(POLLS):
            await asyncio.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            for run in self._runs:
                run.poll()
            seconds.append(time.perf_counter() - start)
        return seconds

    async def time_aborts(self, count: int) -> tuple[list[float], list[int]]:
        """Return seconds and decode steps from a ``stop()`` to the first token of the request waiting for the slot."""
        self._runs.pop().cancel()
        self._single = [await self._start() for _ in range(SIZE)]
        await self._wait_until_running(self.groups * SIZE)
        seconds, steps = [], []
        for _ in range(count):
            stopped, other, waiting = self._single.pop(0), self._single[-1], await self._start()
            await self._wait_steps(other, 3)
            if waiting.tokens():
                raise RuntimeError("the engine was not full: the request that should wait is running")
            before, start = other.tokens() or 0, time.perf_counter()
            stopped.stop()
            while not waiting.tokens():
                await asyncio.sleep(0)
            seconds.append(time.perf_counter() - start)
            steps.append((other.tokens() or 0) - before)
            self._single.append(waiting)
        return seconds, steps

    def empty(self) -> None:
        for run in self._runs:
            run.cancel()
        for single in self._single:
            single.stop()

    def _length(self, _: str, index: int) -> tuple[int, FinishReason]:
        return (SHORT_TOKENS if index < SIZE else self._long), FinishReason.STOP

    async def _start(self) -> RunningCandidate[RequestOutput]:
        self._started += 1
        params = self._bench.params(self._long)
        request = PromptRequest(self._bench.prompt(0), params, f"single-{self._started}")
        return await self._bench.port.start(request, 0)

    async def _wait_until_running(self, wanted: int) -> None:
        while True:
            counts = self._bench.output_tokens()
            if len(counts) == wanted and all(counts):
                return
            await asyncio.sleep(PAUSE_SECONDS)

    async def _wait_steps(self, other: RunningCandidate[RequestOutput], count: int) -> None:
        until = (other.tokens() or 0) + count
        while (other.tokens() or 0) < until:
            await asyncio.sleep(0)
