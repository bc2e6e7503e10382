"""The engine that shapes: vLLM's ``AsyncLLM`` whose ``generate()`` turns n > 1 into a group."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import finalize

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError

from darts_server.exceptions import DartsError
from darts_server.identifiers import REQUEST_ID_CHARS, check_name
from darts_server.rollout.joining import JoinRequest
from darts_server.rollout.plan import Plan
from darts_server.rollout.spec import GroupSpec, OnAbort
from darts_server.rollout.turns import Turn
from darts_server.serving.admission import Admission, Ticket, caller
from darts_server.types import FinishReason, RequestOptions
from darts_server.vllm.controlled import ControlledLLM
from darts_server.vllm.deferred import make_deferred
from darts_server.vllm.engine import VllmRollouts, raise_vllm_errors
from darts_server.vllm.outputs import merge_outputs, to_choice
from darts_server.vllm.prompt_request import PromptRequest
from darts_server.vllm.ranks import PRIORITY, combined, has_priorities, on_rank, rank_of
from darts_server.vllm.requests import (
    current_beam_search,
    current_options,
    current_session,
    note_named_prompt,
    note_shaped,
)
from darts_server.vllm.turns import make_turn, remember_answers
from darts_server.vllm.validation import check_group, check_request

HAND_BACK_POLL_SECONDS = 0.02
ANSWER_SECONDS = 3.0
"""Less than `HAND_BACK_SECONDS`, within which batches are handed back too."""
MergeOptions = Callable[[RequestOptions, Mapping[str, Any]], RequestOptions]
"""Merges options from header and model alias with those in ``vllm_xargs``; raises ``InvalidRequest``."""


class ShapingLLM(ControlledLLM):
    """Shape requests once `shape` was called; until then serve all as vLLM does."""

    rollouts: VllmRollouts | None = None
    died: bool | None = None
    """Whether the engine was dead when it was first shut down; ``None`` before that."""
    on_death: Callable[[], None] = staticmethod(lambda: None)
    """Called once, when the engine has died."""
    _merge_options: MergeOptions = staticmethod(lambda options, _: options)

    def shape(self, rollouts: VllmRollouts | None, merge_options: MergeOptions) -> None:
        """Serve requests as groups of ``rollouts`` from now on; ``None``: shape nothing."""
        self.rollouts = rollouts
        self._merge_options = merge_options

    @property
    def should_respond(self) -> bool:
        """Whether the engine should send something: it has requests, and was neither paused nor put to sleep."""
        return bool(self.output_processor.request_states) and not self.gate.closed

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate as vLLM does; but n > 1 may be served as a shaped group, and n = 1 as part of one.

        Bad input raises here and not at the first iteration, as streaming routes send their status in between.

        Raises:
            InvalidRequest
            Overloaded: too many candidates are queued.
        """
        check_name("request_id", request_id, REQUEST_ID_CHARS)
        check_name("session_id", options.get("session_id") or "")
        request = PromptRequest(prompt, sampling_params, request_id, options)
        check_request(self.vllm_config, request)
        shaping = self._merge_options(current_options(), sampling_params.extra_args or {})
        if self.rollouts is None or isinstance(prompt, EngineCoreRequest | AsyncGenerator):
            ticket = self._admit_unshaped(sampling_params.n)
            outputs = self._generate_unshaped(prompt, sampling_params, request_id, options, ticket)
            return _releasing(self._answer_at_stop(shaping, request_id, outputs), ticket)
        turn = make_turn(request, shaping, current_session(), caller.get().name, self.tokenizer)
        group_name = shaping.group_id or self.rollouts.planner.limits.group_name(turn.session)
        turn.names_group = group_name is not None
        plan = self.rollouts.plan(sampling_params.n, shaping, turn)
        shaping = replace(shaping, group_id=group_name)
        outputs, ticket = self._admit(plan, request, shaping, turn)
        outputs = self._answer_at_stop(shaping, request_id, outputs)
        return _releasing(remember_answers(self.rollouts.turns, turn, request, outputs), ticket)

    def _admit(
        self, plan: Plan | None, request: PromptRequest, shaping: RequestOptions, turn: Turn
    ) -> tuple[AsyncGenerator[RequestOutput, None], Ticket]:
        """Admit a request under its plan. Returns its outputs, and what holds its candidates.

        ``turn``: gets the rank of the engine that runs it, before its first output.
        """
        if plan is None:
            ticket = self._admit_unshaped(request.params.n)
            outputs = self._generate_turn(request, turn, ticket)
            # What names `off` itself, or the model `MODEL:raw`, may be an evaluation: none of what is trained on.
            if request.params.n > 1 and shaping.policy is None:
                outputs = self._learn_lengths(request, self._prompt_key(request, shaping), outputs)
            return outputs, ticket
        check_group(self, request)
        prompt_key = self._prompt_key(request, shaping)
        assert self.rollouts is not None
        if plan.single:
            ticket = self.admission.admit(1)
            name = shaping.group_id
            # Callers with different keys must not answer each other's requests.
            join_key = f"{caller.get().name}/{plan.policy}/{plan.size}/{name}/{request.join_key}"
            joining = JoinRequest(request, request.request_id, plan, prompt_key, join_key, ticket, name, request.tokens)
            turn.group_size = plan.size
            return self._generate_joined(joining, turn), ticket
        ticket = self.admission.admit(self.rollouts.usual_candidates(plan))
        note_shaped(request.request_id)
        return self._generate_group(plan, request, prompt_key, ticket, turn), ticket

    def check_options(self, options: RequestOptions, extra_args: Mapping[str, Any]) -> None:
        """Check the options of a request for one trajectory that is not rendered yet.

        Raises:
            InvalidRequest
        """
        shaping = self._merge_options(options, extra_args)
        if self.rollouts is not None:
            self.rollouts.plan(1, shaping)

    @property
    def admission(self) -> Admission:
        """Which requests are admitted: all, as long as nothing is shaped."""
        return Admission(lambda: 0, None) if self.rollouts is None else self.rollouts.admission

    @staticmethod
    def _prompt_key(request: PromptRequest, options: RequestOptions) -> str:
        if options.prompt_key is None:
            return request.prompt_key
        note_named_prompt(request.prompt_key)
        return options.prompt_key

    def _admit_unshaped(self, n: int) -> Ticket:
        search = current_beam_search()
        if search is None:
            return self.admission.admit(n)
        if search.ticket is None:
            search.ticket = self.admission.admit(search.beams)
            search.ticket.mark_started()
        return search.ticket.split(0)

    async def _generate_turn(
        self, request: PromptRequest, turn: Turn, ticket: Ticket
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate unshaped, a later turn on the engine that has its prefix."""
        options = on_rank(self, request.options, turn.rank)
        turn.rank = rank_of(options)
        outputs = self._generate_unshaped(request.prompt, request.params, request.request_id, options, ticket)
        with nullcontext() if turn.rank is None else self.ranks.running_on(turn.rank):
            async with aclosing(outputs):
                async for output in outputs:
                    yield output

    async def _learn_lengths(
        self, request: PromptRequest, prompt_key: str, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Learn the lengths of a request under the server's policy `off`, once all of its trajectories have ended."""
        assert self.rollouts is not None
        is_delta = request.params.output_kind is RequestOutputKind.DELTA
        tokens, reasons = Counter[int](), dict[int, str]()
        async with aclosing(outputs):
            async for output in outputs:
                for choice in output.outputs:
                    tokens[choice.index] = is_delta * tokens[choice.index] + len(choice.token_ids)
                    if choice.finish_reason is not None:
                        reasons[choice.index] = choice.finish_reason
                yield output
        if len(reasons) == request.params.n and set(reasons.values()) <= set(FinishReason):
            self.rollouts.learn_unshaped(prompt_key, [(tokens[i], FinishReason(reasons[i])) for i in sorted(reasons)])

    async def _generate_unshaped(
        self, prompt: Any, params: SamplingParams, request_id: str, options: Mapping[str, Any], ticket: Ticket
    ) -> AsyncGenerator[RequestOutput, None]:
        with ticket:
            if self.rollouts is not None and has_priorities(self):  # its place among the candidates of groups
                order = self.rollouts.starting_order(None).of()
                options = {**options, PRIORITY: combined(options.get(PRIORITY, 0), order)}
            outputs = super().generate(prompt, params, request_id, **options)
            async with self.gate.enter(unshaped=True), aclosing(outputs):
                ticket.mark_started()
                with _unwrap_own_errors():
                    async for output in outputs:
                        yield output

    async def _generate_group(
        self, plan: Plan, request: PromptRequest, prompt_key: str, ticket: Ticket, turn: Turn
    ) -> AsyncGenerator[RequestOutput, None]:
        assert self.rollouts is not None
        # CUMULATIVE is what the token route of 0.26 requests without streaming: it reads the last output alone.
        streaming = request.params.output_kind is RequestOutputKind.DELTA
        spec = GroupSpec.of_plan(
            plan, request, request.request_id, prompt_key, request.tail_seed, early=streaming, on_abort=OnAbort.ANSWER
        )
        with ticket, raise_vllm_errors():
            async with self.gate.enter():
                aborts = self.rollouts.aborts
                allocation = await self.rollouts.allocator.allocate(plan, prompt_key, request.tokens)
                allocation = replace(allocation, candidates=ticket.fit(allocation.candidates))
                run = self.rollouts.start(spec, plan, allocation, ticket.split(allocation.candidates))
                if self.rollouts.aborts != aborts:  # everything was aborted while it waited for its cohort
                    run.abort()
                try:
                    if streaming:
                        async for output in self._stream(request, run.trajectories(), plan.size):
                            turn.rank = rank_of(request.options, self.ranks.of(request.request_id))
                            yield output
                    else:
                        selected = {}
                        async for trajectory in run.trajectories():
                            await make_deferred(trajectory.output)
                            selected[trajectory.index] = trajectory.output
                        turn.rank = rank_of(request.options, self.ranks.of(request.request_id))
                        yield merge_outputs(request.request_id, [selected[index] for index in sorted(selected)])
                finally:
                    run.cancel()

    async def _generate_joined(
        self, request: JoinRequest[PromptRequest], turn: Turn
    ) -> AsyncGenerator[RequestOutput, None]:
        assert self.rollouts is not None
        joiner = self.rollouts.joiner
        with request.ticket, raise_vllm_errors(), ExitStack() as joined:

            def join(group_id: str) -> None:
                """Called before the request's candidate starts."""
                note_shaped(group_id)
                joined.enter_context(self.ranks.joined(request.request_id, group_id))

            # A closed gate must not keep out a request that a running group waits for.
            async with self.gate.enter(skip_wait=joiner.expects(request.join_key)):
                output = await joiner.join(request, join)
            turn.rank = rank_of(request.request.options, self.ranks.of(self.ranks.group_of(request.request_id)))
            await make_deferred(output)
        yield to_choice(request.request_id, output, 0, last=True)

    async def _stream(
        self, request: PromptRequest, trajectories: Any, size: int
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield each trajectory whole, as soon as it is known to belong to the group.

        Choice indices are shuffled: in order of delivery they would reveal the length rank.
        """
        seed: Sequence[int] | None = request.tail_seed
        indices = random.Random(repr(seed) if seed else None).sample(range(size), size)
        is_first = True
        async for trajectory in trajectories:
            await make_deferred(trajectory.output)
            output = to_choice(request.request_id, trajectory.output, indices.pop(), last=trajectory.last)
            if not is_first:
                output.prompt_logprobs = None
            is_first = False
            yield output

    def _run_output_handler(self) -> None:
        if self.output_handler is None:
            self.observe_outputs()
        super()._run_output_handler()  # type: ignore[no-untyped-call]  # of a base class, which mypy cannot exclude

    def observe_outputs(self) -> None:
        """Note the engine's death, and let other tasks run between two of its outputs.

        Reading from a queue that is not empty does not yield to the event loop. An API process slower than its engine
        would therefore work through the whole queue in one turn, while the queue grows: each turn would be longer than
        the one before, and nothing would be stopped, started or answered meanwhile.
        """
        engine_core: Any = self.engine_core
        get_output = engine_core.get_output_async

        async def get_output_after_yielding() -> Any:
            await asyncio.sleep(0)
            try:
                return await get_output()
            except EngineDeadError:
                self.on_death()
                raise

        engine_core.get_output_async = get_output_after_yielding

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort as vLLM does; a request that runs as a group is aborted as a whole."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await super().abort(ids, internal=internal)
        if not internal and self.rollouts is not None:
            for group_id in ids:
                self.rollouts.abort(group_id)

    def _answer_at_stop(
        self, options: RequestOptions, request_id: str, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Let `hand_back` end a request while its outputs are read, if its caller wants that."""
        if options.on_stop != "answer" or current_beam_search() is not None:
            return outputs

        async def tracked() -> AsyncGenerator[RequestOutput, None]:
            self._answered_at_stop.append(request_id)
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        yield output
            finally:
                self._answered_at_stop.remove(request_id)

        return tracked()

    @cached_property
    def _answered_at_stop(self) -> list[str]:
        """Ids of running requests whose callers take what was generated, if the server stops, in place of an error."""
        return []

    async def hand_back(self) -> None:
        """Abort these requests, as ``/abort_requests`` does, and wait until their callers have what was generated.

        Not for long: one that has not started yet cannot be aborted, and a reader may have stalled.
        """
        if ids := list(self._answered_at_stop):
            await self.abort(ids)
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                while set(ids).intersection(self._answered_at_stop):
                    await asyncio.sleep(HAND_BACK_POLL_SECONDS)

    def fail(self, error: DartsError) -> None:
        """End everything that runs and refuse everything that arrives; all callers get this error."""
        self.gate.fail(error)
        if self.rollouts is not None:
            self.rollouts.fail_all(error)
        self.output_processor.propagate_error(error)

    def shutdown(self, timeout: float | None = None) -> None:
        if self.died is None and hasattr(self, "engine_core"):
            self.died = self.errored
        super().shutdown(timeout=timeout)


def _releasing(outputs: AsyncGenerator[RequestOutput, None], ticket: Ticket) -> AsyncGenerator[RequestOutput, None]:
    """Release the ticket when ``outputs`` is dropped: one that is never iterated does not run its ``finally``."""
    loop = asyncio.get_running_loop()

    def release() -> None:  # in any thread: that of the garbage collector
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ticket.release)

    finalize(outputs, release).atexit = False
    return outputs


@contextmanager
def _unwrap_own_errors() -> Iterator[None]:
    """Raise the error of `ShapingLLM.fail`, which vLLM wraps in one of its own."""
    try:
        yield
    except Exception as error:
        if isinstance(error.__cause__, DartsError):
            raise error.__cause__ from None
        raise
