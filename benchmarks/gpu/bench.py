"""One running engine, and what the parts of the benchmark do with it."""

import asyncio
import random
import resource
import time
from collections.abc import Iterable, Mapping
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.gpu.models import UNKNOWN, Shape
from benchmarks.gpu.policies import tail_seed
from benchmarks.gpu.repeatable import RepeatableRollouts
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.steplog import StepLog
from benchmarks.gpu.traced import Lengths, TracedEngine
from darts_server.http.options import merge_options
from darts_server.policy.latency import LatencyCurve
from darts_server.policy.shaping import Shaping
from darts_server.records import GroupRecord
from darts_server.rollout.learned.documents import DocumentStore
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.plan import Limits, Planner
from darts_server.rollout.rollouts import Rollouts
from darts_server.store import Store
from darts_server.types import OFF
from darts_server.vllm.engine import VllmPort, VllmRollouts
from darts_server.vllm.held import StepListener
from darts_server.vllm.launch import RunningEngine
from darts_server.vllm.llm import ShapingLLM
from darts_server.vllm.prompt_renderer import VllmPromptRenderer

LIMITS = Limits(1024)
DRAIN_SECONDS = 20.0
"""How long stopped requests may take to end."""


class Bench:
    """A running engine. ``curve``: its step times by batch size, once a part has measured them."""

    def __init__(self, shape: Shape, sizes: Sizes, logprobs: bool, seed: int) -> None:
        self.shape = shape
        self.sizes = sizes
        self.logprobs = logprobs
        self.llm: ShapingLLM
        self.port: VllmPort
        self.renderer: VllmPromptRenderer
        self.log = StepLog()
        self.curve: LatencyCurve | None = None
        self.traced: TracedEngine | None = None
        """What runs candidates since `shape_with`."""
        self._seed = seed
        self._stores: list[Store] = []
        self._running: RunningEngine
        self._unshaped: VllmRollouts
        self._prompts: dict[tuple[int, int], Any] = {}

    # --- the engine ---------------------------------------------------------

    def attach(self, running: RunningEngine) -> None:
        """Log the engine's steps as long as it runs; shape nothing yet."""
        self.llm, self.port, self._running = running.llm, running.port, running
        self.renderer = running.renderer
        self._unshaped = Rollouts(running.port, Planner({}, OFF, LIMITS), self._statistics(self.empty_store()))
        self.shape_nothing()

    def empty_store(self) -> Store:
        """Return a new store. It stays open as long as the engine runs, since learned state is written with a delay."""
        self._stores.append(Store())
        return self._stores[-1]

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def shape_with(
        self,
        policies: Mapping[str, Shaping],
        documents: DocumentStore,
        lengths: Lengths,
        groups: list[GroupRecord],
    ) -> VllmRollouts:
        """Shape with these policies from now on, with lengths from a trace; ``groups`` gets their records."""
        self.traced = TracedEngine(self.port, lengths)
        rollouts = RepeatableRollouts(self.traced, Planner(policies, OFF, LIMITS), self._statistics(documents))
        rollouts.observers.group_ended.add(groups.append)
        rollouts.tail_seed = lambda group_id: tail_seed(prompt_number(group_id))
        self._running.shape(rollouts, merge_options)
        self._log_steps(learn=rollouts.statistics.latency.observe)
        return rollouts

    def shape_nothing(self, *, plain: bool = False) -> None:
        """Pass every request through our code unshaped (policy ``off``); ``plain``: bypass our code."""
        self._running.shape(self._unshaped, merge_options)
        if plain:
            self.llm.rollouts = None
        self._log_steps(learn=None if plain else self._unshaped.statistics.latency.observe)

    def _statistics(self, documents: DocumentStore) -> Statistics:
        return Statistics(documents, self.port.capacity)

    def _log_steps(self, learn: StepListener | None) -> None:
        def log(sequences: int, seconds: float, started: int) -> None:
            if learn is not None:
                learn(sequences, seconds, started)
            if not started:
                self.log.add(time.perf_counter(), sequences, seconds)

        self.llm.held.on_step = log

    async def drain(self) -> None:
        """Wait until nothing runs, and reset the prefix cache, so that every load starts from the same state.

        Raises:
            TimeoutError: an aborted request is still running.
        """
        running = self.llm.output_processor.request_states
        async with asyncio.timeout(DRAIN_SECONDS):
            if running:
                await asyncio.sleep(0.1)  # finished and stopped requests may not have been reported yet
                await AsyncLLM.abort(self.llm, list(running), internal=True)
            while running or not await self.llm.reset_prefix_cache():
                await asyncio.sleep(0.05)

    def output_tokens(self) -> list[int]:
        """Return the generated tokens of each unfinished request; 0 for a waiting one."""
        states = self.llm.output_processor.request_states.values()
        return [state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None]

    # --- requests -----------------------------------------------------------

    def prompt(self, number: int, length: int | None = None) -> Any:
        """Return prompt ``number``: random tokens, in the form that vLLM's routes pass to ``generate()``."""
        key = number, length or self.sizes.prompt
        if key not in self._prompts:
            rng = random.Random(self._seed * 1_000_003 + number)
            tokens = rng.choices(range(UNKNOWN + 1, self.shape.vocabulary), k=key[1])
            parsed = parse_model_prompt(self.llm.model_config, {"prompt_token_ids": tokens})
            renderer = self.llm.renderer
            (self._prompts[key],) = renderer.render_cmpl([parsed], renderer.default_cmpl_tok_params)
        return self._prompts[key]

    def params(self, max_tokens: int, n: int = 1, **extra: str) -> SamplingParams:
        """Make parameters of a request that does not stream and ends at ``max_tokens``; ``extra``: for shaping."""
        return SamplingParams(
            n=n,
            temperature=1.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=0 if self.logprobs else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=dict(extra) or None,
        )

    async def request(
        self, prompt: int, params: SamplingParams, name: str, *, plain: bool = False, length: int | None = None
    ) -> RequestOutput:
        """Run a request and return its final output; ``plain``: by vLLM's own ``generate()``."""
        generate = super(ShapingLLM, self.llm).generate if plain else self.llm.generate
        outputs = [output async for output in generate(self.prompt(prompt, length), params, name)]
        return outputs[-1]


def prompt_number(request_id: str) -> int:
    """Return the number of the prompt, which every request id ends with."""
    return int(request_id.rsplit("-", 1)[1])


async def gather_within(requests: Iterable[Any], seconds: float) -> list[RequestOutput]:
    """Run all requests and return their outputs in order.

    Raises:
        TimeoutError: they took longer than ``seconds``; they are cancelled.
    """
    async with asyncio.timeout(seconds):
        return list(await asyncio.gather(*requests))


def cpu_seconds() -> float:
    """Return the CPU time of this process, the API process, so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
