"""An engine that is full: what looking at every candidate costs, and how soon an aborted one's slot is taken."""

import asyncio
import time

from vllm.outputs import RequestOutput

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.policies import SIZE
from darts_server.engine.port import Running
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, Tail
from darts_server.rollout.run import GroupRun
from darts_server.types import FinishReason, RequestOptions
from darts_server.vllm.engine import PromptRequest

SHORT_TOKENS = 8
"""So many tokens have the candidates of a group that end at once."""
PEEKS = 30
PAUSE_SECONDS = 0.01
"""Between two peeks, so that the engine's outputs are taken meanwhile."""
POLICY = "full"


class Full:
    """Groups of which M have ended and M run on: each of these has an alarm, at a deadline far away.

    `fill` it first, then look at `peeks` and `aborts`, and `empty` it whatever came of that.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._long = bench.sizes.model_length - bench.sizes.prompt - 1
        self._runs: list[GroupRun[PromptRequest, RequestOutput]] = []
        self._single: list[Running[RequestOutput]] = []
        self._started = 0

    @property
    def groups(self) -> int:
        return self._bench.sizes.capacity // SIZE

    async def fill(self) -> None:
        """Start groups and wait until as many sequences run as the engine takes, however long that is."""
        bench = self._bench
        far_away = Deadline(floor=self._long, exploration=0.0)
        policies = {POLICY: Shaping(redundancy=2.0, tail=Tail.LONGEST, deadline=far_away)}
        rollouts = bench.shape_with(policies, bench.empty_store(), self._length, [])
        plan = rollouts.plan(SIZE, RequestOptions(policy=POLICY))
        assert plan is not None
        # Of one prompt, that its cache is shared: what counts here is how many run.
        await bench.ask(0, bench.params(1), "prompt-of-all")
        grants = await asyncio.gather(*(rollouts.allocate(plan, "prompt") for _ in range(self.groups)))
        for i, grant in enumerate(grants):
            request = PromptRequest(bench.prompt(0), bench.params(self._long, SIZE), f"{POLICY}-{i}")
            self._runs.append(rollouts.run(request, plan, grant, group_id=request.request_id))
        await self._until_running(self.groups * SIZE)

    async def peeks(self) -> list[float]:
        """Seconds of each of some rounds of peeking at all groups."""
        seconds = []
        for _ in range(PEEKS):
            await asyncio.sleep(PAUSE_SECONDS)
            began = time.perf_counter()
            for run in self._runs:
                run.peek()
            seconds.append(time.perf_counter() - began)
        return seconds

    async def aborts(self, count: int) -> tuple[list[float], list[int]]:
        """Seconds and decode steps from a ``stop()`` to the first token of the request that waited for the slot."""
        self._runs.pop().close()
        self._single = [await self._start() for _ in range(SIZE)]
        await self._until_running(self.groups * SIZE)
        seconds, steps = [], []
        for _ in range(count):
            stopped, beside, waiting = self._single.pop(0), self._single[-1], await self._start()
            await self._steps(beside, 3)
            if waiting.tokens():
                raise RuntimeError("the engine was not full: the request that should wait runs")
            before, began = beside.tokens() or 0, time.perf_counter()
            stopped.stop()
            while not waiting.tokens():
                await asyncio.sleep(0)
            seconds.append(time.perf_counter() - began)
            steps.append((beside.tokens() or 0) - before)
            self._single.append(waiting)
        return seconds, steps

    def empty(self) -> None:
        for run in self._runs:
            run.close()
        for single in self._single:
            single.stop()

    def _length(self, _: str, index: int) -> tuple[int, FinishReason]:
        return (SHORT_TOKENS if index < SIZE else self._long), FinishReason.STOP

    async def _start(self) -> Running[RequestOutput]:
        self._started += 1
        params = self._bench.params(self._long)
        request = PromptRequest(self._bench.prompt(0), params, f"single-{self._started}")
        return await self._bench.port.start(request, 0)

    async def _until_running(self, wanted: int) -> None:
        while True:
            counts = self._bench.output_tokens()
            if len(counts) == wanted and all(counts):
                return
            await asyncio.sleep(PAUSE_SECONDS)

    async def _steps(self, beside: Running[RequestOutput], count: int) -> None:
        until = (beside.tokens() or 0) + count
        while (beside.tokens() or 0) < until:
            await asyncio.sleep(0)
