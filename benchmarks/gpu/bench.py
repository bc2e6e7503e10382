"""One running engine, the sizes of what is measured on it, and what the parts of the benchmark do with it."""

import asyncio
import gc
import random
import resource
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.gpu.models import UNKNOWN, Shape
from benchmarks.gpu.plan import tail_seed
from benchmarks.gpu.traced import Lengths, RepeatableRollouts, TracedEngine
from darts_server.estimates.latency import LatencyCurve
from darts_server.http.options import merge_options
from darts_server.policy.shaping import Shaping
from darts_server.records import GroupRecord
from darts_server.rollout.learned.documents import DocumentStore
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.plan import Limits, Planner
from darts_server.rollout.rollouts import Rollouts
from darts_server.store import Store
from darts_server.types import OFF
from darts_server.vllm.api import launch
from darts_server.vllm.api.engine import VllmPort, VllmRollouts
from darts_server.vllm.api.launch import RunningEngine
from darts_server.vllm.api.llm import ShapingLLM
from darts_server.vllm.flags import parse
from darts_server.vllm.requests.held import StepListener
from darts_server.vllm.requests.prompt_renderer import VllmPromptRenderer

T = TypeVar("T")
LIMITS = Limits(1024)
DRAIN_SECONDS = 20.0
"""How long stopped requests may take to end."""
Step = tuple[float, int, float]
"""A decode step: when it was reported (``time.perf_counter()``), the running sequences, and its seconds."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements, for a GPU and for a dry run."""

    prompt: int
    capacity: int  # sequences that the engine runs at once
    model_length: int  # the maximum tokens of a sequence
    batches: tuple[int, ...]  # batch sizes to time, each for `step_tokens` tokens
    contexts: tuple[tuple[int, int], ...]  # batch sizes to time with a longer prompt, of so many tokens
    step_tokens: int
    divisors: tuple[int, ...]  # what lengths may be divided by to fit the time
    load_prompts: int  # of the load whose throughput is compared, with `load_tokens`, in so many `rounds`
    load_tokens: int
    rounds: int
    aborts: int  # to time
    updates: int  # the most weight updates by each path
    patience: float  # seconds before which no rollout is stopped: other load on the machine may be most of its time
    flags: tuple[str, ...]  # more vLLM flags


GPU = Sizes(
    prompt=200,
    capacity=2048,
    model_length=8448,
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    contexts=((64, 2048), (256, 1024), (16, 8192), (64, 8192)),
    step_tokens=96,
    divisors=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
    load_prompts=64,
    load_tokens=64,
    rounds=3,
    aborts=10,
    updates=3,
    patience=10.0,
    flags=("--dtype", "bfloat16"),
)
DRY = Sizes(
    prompt=24,
    capacity=128,
    model_length=1024,
    batches=(1, 2, 4, 8, 16, 32, 64),
    contexts=((4, 64),),
    step_tokens=24,
    divisors=(64,),
    load_prompts=4,
    load_tokens=16,
    rounds=2,
    aborts=3,
    updates=2,
    patience=300.0,
    flags=("--dtype", "float32", "--enforce-eager"),
)


class Bench:
    """A running engine. ``curve``: its step times by batch size, once a part has measured them."""

    def __init__(self, shape: Shape, sizes: Sizes, logprobs: bool, seed: int) -> None:
        self.shape = shape
        self.sizes = sizes
        self.logprobs = logprobs
        self.llm: ShapingLLM
        self.port: VllmPort
        self.renderer: VllmPromptRenderer
        self.steps: list[Step] = []
        self.curve: LatencyCurve | None = None
        self.traced: TracedEngine | None = None
        """What runs candidates since `shape_with`."""
        self._seed = seed
        self.stores: list[Store] = []
        self._running: RunningEngine
        self._unshaped: VllmRollouts
        self._prompts: dict[tuple[int, int], Any] = {}

    # --- the engine ---------------------------------------------------------

    def attach(self, running: RunningEngine) -> None:
        """Log the engine's steps as long as it runs; shape nothing yet."""
        self.llm, self.port, self._running = running.llm, running.port, running
        self.renderer = running.renderer
        learned = Statistics(self.empty_store(), running.port.capacity)
        self._unshaped = Rollouts(running.port, Planner({}, OFF, LIMITS), learned)
        self.shape_nothing()

    def empty_store(self) -> Store:
        """Return a new store. It stays open as long as the engine runs, since learned state is written with a delay."""
        self.stores.append(Store())
        return self.stores[-1]

    def shape_with(
        self,
        policies: Mapping[str, Shaping],
        documents: DocumentStore,
        lengths: Lengths,
        groups: list[GroupRecord],
    ) -> VllmRollouts:
        """Shape with these policies from now on, with lengths from a trace; ``groups`` gets their records."""
        self.traced = TracedEngine(self.port, lengths)
        learned = Statistics(documents, self.port.capacity)
        rollouts = RepeatableRollouts(cast(VllmPort, self.traced), Planner(policies, OFF, LIMITS), learned)
        rollouts.observers.group_ended.add(groups.append)
        rollouts.tail_seed = lambda group_id: tail_seed(prompt_number(group_id))
        self._running.serve_groups(rollouts, merge_options)
        self._log_steps(learn=rollouts.statistics.latency.observe)
        return rollouts

    def shape_nothing(self, *, plain: bool = False) -> None:
        """Pass every request through our code unshaped (policy ``off``); ``plain``: bypass our code."""
        self._running.serve_groups(self._unshaped, merge_options)
        if plain:
            self.llm.rollouts = None
        self._log_steps(learn=None if plain else self._unshaped.statistics.latency.observe)

    def _log_steps(self, learn: StepListener | None) -> None:
        def log(sequences: int, seconds: float, started: int) -> None:
            if learn is not None:
                learn(sequences, seconds, started)
            if not started:
                self.steps.append((time.perf_counter(), sequences, seconds))

        self.llm.held_requests.on_step = log

    def steps_between(self, start: float, end: float) -> list[Step]:
        return [step for step in self.steps if start <= step[0] <= end]

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


@asynccontextmanager
async def start_engine(bench: Bench, folder: Path, flags: Sequence[str]) -> AsyncIterator[Bench]:
    """Start the engine of ``bench``, on a model with dummy weights that is written into ``folder``."""
    sizes = bench.sizes
    args = parse(
        [
            *(str(bench.shape.write(folder)), "--served-model-name", bench.shape.name, "--load-format", "dummy"),
            *("--max-model-len", str(sizes.model_length), "--max-num-seqs", str(sizes.capacity)),
            *sizes.flags,
            *flags,
        ]
    )
    try:
        async with launch.start_engine(args) as running:
            bench.attach(running)
            # As vLLM's server does before it serves: otherwise a garbage collection now and then walks through
            # everything imported, which takes some tenths of a second.
            gc.collect()
            gc.freeze()
            yield bench
    finally:
        for store in bench.stores:
            store.close()


def prompt_number(request_id: str) -> int:
    """Return the number of the prompt, which every request id ends with."""
    return int(request_id.rsplit("-", 1)[1])


async def gather_within(requests: Iterable[Coroutine[Any, Any, T]], seconds: float) -> list[T]:
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
