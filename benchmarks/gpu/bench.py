"""One engine, and what the parts of the benchmark do with it."""

import asyncio
import random
import resource
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.gpu.models import UNKNOWN, Shape
from benchmarks.gpu.policies import lots
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.steplog import StepLog
from benchmarks.gpu.traced import Lengths, TracedEngine
from benchmarks.gpu.watched import RepeatableRollouts, WatchedRollouts
from darts_server.policy.latency.curve import LatencyCurve
from darts_server.policy.shaping import Shaping
from darts_server.rollout.learned.documents import DocumentStore
from darts_server.rollout.learned.latency import Latency
from darts_server.rollout.observers.base import GroupObserver
from darts_server.rollout.plan import OFF, Limits
from darts_server.store import Store
from darts_server.vllm.engine import VllmPort, VllmRollouts
from darts_server.vllm.llm import ShapingLLM

LIMITS = Limits(1024)
QUIET_SECONDS = 20.0
"""Until everything that was stopped must have ended."""


class Bench:
    """A running engine. ``curve``: its step times by batch size, once a part has measured them."""

    def __init__(self, shape: Shape, sizes: Sizes, logprobs: bool, seed: int) -> None:
        self.shape = shape
        self.sizes = sizes
        self.logprobs = logprobs
        self.llm: ShapingLLM
        self.port: VllmPort
        self.log = StepLog()
        self.curve: LatencyCurve | None = None
        self._seed = seed
        self._stores: list[Store] = []
        self._listening: WatchedRollouts
        self._prompts: dict[int, Any] = {}

    # --- the engine ---------------------------------------------------------

    def wire(self, port: VllmPort) -> VllmRollouts:
        """What the engine tells of its steps from its start to its end; it shapes nothing."""
        self.port = port
        store = self.empty_store()
        listening = WatchedRollouts(port, {}, OFF, LIMITS, store, latency=Latency(store, port.capacity))
        listening.log = self.log
        self._listening = listening
        return listening

    def empty_store(self) -> Store:
        """Open as long as the engine runs: what was learned is written a while after it was."""
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
        observers: Sequence[GroupObserver],
    ) -> VllmRollouts:
        """Have the engine shape so from now on, with lengths from a trace."""
        port = TracedEngine(self.port, lengths)
        rollouts = RepeatableRollouts(port, policies, OFF, LIMITS, documents, observers)
        rollouts.lots = lambda group_id: lots(number_of(group_id))
        self.llm.rollouts = rollouts
        self._listening.learning = True
        return rollouts

    def shape_nothing(self, *, plain: bool = False) -> None:
        """Every request passes our code (policy ``off``) and goes to the engine as it is; ``plain``: without ours."""
        self.llm.rollouts = None if plain else self._listening
        self._listening.learning = not plain

    async def quiet(self) -> None:
        """Wait until nothing runs, and forget cached prompts, so that all that comes starts alike.

        Raises:
            TimeoutError: something still runs, though it was told to stop.
        """
        running = self.llm.output_processor.request_states
        async with asyncio.timeout(QUIET_SECONDS):
            if running:
                await asyncio.sleep(0.1)  # for what has ended, or was stopped, and has not been heard of
                await AsyncLLM.abort(self.llm, list(running), internal=True)
            while running or not await self.llm.reset_prefix_cache():
                await asyncio.sleep(0.05)

    def output_tokens(self) -> list[int]:
        """Tokens that each unfinished request has generated; 0 for one that waits."""
        states = self.llm.output_processor.request_states.values()
        return [state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None]

    # --- requests -----------------------------------------------------------

    def prompt(self, number: int) -> Any:
        """Prompt ``number``, random tokens, as vLLM's routes hand it to ``generate()``."""
        if number not in self._prompts:
            rng = random.Random(self._seed * 1_000_003 + number)
            tokens = [rng.randrange(UNKNOWN + 1, self.shape.vocabulary) for _ in range(self.sizes.prompt)]
            parsed = parse_model_prompt(self.llm.model_config, {"prompt_token_ids": tokens})
            renderer = self.llm.renderer
            (self._prompts[number],) = renderer.render_cmpl([parsed], renderer.default_cmpl_tok_params)
        return self._prompts[number]

    def params(self, max_tokens: int, n: int = 1, **extra: str) -> SamplingParams:
        """Of a request that does not stream and ends at ``max_tokens``; ``extra``: of shaping."""
        return SamplingParams(
            n=n,
            temperature=1.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=0 if self.logprobs else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=dict(extra) or None,
        )

    async def ask(self, prompt: int, params: SamplingParams, name: str, *, plain: bool = False) -> RequestOutput:
        """The final output of a request; ``plain``: of vLLM's own ``generate()``."""
        generate = super(ShapingLLM, self.llm).generate if plain else self.llm.generate
        outputs = [output async for output in generate(self.prompt(prompt), params, name)]
        return outputs[-1]


def number_of(request_id: str) -> int:
    """The number of its prompt, with which the name of every request ends."""
    return int(request_id.rsplit("-", 1)[1])


async def all_of(requests: Iterable[Any], seconds: float) -> list[RequestOutput]:
    """Outputs of all, in order.

    Raises:
        TimeoutError: they took longer than ``seconds``; they are stopped.
    """
    async with asyncio.timeout(seconds):
        return list(await asyncio.gather(*requests))


def cpu_seconds() -> float:
    """That this process, the API process, has used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
