"""The client of the engine that vLLM's routes call. Its ``generate()`` turns a request with n > 1 into a group."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import ExitStack, aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError

from darts_server.caller import caller
from darts_server.exceptions import (
    DartsError,
    EngineBusy,
    EngineDead,
    EngineRefused,
    InvalidRequest,
)
from darts_server.identifiers import REQUEST_ID_CHARS, check_name
from darts_server.rollout.plan import Plan
from darts_server.rollout.sessions.session_group import AgentSession
from darts_server.rollout.spec import GroupSpec, JoinRequest, OnAbort
from darts_server.rollout.turns import Turn
from darts_server.types import OFF, DiscardReason, FinishReason, RequestOptions
from darts_server.vllm.api.engine import FINISH_REASONS
from darts_server.vllm.api.routes import RouteCall, route_call
from darts_server.vllm.api.unshaped import Generation, UnshapedLLM, call_at_deletion, prepare_output
from darts_server.vllm.requests.outputs import ABORTED, NoTokens, to_choice
from darts_server.vllm.requests.prompt_request import PromptRequest, make_turn
from darts_server.vllm.requests.validation import check_group, check_request

HAND_BACK_TIMEOUT = 3.0
"""Less than HAND_BACK_SECONDS, the limit for batches and requests together."""
HAND_BACK_POLL_SECONDS = 0.02
MergeOptions = Callable[[RequestOptions, Mapping[str, Any]], RequestOptions]
"""Merges options of headers and model alias with ``vllm_xargs``. Raises `InvalidRequest`."""


class ShapingLLM(UnshapedLLM):
    """Serves requests as groups of ``rollouts``, and as vLLM does until ``rollouts`` is set."""

    merge_options: MergeOptions = staticmethod(lambda options, _: options)
    died: bool | None = None
    """Whether the engine was dead at the first call of `shutdown`, or None before that call."""
    on_death: Callable[[], None] = staticmethod(lambda: None)
    """Called once, when the engine has died."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        # Ids of running requests with `answers_at_stop`. Callers choose ids, so an id may be here twice.
        self._ids_answered_at_stop: list[str] = []
        # vLLM's task, which may exist already, must not read outputs before this.
        self.replace_output_reader()

    @property
    def should_respond(self) -> bool:
        # An engine that is paused or asleep sends nothing. Then the gate is closed.
        return bool(self.output_processor.request_states) and not self.gate.is_closed

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate as vLLM does, but n > 1 may become a group, and n = 1 a part of a group.

        Raises:
            InvalidRequest
            Overloaded: too many candidates are queued.
        """
        # Bad input raises here and not at the first iteration: streaming routes send their status in between.
        check_name("request_id", request_id, REQUEST_ID_CHARS)
        check_name("session_id", options.get("session_id") or "")
        request = PromptRequest(prompt, sampling_params, request_id, options)
        route = route_call.get() or RouteCall()
        check_request(self.vllm_config, request)
        shaping = self.merge_options(route.options, sampling_params.extra_args or {})
        agent_session = self._find_session(shaping, route)
        if agent_session is not None:
            return self._begin_turn(agent_session, request, route)

        # Choose the policy, and recognise the trajectory and group of the request.
        rollouts = self.rollouts
        turns = None
        turn = Turn()
        group_name = None
        plan = None
        is_only_counted = False
        prompt_key = ""
        if rollouts is not None and not isinstance(prompt, EngineCoreRequest | AsyncGenerator):
            turns = rollouts.turns
            header_session = next(iter(route.session_names), None)
            turn = make_turn(request, shaping, header_session, caller.get().name, self.tokenizer)
            group_name = shaping.group_id or rollouts.planner.limits.group_name_of_session(turn.session)
            turn.names_group = group_name is not None
            # None: vLLM serves the request, and it belongs to no group.
            plan = rollouts.plan(sampling_params.n, shaping, turn)
            # A single request of a group that `off` or `auto` does not shape: vLLM serves it, and its group is counted.
            is_only_counted = plan is not None and plan.policy == OFF
            if plan is not None and not is_only_counted:
                check_group(self, request)
            # A request that names the policy `off` or the model `MODEL:raw` may be an evaluation.
            if plan is not None or (sampling_params.n > 1 and shaping.policy is None):
                prompt_key = shaping.prompt_key or request.prompt_key
                if shaping.prompt_key is not None:
                    # The lengths of several prompts must not be recorded under one key.
                    route.keyed_prompts.add(request.prompt_key)
                    if len(route.keyed_prompts) > 1:
                        raise InvalidRequest(
                            "X-Darts-Prompt-Key",
                            "names one prompt, and the request has several; send them one by one",
                        )

        # Admit the candidates last: a call that raises must not hold any.
        if rollouts is not None and plan is not None:
            ticket = rollouts.admission.admit(1 if plan.single else rollouts.estimate_candidates(plan))
            if not plan.single:
                route.group_ids.append(request_id)
            elif not is_only_counted:
                # `Turns` recognises aborted requests that are sent again. A counted group frees their seats itself.
                turn.group_size = plan.size
        elif not route.beams:
            ticket = self.admission.admit(sampling_params.n)
        else:
            # The first of a beam search's many calls admits all beams.
            if route.beam_ticket is None:
                route.beam_ticket = self.admission.admit(route.beams)
                route.beam_ticket.mark_started()
            ticket = route.beam_ticket.split(candidates=0)

        answers_at_stop = shaping.on_stop == "answer" and not route.beams
        generation = Generation(
            request,
            route,
            ticket,
            turn,
            turns,
            plan,
            prompt_key,
            group_name,
            answers_at_stop,
        )
        member = None
        if rollouts is not None and plan is not None and is_only_counted:
            count_tokens = partial(self._count_tokens, request_id)
            member = rollouts.joiner.counted.join(self._make_join_request(generation, plan), count_tokens)
            generation.member = member
            route.group_ids.append(member.group.group_id)

        outputs = self._serve(generation)

        def release() -> None:
            ticket.release()
            if member is not None:
                member.leave(DiscardReason.CANCELLED)

        call_at_deletion(outputs, release)
        return outputs

    def check_options(self, options: RequestOptions, extra_args: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` for wrong options of a request that is not rendered yet."""
        shaping = self.merge_options(options, extra_args)
        agent_session = self._find_session(shaping, route_call.get() or RouteCall())
        if agent_session is not None:
            agent_session.group.check_turn(agent_session)
        elif self.rollouts is not None:
            self.rollouts.plan(n=1, options=shaping)

    def _find_session(self, options: RequestOptions, route: RouteCall) -> AgentSession | None:
        if self.sessions is None:
            return None
        return self.sessions.find_named(options.session, *route.session_names)

    async def add_request(self, *args: Any, **more: Any) -> Any:
        if self.loras is not None and more.get("lora_request") is not None:
            more["lora_request"] = self.loras.find_current(more["lora_request"])
        return await super().add_request(*args, **more)

    async def _add_request(self, request: EngineCoreRequest, *args: Any) -> None:
        try:
            await super()._add_request(request, *args)
        except BaseException:
            # vLLM forgets a request that could not be sent only for n > 1.
            await self.abort(request.request_id, internal=True)
            raise

    async def _serve(self, generation: Generation) -> AsyncGenerator[RequestOutput, None]:
        request = generation.request
        plan = generation.plan
        turns = generation.turns
        member = generation.member
        if plan is None or member is not None:
            outputs = self._generate_unshaped(generation)
        elif plan.single:
            outputs = self._generate_joined(generation, plan)
        else:
            outputs = self._generate_group(generation, plan)
        if generation.answers_at_stop:
            self._ids_answered_at_stop.append(request.request_id)

        is_delta = request.params.output_kind is RequestOutputKind.DELTA
        # By index: tokens of unfinished choices, and length and finish reason of finished choices.
        unfinished_tokens: dict[int, list[int]] = {}
        finished: dict[int, tuple[int, str]] = {}
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    for choice in output.outputs:
                        reason = choice.finish_reason
                        if reason is not None:
                            generation.route.has_aborted_answer |= reason == ABORTED
                            # vLLM's streams skip an event whose tokens are false, and so its finish reason.
                            if is_delta and not choice.token_ids:
                                choice.token_ids = NoTokens()
                        # Without deltas, only the last output of a choice counts: it has all tokens.
                        if turns is None or (reason is None and not is_delta):
                            continue
                        unfinished_tokens.setdefault(choice.index, []).extend(choice.token_ids)
                        if reason is None:
                            continue

                        answer = unfinished_tokens.pop(choice.index)
                        finished[choice.index] = (len(answer), reason)
                        # Before the output is yielded: then its caller can send the next turn.
                        turns.add_answer(generation.turn, answer, aborted=reason == ABORTED)
                        if member is None:
                            continue
                        if reason in FINISH_REASONS:
                            member.finish(output.prompt_token_ids or (), answer, FINISH_REASONS[reason])
                        elif reason == ABORTED:
                            member.leave(DiscardReason.ABORTED, len(answer))
                        else:
                            member.leave(DiscardReason.FAILED, len(answer))
                    yield output
        except (EngineRefused, EngineBusy, EngineDead) as error:
            # vLLM's routes map vLLM's own exception to its HTTP status.
            raise (error.__cause__ or error) from None
        except Exception:
            if member is not None:
                member.leave(DiscardReason.FAILED, len(unfinished_tokens.get(0, ())))
            raise
        finally:
            generation.ticket.release()
            if member is not None:
                # Without effect if the member has finished or left.
                member.leave(DiscardReason.CANCELLED, len(unfinished_tokens.get(0, ())))
            if generation.answers_at_stop:
                self._ids_answered_at_stop.remove(request.request_id)

        if plan is not None or self.rollouts is None or not generation.prompt_key:
            return
        # Learn the lengths of all trajectories of the request, or of none.
        reasons = {reason for _, reason in finished.values()}
        if len(finished) == request.params.n and reasons <= set(FinishReason):
            lengths = [(length, FinishReason(reason)) for _, (length, reason) in sorted(finished.items())]
            self.rollouts.learn_unshaped_lengths(generation.prompt_key, lengths, request.tokens)

    async def _generate_group(self, generation: Generation, plan: Plan) -> AsyncGenerator[RequestOutput, None]:
        """Generate a group. A stream gets each trajectory whole, once it is certain to be in the group."""
        request = generation.request
        rollouts = self.rollouts
        assert rollouts is not None
        is_streaming = request.params.output_kind is RequestOutputKind.DELTA
        seed = request.tail_seed
        spec = GroupSpec(
            plan,
            request,
            request.request_id,
            generation.prompt_key,
            seed,
            delivers_early=is_streaming,
            on_abort=OnAbort.ANSWER,
            request_tokens=request.tokens,
        )
        async with self.gate.enter():
            aborts_before = rollouts.abort_all_count
            allocation = await rollouts.allocator.allocate(plan, generation.prompt_key)
            # The queue may have room for fewer candidates than the policy wants.
            allocation = replace(allocation, candidates=generation.ticket.resize_within_limits(allocation.candidates))
            run = rollouts.start(spec, allocation, generation.ticket.split(allocation.candidates))
            if rollouts.abort_all_count != aborts_before:
                # All groups were aborted while this group waited for its cohort.
                run.abort()
            try:
                # Choice indices are shuffled: in the order of delivery they would reveal the rank by length.
                rng = random.Random(repr(seed) if seed else None)
                choice_indices = rng.sample(range(plan.size), plan.size)
                selected: dict[int, RequestOutput] = {}
                async for trajectory in run.trajectories():
                    await prepare_output(trajectory.output, generation.route)
                    generation.turn.rank = self.ranks.rank_of(request.request_id, request.options)
                    if not is_streaming:
                        selected[trajectory.index] = trajectory.output
                        continue
                    index = choice_indices.pop()
                    output = to_choice(
                        request.request_id,
                        trajectory.output,
                        index,
                        is_last=trajectory.last,
                    )
                    # Only the first output of a stream has log-probs of the prompt.
                    if len(choice_indices) < plan.size - 1:
                        output.prompt_logprobs = None
                    yield output

                if not is_streaming:
                    # One output, with the choices in the order of the candidates.
                    first, *others = (selected[candidate] for candidate in sorted(selected))
                    merged = to_choice(
                        request.request_id,
                        first,
                        0,
                        is_last=True,
                    )
                    for index, other in enumerate(others, 1):
                        merged.outputs.append(replace(other.outputs[0], index=index))
                    yield merged
            finally:
                run.cancel()

    async def _generate_joined(self, generation: Generation, plan: Plan) -> AsyncGenerator[RequestOutput, None]:
        request = generation.request
        assert self.rollouts is not None
        joiner = self.rollouts.joiner
        join_request = self._make_join_request(generation, plan)
        with ExitStack() as joined:

            def on_join(group_id: str) -> None:
                # Before the request's candidate starts, so that it starts on the engine of its group.
                generation.route.group_ids.append(group_id)
                joined.enter_context(self.ranks.join_group(request.request_id, group_id))

            # A closed gate must not keep out a request that a running group waits for.
            async with self.gate.enter(skip_wait=joiner.has_open_group(join_request.join_key)):
                output = await joiner.join(join_request, on_join)
            generation.turn.rank = self.ranks.rank_of(request.request_id, request.options)
            await prepare_output(output, generation.route)
        yield to_choice(
            request.request_id,
            output,
            0,
            is_last=True,
        )

    def _make_join_request(self, generation: Generation, plan: Plan) -> JoinRequest[PromptRequest]:
        request = generation.request
        # Callers with different keys must not answer each other's requests.
        join_key = (
            f"{generation.turn.caller}/{plan.policy}/{plan.size}/{generation.group_name}/{generation.request.join_key}"
        )
        return JoinRequest(
            request,
            request.request_id,
            plan,
            generation.prompt_key,
            join_key,
            generation.ticket,
            generation.group_name,
            request.tokens,
        )

    def replace_output_reader(self) -> None:
        engine_core: Any = self.engine_core
        get_output = engine_core.get_output_async

        async def get_output_after_yielding() -> Any:
            # vLLM's task has processed the previous outputs.
            self.is_processing_outputs = False
            # Reading from a queue that is not empty does not yield to the event loop. If the engine is faster than this
            # process, no other task would run.
            await asyncio.sleep(0)
            try:
                outputs = await get_output()
            except EngineDeadError:
                self.on_death()
                raise
            self.is_processing_outputs = True
            return outputs

        engine_core.get_output_async = get_output_after_yielding

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        if not internal:
            ids += self.turns_named(ids)
        await super().abort(ids, internal=internal)
        # A group has the id of its request.
        if not internal and self.rollouts is not None:
            for group_id in ids:
                self.rollouts.abort(group_id)

    async def hand_back(self) -> None:
        """Abort requests with `answers_at_stop`, and wait until their callers have the partial answers."""
        ids = list(self._ids_answered_at_stop)
        if ids:
            await self.abort(ids)
        # A request that has not started cannot be aborted yet, and a reader may have stalled.
        with suppress(TimeoutError):
            async with asyncio.timeout(HAND_BACK_TIMEOUT):
                while set(ids).intersection(self._ids_answered_at_stop):
                    await asyncio.sleep(HAND_BACK_POLL_SECONDS)

    def fail(self, error: DartsError) -> None:
        self.gate.fail(error)
        if self.rollouts is not None:
            self.rollouts.fail_all(error)
        self.output_processor.propagate_error(error)

    def end_sessions(self, error: DartsError) -> None:
        """End all groups of sessions with an error: their harnesses may wait for events."""
        if self.sessions is not None:
            self.sessions.fail_all(error)

    def shutdown(self, timeout: float | None = None) -> None:
        # vLLM calls this even if the constructor failed.
        if self.died is None and hasattr(self, "engine_core"):
            self.died = self.errored
        super().shutdown(timeout=timeout)
