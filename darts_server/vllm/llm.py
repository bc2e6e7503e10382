"""The engine that shapes: vLLM's ``AsyncLLM`` whose ``generate()`` turns n > 1 into a group."""

import random
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import cached_property
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest

from darts_server.exceptions import DartsError
from darts_server.rollout.joining import Joining
from darts_server.rollout.plan import Plan
from darts_server.serving.admission import Admission
from darts_server.serving.gate import Gate
from darts_server.types import RequestOptions
from darts_server.vllm.controlled import ControlledLLM
from darts_server.vllm.engine import PromptRequest, VllmRollouts, in_vllms_words, prompt_key_of, sameness, tail_seed_of
from darts_server.vllm.outputs import as_choice, as_one
from darts_server.vllm.platform import refuse_what_would_crash
from darts_server.vllm.requests import current_options, demanded, merged, note_named_prompt, note_shaped
from darts_server.vllm.watchdog import Pulse, listen

# Those of generate()'s options that vLLM may refuse.
CHECKED_OPTIONS = ("lora_request", "data_parallel_rank")


class ShapingLLM(ControlledLLM):
    """``rollouts`` is set once, after construction; until then nothing is shaped. So is ``gate``."""

    rollouts: VllmRollouts | None = None
    died: bool | None = None
    """Whether the engine was dead already when it was first told to shut down; ``None`` before that."""

    @cached_property
    def gate(self) -> Gate:
        """What every request passes."""
        return Gate()

    @cached_property
    def pulse(self) -> Pulse:
        """What the engine is heard by."""
        return Pulse()

    @property
    def works(self) -> bool:
        """Whether the engine should say something: it has requests, and nobody has it stand still."""
        return bool(self.output_processor.request_states) and not (self.gate.closed or self.asleep)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM's, but a request with n > 1 may be served as a shaped group, and one with n = 1 as part of one.

        Bad input raises here and not at the first iteration: callers that stream have sent no status yet.

        Raises:
            InvalidRequest
            Overloaded: too much waits.
        """
        refuse_what_would_crash(self.vllm_config, sampling_params)
        options = merged(current_options(), sampling_params.extra_args or {})
        plan = self._plan(prompt, sampling_params, options)
        if plan is None:
            self.admission.check(demanded(sampling_params.n))
            return self._unshaped(prompt, sampling_params, request_id, more)
        request = PromptRequest(prompt, sampling_params, request_id, more)
        self.check(request)
        key = self._key(request, options)
        if plan.single:
            return self._joined(self._joining(plan, request, key, options.group_id))
        self.admission.check(demanded(plan.size))
        note_shaped(request_id)
        return self._shaped(plan, request, key)

    @property
    def admission(self) -> Admission:
        """Who is let in: everyone, as long as nothing is shaped."""
        return Admission(lambda: 0, None) if self.rollouts is None else self.rollouts.admission

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
        with self.admission.held(params.n) as ticket:
            outputs = super().generate(prompt, params, request_id, **more)
            async with self.gate.held(alone=True), aclosing(outputs):
                ticket.begun()
                with _unwrapped():
                    async for output in outputs:
                        yield output

    async def _shaped(self, plan: Plan, request: PromptRequest, key: str) -> AsyncGenerator[RequestOutput, None]:
        assert self.rollouts is not None
        # CUMULATIVE is how the token route of 0.26 asks when it does not stream: it keeps the last output alone.
        streaming = request.params.output_kind is RequestOutputKind.DELTA
        tail_seed = tail_seed_of(request)
        with self.admission.held(plan.size) as ticket, in_vllms_words():
            async with self.gate.held():
                grant = await self.rollouts.allocate(plan, key)
                ticket.grow(grant.candidates)
                run = self.rollouts.run(
                    request,
                    plan,
                    grant,
                    group_id=request.request_id,
                    prompt_key=key,
                    tail_seed=tail_seed,
                    early=streaming,
                )
                ticket.begun()
                try:
                    if streaming:
                        async for output in self._streamed(request, run.trajectories(), plan.size, tail_seed):
                            yield output
                    else:
                        chosen = {t.index: t.output async for t in run.trajectories()}
                        yield as_one(request.request_id, [chosen[index] for index in sorted(chosen)])
                finally:
                    run.leave()

    def _joining(self, plan: Plan, request: PromptRequest, key: str, name: str | None) -> Joining[PromptRequest]:
        assert self.rollouts is not None
        same = f"{plan.policy}/{plan.size}/{name}/{sameness(request)}"
        joining = Joining(request, request.request_id, plan, key, same, name)
        if not self.rollouts.awaits(joining):
            self.admission.check(demanded(1))
        return joining

    async def _joined(self, joining: Joining[PromptRequest]) -> AsyncGenerator[RequestOutput, None]:
        assert self.rollouts is not None
        with self.admission.held(1) as ticket, in_vllms_words():
            # The group it is missing from would wait for it.
            async with self.gate.held(at_once=self.rollouts.awaits(joining)):
                ticket.begun()
                output = await self.rollouts.join(joining, note_shaped)
        yield as_choice(joining.request_id, output, 0, last=True)

    async def _streamed(
        self, request: PromptRequest, trajectories: Any, size: int, tail_seed: Sequence[int] | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Each trajectory whole, as soon as it is known to belong.

        Choice indices are given out in a shuffled order, or they would tell the length rank.
        """
        indices = random.Random(repr(tail_seed) if tail_seed else None).sample(range(size), size)
        first = True
        async for trajectory in trajectories:
            output = as_choice(request.request_id, trajectory.output, indices.pop(), last=trajectory.last)
            if not first:
                output.prompt_logprobs = None
            first = False
            yield output

    def _run_output_handler(self) -> None:
        if self.output_handler is None:
            listen(self.engine_core, self.pulse)
        super()._run_output_handler()  # type: ignore[no-untyped-call]

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """As vLLM's; a request that runs as a group is ended as a whole."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        if not internal and self.rollouts is not None:
            for group_id in ids:
                self.rollouts.abort(group_id)
        await super().abort(ids, internal=internal)

    def fail(self, error: DartsError) -> None:
        """End all that runs, and refuse what comes, with this error for its callers."""
        self.gate.condemn(error)
        if self.rollouts is not None:
            self.rollouts.fail_all(error)
        self.output_processor.propagate_error(error)

    def shutdown(self, timeout: float | None = None) -> None:
        if self.died is None and hasattr(self, "engine_core"):
            self.died = self.errored
        super().shutdown(timeout=timeout)


@contextmanager
def _unwrapped() -> Iterator[None]:
    """vLLM wraps errors that it does not know. The error of `ShapingLLM.fail` is for the caller."""
    try:
        yield
    except Exception as error:
        if isinstance(error.__cause__, DartsError):
            raise error.__cause__ from None
        raise
