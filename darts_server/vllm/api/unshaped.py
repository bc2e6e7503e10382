"""The part of the engine's client for requests that are no groups: single requests, and turns of agents' sessions."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any
from uuid import uuid4
from weakref import finalize

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from darts_server.exceptions import DartsError, InvalidRequest, SessionOver
from darts_server.rollout.counted import Member
from darts_server.rollout.plan import Plan
from darts_server.rollout.sessions.registry import SessionRegistry
from darts_server.rollout.sessions.session_group import AgentSession, SessionTurn, StoppedAs
from darts_server.rollout.turns import Turn, Turns
from darts_server.serving.admission import Admission, Ticket
from darts_server.types import FinishReason
from darts_server.vllm.api.controlled import ControlledLLM
from darts_server.vllm.api.engine import FINISH_REASONS, VllmRollouts
from darts_server.vllm.api.routes import RouteCall
from darts_server.vllm.fleet.ranks import RANK, add_placement
from darts_server.vllm.requests.logprob_json import make_text_and_keep_arrays
from darts_server.vllm.requests.outputs import ABORTED, NoTokens, make_deferred_fields, read_logprobs
from darts_server.vllm.requests.prompt_request import PromptRequest
from darts_server.vllm.requests.sampling import check_logprobs

ABORT_POLL_SECONDS = 0.02


@dataclass(slots=True, eq=False)
class Generation:
    """One call of ``generate()``, passed on until its last output.

    ``turn``: gets the rank of the engine before the first output. ``turns``: remembers the answers. ``plan``: None if
    vLLM serves the request alone. ``prompt_key``: key of learned lengths, or empty. ``group_name``: the
    caller's name for a group of single requests. ``answers_at_stop``: whether the caller gets a partial answer instead
    of an error if the server stops. ``member``: place in a group that is only counted.
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


class UnshapedLLM(ControlledLLM):
    """Serves a request as vLLM does, on the engine that has its prefix."""

    rollouts: VllmRollouts | None = None
    sessions: SessionRegistry | None = None
    """Sessions of agents, whose turns are no groups."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        # Running requests of sessions, by their ids.
        self._turns: dict[str, SessionTurn] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def admission(self) -> Admission:
        if self.rollouts is None:
            return Admission(lambda: 0, None)
        return self.rollouts.admission

    async def _generate_unshaped(self, generation: Generation) -> AsyncGenerator[RequestOutput, None]:
        request = generation.request
        turn = generation.turn
        member = generation.member
        # With priorities, the request waits in line with the candidates of groups.
        order = None
        if self.rollouts is not None:
            starting_order = self.rollouts.make_starting_order(prompt_key=None)
            carried_tokens = 0
            order = starting_order(carried_tokens)
        # `Ranks` counts the request on its engine until it ends.
        with ExitStack() as counted:
            if member is not None:
                counted.enter_context(self.ranks.join_group(request.request_id, member.group.group_id))
                turn.rank = counted.enter_context(self.ranks.count_candidate(request.request_id))
            options = add_placement(self.vllm_config, request.options, turn.rank, order)
            # The caller's choice comes first.
            turn.rank = options.get(RANK)
            if member is None and turn.rank is not None:
                counted.enter_context(self.ranks.count_request(turn.rank))

            outputs = super().generate(request.prompt, request.params, request.request_id, **options)
            async with self.gate.enter(unshaped=True), aclosing(outputs):
                generation.ticket.mark_started()
                if member is not None:
                    member.start()
                try:
                    async for output in outputs:
                        if output.finished:
                            await prepare_output(output, generation.route)
                        yield output
                except Exception as error:
                    # vLLM wraps the error of `fail` in an exception of its own.
                    if isinstance(error.__cause__, DartsError):
                        raise error.__cause__ from None
                    raise

    def _count_tokens(self, request_id: str) -> int:
        # Callers choose ids, so several running requests may have this id.
        internal_ids = self.output_processor.external_req_ids.get(request_id, ())
        return max((self.held_requests.count_tokens(internal_id) or 0 for internal_id in internal_ids), default=0)

    # --- turns of sessions ------------------------------------------------------

    def _begin_turn(
        self, agent_session: AgentSession, request: PromptRequest, route: RouteCall
    ) -> AsyncGenerator[RequestOutput, None]:
        """Serve a turn of a session, without waiting for siblings.

        Raises:
            InvalidRequest: the request asks for several answers, or its log-probs would be of another distribution.
            SessionOver
            Overloaded
        """
        if request.params.n > 1 or route.beams:
            raise InvalidRequest("n", "must be 1 for a turn of a session; leave out n and use_beam_search")
        check_logprobs(request.params, self.model_config.logprobs_mode, "logprobs")
        # Training needs log-probs, whether the harness asks for them or not.
        if request.params.logprobs is None:
            params = request.params.clone()
            params.logprobs = 0
            request = replace(request, params=params)
        route.agent_session = agent_session
        # Some harnesses send one X-Request-Id with all requests. The tokens of another request must not count for this
        # session, and the end of this session must abort no other request.
        request_id = f"{request.request_id}-{uuid4().hex[:8]}"
        request = replace(request, request_id=request_id)
        try:
            turn = agent_session.group.begin_turn(
                agent_session,
                partial(self._count_tokens, request_id),
                partial(self._abort_turn, request_id),
            )
        except SessionOver as error:
            wants_empty_answer = error.status == HTTPStatus.OK
            if not wants_empty_answer:
                raise
            return _answer_ended_session(agent_session, request)
        try:
            ticket = self.admission.admit(1)
        except DartsError:
            turn.leave(0)
            raise
        self._turns[request_id] = turn
        # The engine of the latest turn has the prefix.
        generation = Generation(request, route, ticket, Turn(rank=agent_session.rank))
        outputs = self._serve_turn(generation, turn)

        def release() -> None:
            ticket.release()
            self._end_turn(turn, request_id, tokens=0)

        call_at_deletion(outputs, release)
        return outputs

    def turns_named(self, request_ids: Sequence[str]) -> list[str]:
        # `_begin_turn` has appended a suffix to the caller's id.
        return [turn_id for turn_id in self._turns if turn_id.rpartition("-")[0] in request_ids]

    def _end_turn(self, turn: SessionTurn, request_id: str, tokens: int) -> None:
        turn.leave(tokens)
        self._turns.pop(request_id, None)

    def _abort_turn(self, request_id: str) -> None:
        async def abort() -> None:
            # An abort has no effect on a request that has not reached the engine.
            while request_id in self._turns:
                await self.abort(request_id)
                await asyncio.sleep(ABORT_POLL_SECONDS)

        task = asyncio.create_task(abort(), name="darts-session-abort")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _serve_turn(self, generation: Generation, turn: SessionTurn) -> AsyncGenerator[RequestOutput, None]:
        params = generation.request.params
        is_delta = params.output_kind is RequestOutputKind.DELTA
        tokens: list[int] = []
        logprobs: list[float] = []
        prompt: Sequence[int] = ()
        try:
            await self._wait_for_gate(turn)
            if turn.session_ended.is_set():
                async for output in _answer_ended_session(turn.session, generation.request):
                    yield output
                return
            async with aclosing(self._generate_unshaped(generation)) as outputs:
                async for output in outputs:
                    prompt = output.prompt_token_ids or prompt
                    choice = output.outputs[0]
                    # Without deltas, each output has all tokens so far.
                    if not is_delta:
                        tokens = []
                        logprobs = []
                    tokens.extend(choice.token_ids)
                    logprobs.extend(await read_logprobs(choice))
                    reason = choice.finish_reason
                    if reason is not None:
                        # The turn is counted before its last output is read.
                        turn.session.rank = generation.turn.rank
                        is_aborted = reason == ABORTED
                        # With any other reason, such as an error of vLLM, the harness gets no answer.
                        if turn.is_stopped or reason in FINISH_REASONS:
                            turn.finish(prompt, tokens, logprobs)
                        # Some harnesses do not know "abort".
                        if is_aborted and turn.is_stopped and turn.session.group.spec.stopped_as is StoppedAs.LENGTH:
                            choice.finish_reason = FinishReason.LENGTH.value
                        # vLLM's streams skip an event whose tokens are false, and so its finish reason.
                        if is_delta and not choice.token_ids:
                            choice.token_ids = NoTokens()
                        generation.route.has_aborted_answer |= choice.finish_reason == ABORTED
                    yield output
        finally:
            generation.ticket.release()
            self._end_turn(turn, generation.request.request_id, len(tokens))

    async def _wait_for_gate(self, turn: SessionTurn) -> None:
        if self.gate.is_closed:
            # A turn of a session that has ended needs no engine.
            waiting = {asyncio.create_task(self.gate.wait_open()), asyncio.create_task(turn.session_ended.wait())}
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()


async def prepare_output(output: RequestOutput, route: RouteCall) -> None:
    """Make the fields that the route reads of a final output. Other tasks run meanwhile."""
    if route.fragments is None:
        await make_deferred_fields(output)
    else:
        await make_text_and_keep_arrays(output)


def call_at_deletion(outputs: AsyncGenerator[RequestOutput, None], release: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()

    def release_in_loop() -> None:
        # The garbage collector may run in any thread, and after the loop was closed.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(release)

    # The `finally` of a generator that is never iterated does not run.
    finalize(outputs, release_in_loop).atexit = False


async def _answer_ended_session(
    agent_session: AgentSession,
    request: PromptRequest,
) -> AsyncGenerator[RequestOutput, None]:
    """Raise `SessionOver`, or yield an answer without tokens."""
    error = agent_session.group.over_error(agent_session)
    # The owner of the group chooses status 200 for a harness that understands no error.
    wants_empty_answer = error.status == HTTPStatus.OK
    if not wants_empty_answer:
        raise error
    is_delta = request.params.output_kind is RequestOutputKind.DELTA
    choice = CompletionOutput(
        index=0,
        text="",
        token_ids=NoTokens() if is_delta else [],
        cumulative_logprob=None,
        logprobs=None if request.params.logprobs is None else [],
        finish_reason=agent_session.group.spec.stopped_as.value,
    )
    yield RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt_fields.get("prompt"),
        prompt_token_ids=request.prompt_fields.get("prompt_token_ids"),
        prompt_logprobs=None,
        outputs=[choice],
        finished=True,
    )
