"""The engine that shapes: vLLM's ``AsyncLLM`` whose ``generate()`` turns n > 1 into a group."""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.engine.gate import Gate
from darts_server.rollout.assembly import Joining
from darts_server.rollout.plan import Plan
from darts_server.types import RequestOptions
from darts_server.vllm.engine import PromptRequest, VllmRollouts, in_vllms_words, lots_of, prompt_key_of, sameness
from darts_server.vllm.outputs import as_choice, as_one
from darts_server.vllm.platform import refuse_what_would_crash
from darts_server.vllm.requests import current_options, merged, note_named_prompt, note_shaped
from darts_server.weights.updates import Updates

# Those of generate()'s options that vLLM may refuse.
CHECKED_OPTIONS = ("lora_request", "data_parallel_rank")


def take_turns(engine_core: Any) -> None:
    """Have everyone else on the event loop go on between two of the engine's outputs.

    A queue that is not empty does not make its reader wait. So an API process slower than its engine works through all
    that has piled up in one turn, while more piles up: each turn is longer than the one before, and nothing is stopped,
    started or answered meanwhile.
    """
    get_output = engine_core.get_output_async

    async def get_output_after_the_others() -> Any:
        await asyncio.sleep(0)
        return await get_output()

    engine_core.get_output_async = get_output_after_the_others


class ShapingLLM(AsyncLLM):
    """``rollouts`` is set once, after construction; until then nothing is shaped. So are ``gate`` and ``updates``."""

    rollouts: VllmRollouts | None = None
    updates: Updates | None = None
    weight_version: int = 0
    died: bool | None = None
    """Whether the engine was dead already when it was first told to shut down; ``None`` before that."""

    @cached_property
    def gate(self) -> Gate:
        """What every request passes."""
        return Gate()

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM's, but a request with n > 1 may be served as a shaped group, and one with n = 1 as part of one.

        Bad input raises here and not at the first iteration: callers that stream have sent no status yet.

        Raises:
            InvalidRequest
        """
        refuse_what_would_crash(self.vllm_config, sampling_params)
        options = merged(current_options(), sampling_params.extra_args or {})
        plan = self._plan(prompt, sampling_params, options)
        if plan is None:
            return self._unshaped(prompt, sampling_params, request_id, more)
        request = PromptRequest(prompt, sampling_params, request_id, more)
        self.check(request)
        key = self._key(request, options)
        if plan.single:
            return self._joined(plan, request, key, options.group_id)
        note_shaped(request_id)
        return self._shaped(plan, request, key)

    def check(self, request: PromptRequest) -> None:
        """Have vLLM look at the prompt now.

        By itself it does so when a prompt is added to the engine. For the second prompt of a request that is after the
        first one was started, and for a stream after the status was sent.
        """
        rendered = isinstance(request.prompt, dict) and "type" in request.prompt
        if rendered:
            known = {name: request.options[name] for name in CHECKED_OPTIONS if name in request.options}
            self.input_processor.process_inputs(
                request.request_id, request.prompt, request.params, self._supported_tasks, **known
            )

    def _plan(self, prompt: Any, params: SamplingParams, options: RequestOptions) -> Plan | None:
        if self.rollouts is None or isinstance(prompt, EngineCoreRequest | AsyncGenerator):
            return None
        return self.rollouts.plan(params.n, options)

    @staticmethod
    def _key(request: PromptRequest, options: RequestOptions) -> str:
        own = prompt_key_of(request)
        if options.prompt_key is None:
            return own
        note_named_prompt(own)
        return options.prompt_key

    async def _unshaped(
        self, prompt: Any, params: SamplingParams, request_id: str, more: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        async with self.gate.held(), aclosing(super().generate(prompt, params, request_id, **more)) as outputs:
            async for output in outputs:
                yield output

    async def _shaped(self, plan: Plan, request: PromptRequest, key: str) -> AsyncGenerator[RequestOutput, None]:
        assert self.rollouts is not None
        # CUMULATIVE is how the token route of 0.26 asks when it does not stream: it keeps the last output alone.
        streaming = request.params.output_kind is RequestOutputKind.DELTA
        lots = lots_of(request)
        async with self.gate.held():
            with in_vllms_words():
                grant = await self.rollouts.allocate(plan, key)
                run = self.rollouts.run(
                    request, plan, grant, group_id=request.request_id, prompt_key=key, lots=lots, early=streaming
                )
                try:
                    if streaming:
                        async for output in self._streamed(request, run.trajectories(), plan.size, lots):
                            yield output
                    else:
                        chosen = {t.index: t.output async for t in run.trajectories()}
                        yield as_one(request.request_id, [chosen[index] for index in sorted(chosen)])
                finally:
                    run.leave()

    async def _joined(
        self, plan: Plan, request: PromptRequest, key: str, name: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        assert self.rollouts is not None
        joining = Joining(
            request, request.request_id, plan, key, f"{plan.policy}/{plan.size}/{name}/{sameness(request)}", name
        )
        # The group it is missing from would wait for it.
        async with self.gate.held(at_once=self.rollouts.awaits(joining)):
            with in_vllms_words():
                output = await self.rollouts.join(joining, note_shaped)
        yield as_choice(request.request_id, output, 0, last=True)

    async def _streamed(
        self, request: PromptRequest, trajectories: Any, size: int, lots: Sequence[int] | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Each trajectory whole, as soon as it is known to belong.

        Choice indices are given out in a shuffled order, or they would tell the length rank.
        """
        indices = random.Random(repr(lots) if lots else None).sample(range(size), size)
        first = True
        async for trajectory in trajectories:
            output = as_choice(request.request_id, trajectory.output, indices.pop(), last=trajectory.last)
            if not first:
                output.prompt_logprobs = None
            first = False
            yield output

    def _run_output_handler(self) -> None:
        if self.output_handler is None:
            take_turns(self.engine_core)
        super()._run_output_handler()  # type: ignore[no-untyped-call]

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """As vLLM's; a request that runs as a group is ended as a whole."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        if not internal and self.rollouts is not None:
            for group_id in ids:
                self.rollouts.abort(group_id)
        await super().abort(ids, internal=internal)

    async def start_weight_update(self) -> None:
        """As vLLM's, but refused while one of ours is under way.

        Raises:
            UpdateRunning, WeightsLost
        """
        if self.updates is not None:
            self.updates.begin_elsewhere()
        await self._ends_an_update(super().start_weight_update(), touched=False)

    async def update_weights(self, *args: Any, **more: Any) -> None:
        await self._ends_an_update(super().update_weights(*args, **more))

    async def finish_weight_update(self, *args: Any, **more: Any) -> None:
        await self._ends_an_update(super().finish_weight_update(*args, **more))
        self.weight_version += 1
        if self.updates is not None:
            self.updates.end_elsewhere(self.weight_version)

    async def _ends_an_update(self, step: Awaitable[None], *, touched: bool = True) -> None:
        """A step of vLLM's own update, which ends it if it fails."""
        try:
            await step
        except Exception:
            if self.updates is not None:
                self.updates.end_elsewhere(None, touched=touched)
            raise

    def shutdown(self, timeout: float | None = None) -> None:
        if self.died is None and hasattr(self, "engine_core"):
            self.died = self.errored
        super().shutdown(timeout=timeout)
