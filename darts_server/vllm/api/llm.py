"""The engine that shapes: vLLM's ``AsyncLLM`` whose ``generate()`` turns n > 1 into a group."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any
from weakref import finalize

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError

from darts_server.caller import caller
from darts_server.exceptions import DartsError, EngineBusy, EngineDead, EngineRefused, InvalidRequest
from darts_server.identifiers import REQUEST_ID_CHARS, check_name
from darts_server.rollout.counted import Member
from darts_server.rollout.plan import Plan
from darts_server.rollout.spec import GroupSpec, JoinRequest, OnAbort
from darts_server.rollout.turns import Turn, Turns
from darts_server.serving.admission import Admission, Ticket
from darts_server.types import OFF, DiscardReason, FinishReason, RequestOptions
from darts_server.vllm.api.controlled import ControlledLLM
from darts_server.vllm.api.engine import FINISH_REASONS, VllmRollouts
from darts_server.vllm.api.routes import RouteCall, route_call
from darts_server.vllm.fleet.ranks import RANK, place
from darts_server.vllm.requests.outputs import ABORTED, NoTokens, make_deferred, to_choice
from darts_server.vllm.requests.prompt_request import PromptRequest, make_turn
from darts_server.vllm.requests.validation import check_group, check_request

HAND_BACK_POLL_SECONDS = 0.02
ANSWER_SECONDS = 3.0  # less than `HAND_BACK_SECONDS`, within which batches are handed back too
MergeOptions = Callable[[RequestOptions, Mapping[str, Any]], RequestOptions]
"""Merges options from header and model alias with those in ``vllm_xargs``; raises ``InvalidRequest``."""


@dataclass(slots=True, eq=False)
class Generation:
    """A call of ``generate()``, made once and handed down until its last output.

    ``ticket``: holds its candidates. ``turn``: gets the rank of the engine that runs it, before its first output.
    ``turns``: where its answers are remembered; ``None``: nowhere. ``plan``: by which it is shaped, if it is.
    ``prompt_key``: for which its lengths are learned; empty for none. ``group_name``: the caller's, of single requests.
    ``answers_at_stop``: the caller takes what was generated, if the server stops, in place of an error. ``member``: it
    is one of a group that is only counted.
    """

    request: PromptRequest
    route: RouteCall
    ticket: Ticket
    turn: Turn = field(default_factory=Turn)
    turns: Turns | None = None
    plan: Plan | None = None
    prompt_key: str = ""
    group_name: str | None = None
    answers_at_stop: bool = False
    member: Member | None = None


class ShapingLLM(ControlledLLM):
    """Shape requests as groups of ``rollouts`` once that is set; until then serve all as vLLM does."""

    rollouts: VllmRollouts | None = None
    merge_options: MergeOptions = staticmethod(lambda options, _: options)
    died: bool | None = None  # whether the engine was dead when it was first shut down; ``None`` before that
    on_death: Callable[[], None] = staticmethod(lambda: None)  # called once, when the engine has died

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.observe_outputs()  # before vLLM's task, which may have been created, gets its first ones

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
        request, route = PromptRequest(prompt, sampling_params, request_id, options), route_call.get() or RouteCall()
        check_request(self.vllm_config, request)
        shaping = self.merge_options(route.options, sampling_params.extra_args or {})
        rollouts, n = self.rollouts, sampling_params.n
        turns, turn, plan, prompt_key, group_name = None, Turn(), None, "", None
        is_counted = False
        if rollouts is not None and not isinstance(prompt, EngineCoreRequest | AsyncGenerator):
            turns, turn = rollouts.turns, make_turn(request, shaping, route.session, caller.get().name, self.tokenizer)
            group_name = shaping.group_id or rollouts.planner.limits.group_name(turn.session)
            turn.names_group = group_name is not None
            plan = rollouts.plan(n, shaping, turn)
            is_counted = plan is not None and plan.policy == OFF
            if plan is not None and not is_counted:
                check_group(self, request)
            # What names `off` itself, or the model `MODEL:raw`, may be an evaluation: none of what is trained on.
            if plan is not None or (n > 1 and shaping.policy is None):
                prompt_key = shaping.prompt_key or request.prompt_key
                if shaping.prompt_key is not None:
                    route.named.add(request.prompt_key)
                    if len(route.named) > 1:  # lengths of several prompts must not be recorded under one key
                        what = "names one prompt, and the request has several; send them one by one"
                        raise InvalidRequest("X-Darts-Prompt-Key", what)
        # Last, as what raises must not hold candidates.
        if rollouts is not None and plan is not None:
            ticket = rollouts.admission.admit(1 if plan.single else rollouts.usual_candidates(plan))
            if not plan.single:
                route.groups.append(request_id)
            elif not is_counted:
                turn.group_size = plan.size
        elif not route.beams:
            ticket = self.admission.admit(n)
        else:
            if route.ticket is None:
                route.ticket = self.admission.admit(route.beams)
                route.ticket.mark_started()
            ticket = route.ticket.split(0)
        answers_at_stop = shaping.on_stop == "answer" and not route.beams
        generation = Generation(request, route, ticket, turn, turns, plan, prompt_key, group_name, answers_at_stop)
        member = None
        if rollouts is not None and plan is not None and is_counted:
            generated = partial(self._count_tokens, request_id)
            member = rollouts.joiner.counted.join(self._join_request(generation, plan), generated)
            generation.member = member
            route.groups.append(member.group.group_id)
        outputs, loop = self._serve(generation), asyncio.get_running_loop()

        def give_up() -> None:
            ticket.release()
            if member is not None:
                member.leave(DiscardReason.CANCELLED)

        def release() -> None:  # in any thread: that of the garbage collector
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(give_up)

        finalize(outputs, release).atexit = False  # one that is never iterated does not run its `finally`
        return outputs

    def check_options(self, options: RequestOptions, extra_args: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` for wrong options of a request for one trajectory that is not rendered yet."""
        shaping = self.merge_options(options, extra_args)
        if self.rollouts is not None:
            self.rollouts.plan(1, shaping)

    @property
    def admission(self) -> Admission:
        """Which requests are admitted: all, as long as nothing is shaped."""
        return Admission(lambda: 0, None) if self.rollouts is None else self.rollouts.admission

    async def add_request(self, *args: Any, **more: Any) -> Any:
        """As vLLM's, with the LoRA adapter that is served now under the request's name, see `VllmLoras.resolve`."""
        if self.loras is not None and more.get("lora_request") is not None:
            more["lora_request"] = self.loras.resolve(more["lora_request"])
        return await super().add_request(*args, **more)

    async def _add_request(self, request: EngineCoreRequest, *args: Any) -> None:
        """As vLLM's, which forgets a request that could not be sent to the engine only if it has n > 1."""
        try:
            await super()._add_request(request, *args)
        except BaseException:
            await self.abort(request.request_id, internal=True)
            raise

    async def _serve(self, generation: Generation) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs, and record its answers before its caller gets their ends."""
        plan, request, turns, rollouts = generation.plan, generation.request, generation.turns, self.rollouts
        member = generation.member
        if plan is None or member is not None:
            outputs = self._generate_unshaped(generation)
        else:
            outputs = (self._generate_joined if plan.single else self._generate_group)(generation, plan)
        if generation.answers_at_stop:
            self._answered_at_stop.append(request.request_id)
        is_delta = request.params.output_kind is RequestOutputKind.DELTA
        tokens: dict[int, list[int]] = {}
        ends: dict[int, tuple[int, str]] = {}  # length and finish reason of each choice, by its index
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    for choice in output.outputs:
                        if choice.finish_reason is not None:
                            generation.route.aborted |= choice.finish_reason == ABORTED
                            if is_delta and not choice.token_ids:
                                choice.token_ids = NoTokens()
                        if turns is None or (choice.finish_reason is None and not is_delta):
                            continue
                        tokens.setdefault(choice.index, []).extend(choice.token_ids)
                        if (reason := choice.finish_reason) is not None:
                            answer = tokens.pop(choice.index)
                            ends[choice.index] = len(answer), reason
                            turns.add_answer(generation.turn, answer, aborted=reason == ABORTED)
                            if member is not None and (finish_reason := FINISH_REASONS.get(reason)) is not None:
                                member.finish(output.prompt_token_ids or (), answer, finish_reason)
                            elif member is not None:
                                aborted = DiscardReason.ABORTED if reason == ABORTED else DiscardReason.FAILED
                                member.leave(aborted, len(answer))
                    yield output
        except (EngineRefused, EngineBusy, EngineDead) as error:
            raise (error.__cause__ or error) from None  # vLLM's own, which its routes map to the right HTTP status
        except Exception:
            if member is not None:
                member.leave(DiscardReason.FAILED, len(tokens.get(0, ())))
            raise
        finally:
            generation.ticket.release()
            if member is not None:
                member.leave(DiscardReason.CANCELLED, len(tokens.get(0, ())))
            if generation.answers_at_stop:
                self._answered_at_stop.remove(request.request_id)
        if plan is not None or rollouts is None or not generation.prompt_key:
            return
        # Lengths are learned of all trajectories that the request has, or of none.
        if len(ends) == request.params.n and {reason for _, reason in ends.values()} <= set(FinishReason):
            lengths = [(length, FinishReason(reason)) for _, (length, reason) in sorted(ends.items())]
            rollouts.learn_unshaped(generation.prompt_key, lengths, request.tokens)

    async def _generate_unshaped(self, generation: Generation) -> AsyncGenerator[RequestOutput, None]:
        """Generate as vLLM does, a later turn on the engine that has its prefix."""
        request, turn = generation.request, generation.turn
        # Its place is among the candidates of groups.
        order = None if self.rollouts is None else self.rollouts.starting_order(None)(0)
        with ExitStack() as placed:
            if (member := generation.member) is not None:
                placed.enter_context(self.ranks.joined(request.request_id, member.group.group_id))
                turn.rank = placed.enter_context(self.ranks.candidate(request.request_id))
            options = place(self.vllm_config, request.options, turn.rank, order)
            turn.rank = options.get(RANK)
            if member is None and turn.rank is not None:
                placed.enter_context(self.ranks.running_on(turn.rank))
            outputs = super().generate(request.prompt, request.params, request.request_id, **options)
            async with self.gate.enter(unshaped=True), aclosing(outputs):
                generation.ticket.mark_started()
                if member is not None:
                    member.start()
                try:
                    async for output in outputs:
                        yield output
                except Exception as error:
                    if isinstance(error.__cause__, DartsError):  # that of `fail`, which vLLM wraps in one of its own
                        raise error.__cause__ from None
                    raise

    async def _generate_group(self, generation: Generation, plan: Plan) -> AsyncGenerator[RequestOutput, None]:
        """Generate a group. A stream has each trajectory whole, as soon as it is known to belong to the group."""
        request, prompt_key, turn = generation.request, generation.prompt_key, generation.turn
        rollouts, ticket = self.rollouts, generation.ticket
        assert rollouts is not None
        streaming = request.params.output_kind is RequestOutputKind.DELTA
        seed = request.tail_seed
        tokens = request.tokens
        spec = GroupSpec(
            plan,
            request,
            request.request_id,
            prompt_key,
            seed,
            early=streaming,
            on_abort=OnAbort.ANSWER,
            tokens=tokens,
        )
        async with self.gate.enter():
            aborts = rollouts.aborts
            allocation = await rollouts.allocator.allocate(plan, prompt_key)
            allocation = replace(allocation, candidates=ticket.fit(allocation.candidates))
            run = rollouts.start(spec, allocation, ticket.split(allocation.candidates))
            if rollouts.aborts != aborts:  # everything was aborted while it waited for its cohort
                run.abort()
            try:
                # Choice indices are shuffled: in order of delivery they would reveal the length rank.
                indices = random.Random(repr(seed) if seed else None).sample(range(plan.size), plan.size)
                selected: dict[int, RequestOutput] = {}
                async for trajectory in run.trajectories():
                    await make_deferred(trajectory.output)
                    turn.rank = self.ranks.of(request.request_id, request.options)
                    if not streaming:
                        selected[trajectory.index] = trajectory.output
                        continue
                    output = to_choice(request.request_id, trajectory.output, indices.pop(), last=trajectory.last)
                    if len(indices) < plan.size - 1:  # the first one has them
                        output.prompt_logprobs = None
                    yield output
                if not streaming:
                    first, *others = map(selected.__getitem__, sorted(selected))
                    merged = to_choice(request.request_id, first, 0, last=True)
                    for index, other in enumerate(others, 1):
                        merged.outputs.append(replace(other.outputs[0], index=index))
                    yield merged
            finally:
                run.cancel()

    async def _generate_joined(self, generation: Generation, plan: Plan) -> AsyncGenerator[RequestOutput, None]:
        """Generate one trajectory as part of a group of single requests."""
        request = generation.request
        assert self.rollouts is not None
        joiner = self.rollouts.joiner
        joining = self._join_request(generation, plan)
        with ExitStack() as joined:

            def join(group_id: str) -> None:
                """Called before the request's candidate starts."""
                generation.route.groups.append(group_id)
                joined.enter_context(self.ranks.joined(request.request_id, group_id))

            # A closed gate must not keep out a request that a running group waits for.
            async with self.gate.enter(skip_wait=joiner.expects(joining.join_key)):
                output = await joiner.join(joining, join)
            generation.turn.rank = self.ranks.of(request.request_id, request.options)
            await make_deferred(output)
        yield to_choice(request.request_id, output, 0, last=True)

    def _join_request(self, generation: Generation, plan: Plan) -> JoinRequest[PromptRequest]:
        request = generation.request
        # Callers with different keys must not answer each other's requests.
        common = f"{generation.turn.caller}/{plan.policy}/{plan.size}/{generation.group_name}"
        return JoinRequest(
            request,
            request.request_id,
            plan,
            generation.prompt_key,
            f"{common}/{request.join_key}",
            generation.ticket,
            generation.group_name,
            request.tokens,
        )

    def _count_tokens(self, request_id: str) -> int:
        """Return how many tokens the request with that id has generated, if it runs."""
        ids = self.output_processor.external_req_ids.get(request_id, ())
        return max((self.held.tokens(each) or 0 for each in ids), default=0)

    def observe_outputs(self) -> None:
        """Note the engine's death, and let other tasks run between two of its outputs.

        Reading from a queue that is not empty does not yield to the event loop. An API process slower than its engine
        would therefore work through the whole queue in one turn, while the queue grows: each turn would be longer than
        the one before, and nothing would be stopped, started or answered meanwhile.
        """
        engine_core: Any = self.engine_core
        get_output = engine_core.get_output_async

        async def get_output_after_yielding() -> Any:
            self.is_handling = False  # what it got last is done with
            await asyncio.sleep(0)
            try:
                outputs = await get_output()
            except EngineDeadError:
                self.on_death()
                raise
            self.is_handling = True
            return outputs

        engine_core.get_output_async = get_output_after_yielding

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort as vLLM does; a request that runs as a group is aborted as a whole."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await super().abort(ids, internal=internal)
        if not internal and self.rollouts is not None:
            for group_id in ids:
                self.rollouts.abort(group_id)

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
