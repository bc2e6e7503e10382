"""Our changes to vLLM's routes: shaping options, our errors in their answers, streams with several choices.

Shaping options reach ``generate()`` in a context variable, since vLLM's handlers pass only fields that they know.

An error before the answer begins reaches FastAPI's handlers, which include ours. Four kinds of errors do not:

* In a stream, vLLM's generators turn the error into an event by ``create_error_response``.
* Streams of the Responses API break the connection. In the background they end without an event, and a response that is
  not streamed stays queued.
* ``/v1/messages`` answers the error itself, and its stream cannot parse the chat route's error event.
* The handlers of some control routes catch all exceptions and answer 500.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, partial, wraps
from http import HTTPStatus
from logging import getLogger
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from openai.types.responses import ResponseErrorEvent
from pydantic import BaseModel, create_model
from vllm.outputs import CompletionOutput, RequestOutput

from darts_server.caller import caller
from darts_server.exceptions import DartsError, InvalidRequest
from darts_server.identifiers import SESSION_HEADERS, check_name
from darts_server.rollout.sessions.session_group import AgentSession
from darts_server.serving.admission import Ticket
from darts_server.types import OFF, RequestOptions
from darts_server.vllm.compat import GENERATION_HANDLERS, find_stream_error

logger = getLogger(__name__)

# vLLM prefers this header to the ``request_id`` of a body.
REQUEST_ID_HEADER = "X-Request-Id"
XARGS = "vllm_xargs"
SAMPLING_PARAMS = "sampling_params"
ABORT = "/abort_requests"
FINISH_UPDATE = "/finish_weight_update"
CHECK_FINITE = "check_finite"
CONTROL_PATHS = frozenset({"/pause", "/resume", "/scale_elastic_ep", ABORT})
"""Control routes whose handlers catch all exceptions."""

Handler = Callable[..., Awaitable[Any]]
Fragments = dict[str, tuple[bytes, Iterator[str]]]
"""Placeholders in an answer, and the parts of the JSON that replaces each, by the unique name that is in the
placeholder. See `darts_server.vllm.api.logprob_answers`."""
ErrorFields = Callable[[DartsError], Mapping[str, Any]]
"""Returns OpenAI's error object: ``message``, ``type``, ``param`` and ``code``."""
ReadOptions = Callable[[Mapping[str, str]], RequestOptions]
CheckOptions = Callable[[RequestOptions, Mapping[str, Any]], None]
"""Checks options of headers and model name together with ``vllm_xargs``. Raises `InvalidRequest`."""


class Extension(Protocol):
    """Reads further fields of a parsed request, and adds fields to its answer."""

    def prepare_request(self, request: Any) -> None:
        """Raises `InvalidRequest`."""

    def complete_answer(self, request: Any, answer: Any) -> None: ...


def extend_routes(
    application: FastAPI,
    error_fields: ErrorFields,
    read_options: ReadOptions,
    raw_names: Set[str],
    check_options: CheckOptions,
    extensions: Sequence[Extension],
) -> None:
    """Let vLLM's generation routes read our options, and all its routes answer our errors.

    ``raw_names``: names of models that are not shaped.
    """
    for route in application.routes:
        if not isinstance(route, APIRoute) or route.dependant.call is None:
            continue
        if route.path in CONTROL_PATHS:
            route.dependant.call = _raise_recorded_errors(route.dependant.call, is_abort=route.path == ABORT)
        elif route.path == FINISH_UPDATE:
            route.dependant.call = _read_check_finite(route.dependant.call)

    # The objects of the state exist only for the tasks that the model supports.
    state = application.state
    for attribute, method in GENERATION_HANDLERS:
        serving = getattr(state, attribute, None)
        if serving is not None:
            handler = getattr(serving, method)
            call = partial(
                _call_with_options,
                handler,
                read_options,
                raw_names,
                check_options,
                extensions,
            )
            setattr(serving, method, call)
            serving.create_error_response = partial(_make_error_response, serving.create_error_response, error_fields)

    change_serving = {
        "openai_serving_responses": _report_responses_errors,
        "anthropic_serving_messages": _report_messages_errors,
        "serving_tokens": _allow_several_choices,
    }
    for attribute, change in change_serving.items():
        serving = getattr(state, attribute, None)
        if serving is not None:
            change(serving)


# --- options of generation routes -------------------------------------------------


@dataclass(slots=True)
class RouteCall:
    """A call of a generation route, as ``generate()`` reads it and adds to it.

    ``session_names``: names of its trajectory, in the order of `SESSION_HEADERS`. ``beams``: number of beams of a beam
    search over all its prompts. ``group_ids``: groups that serve the call. ``keyed_prompts``: prompts that share the
    caller's prompt key. ``agent_session``: the session that the call is a turn of. ``fragments``: None if vLLM writes
    the whole answer.
    """

    options: RequestOptions = field(default_factory=RequestOptions)
    session_names: tuple[str, ...] = ()
    beams: int = 0
    beam_ticket: Ticket | None = None
    group_ids: list[str] = field(default_factory=list)
    keyed_prompts: set[str] = field(default_factory=set)
    has_aborted_answer: bool = False
    agent_session: AgentSession | None = None
    fragments: Fragments | None = None


route_call: ContextVar[RouteCall | None] = ContextVar("darts_request", default=None)


async def _call_with_options(
    handler: Handler,
    read_options: ReadOptions,
    raw_names: Set[str],
    check_options: CheckOptions,
    extensions: Sequence[Extension],
    request: Any,
    raw_request: Request,
) -> Any:
    """Call vLLM's ``handler`` with `route_call` set."""
    headers = raw_request.headers
    # vLLM's handler logs the id, so check it first.
    check_name("request_id", str(getattr(request, "request_id", None) or ""))
    check_name(REQUEST_ID_HEADER, headers.get(REQUEST_ID_HEADER.lower(), ""))
    for extension in extensions:
        extension.prepare_request(request)

    # Options come from headers, the model's name and extra arguments.
    options = read_options(headers)
    if getattr(request, "model", None) in raw_names:
        options = replace(options, policy=OFF)
    params = getattr(request, SAMPLING_PARAMS, None)
    if params is not None:
        await move_xargs(params, raw_request)
    xargs: Mapping[str, Any] = getattr(request, XARGS, None) or getattr(params, "extra_args", None) or {}
    # The Responses API calls `generate` only while its stream is read, after the status was sent.
    is_responses_api = hasattr(request, "input") and hasattr(request, "previous_response_id")

    # A beam search calls `generate` for each token of each beam, and is admitted once.
    beams = 0
    if getattr(request, "use_beam_search", False):
        policy = xargs.get("darts_policy", options.policy)
        if policy not in (None, OFF):
            raise InvalidRequest("policy", f"{policy!r} cannot shape a beam search; omit the policy or use_beam_search")
        beams = getattr(request, "n", None) or 1
        prompts = getattr(request, "prompt", None)
        # A list of integers is one prompt.
        if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
            beams *= len(prompts)
    session_names = []
    for header in SESSION_HEADERS:
        session_name = headers.get(header)
        if session_name:
            check_name(header, session_name)
            session_names.append(session_name)

    # vLLM's handler calls `generate`, which reads the context variable.
    call = RouteCall(options, tuple(session_names), beams)
    state = raw_request.state
    # An echo joins the log-probs of the prompt and of the answer.
    if not getattr(request, "stream", False) and not getattr(request, "echo", False):
        call.fragments = getattr(state, "darts_fragments", None)
    token = route_call.set(call)
    try:
        if is_responses_api:
            check_options(options, xargs)
        answer = await handler(request, raw_request)
    finally:
        route_call.reset(token)
        if call.beam_ticket is not None:
            call.beam_ticket.release()

    for extension in extensions:
        extension.complete_answer(request, answer)
    metadata = getattr(state, "request_metadata", None)
    if call.group_ids and metadata is not None:
        # The id of the response finds its groups, unless the group is one that several requests have joined.
        is_joined = len(set(call.group_ids)) == 1 and not call.group_ids[0].startswith(metadata.request_id)
        state.darts_group_id = call.group_ids[0] if is_joined else metadata.request_id
    if is_responses_api and isinstance(answer, AsyncGenerator):
        return _stream_in_context(call, answer)
    if call.agent_session is not None:
        return _add_session_state(call.agent_session, answer, raw_request)
    return answer


async def _stream_in_context(call: RouteCall, answer: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    # Not reset, because the task that reads the stream ends with it.
    route_call.set(call)
    async with aclosing(answer):
        async for event in answer:
            # `generate` has set the session by then.
            if call.agent_session is not None and getattr(event, "type", None) in RESPONSE_ENDS:
                setattr(event, SESSION_FIELD, _describe_session(call.agent_session))
            yield event


# --- turns of sessions ------------------------------------------------------------

SESSION_FIELD = "darts_session"
FINISHED_CHOICE = '"finish_reason":"'
"""Part of the event of a stream in which a choice ends. Text of an answer has its quotation marks escaped."""
MESSAGE_END = "event: message_delta\n"
"""Begin of the event of a stream of ``/v1/messages`` in which the message ends."""
RESPONSE_ENDS = ("response.completed", "response.incomplete", "response.failed")
ANSWER_FIELDS = ("choices", "output")
"""Fields that errors do not have. The second is of the Responses API."""


def _describe_session(agent_session: AgentSession) -> dict[str, Any]:
    state = agent_session.state
    return {
        "id": agent_session.session_id,
        "state": "over" if state.is_over else "open",
        "end": state.end_reason,
        "turns": state.turns,
        "tokens": agent_session.tokens,
    }


def _add_session_state(agent_session: AgentSession, answer: Any, raw_request: Request) -> Any:
    """Add the state of a session as a header and a field, or as a field in a stream."""
    if isinstance(answer, AsyncGenerator):
        return _stream_with_session_state(agent_session, answer)
    state = _describe_session(agent_session)
    # The middleware makes a header of it.
    raw_request.state.darts_session_state = "; ".join(f"{name}={value}" for name, value in state.items())
    # Errors keep their form.
    if isinstance(answer, BaseModel) and any(hasattr(answer, name) for name in ANSWER_FIELDS):
        if agent_session.state.is_over:
            # An agent would run the tools, and send a further request to a session that is over.
            _drop_tool_calls(getattr(answer, "choices", ()), agent_session.group.spec.stopped_as)
        return _add_session_field(answer, state)
    return answer


def _add_session_field(answer: BaseModel, state: Mapping[str, Any]) -> BaseModel:
    values = {**dict(answer), SESSION_FIELD: state}
    # Not validated: vLLM has made the other fields.
    return _extend_with_session_field(type(answer)).model_construct(None, **values)


@cache
def _extend_with_session_field(model: type[BaseModel]) -> type[BaseModel]:
    # Some of vLLM's models accept no other fields.
    fields: dict[str, Any] = {SESSION_FIELD: (dict[str, Any], ...)}
    return create_model(model.__name__, __base__=model, **fields)


def _drop_tool_calls(choices: Iterable[Any], finish_reason: str) -> None:
    for choice in choices:
        message = getattr(choice, "message", None)
        if message is not None and message.tool_calls:
            message.tool_calls = []
            choice.finish_reason = finish_reason


async def _stream_with_session_state(
    agent_session: AgentSession,
    answer: AsyncGenerator[Any, None],
) -> AsyncGenerator[Any, None]:
    async with aclosing(answer):
        async for event in answer:
            if isinstance(event, str) and FINISHED_CHOICE in event:
                # The turn was counted before its last output was read.
                event = _insert_session_field(event, _describe_session(agent_session))
            yield event


def _insert_session_field(event: str, state: Mapping[str, Any]) -> str:
    # At the end of the event's JSON object, which is not parsed.
    before, brace, after = event.rpartition("}")
    return f'{before},"{SESSION_FIELD}":{json.dumps(state)}{brace}{after}'


async def move_xargs(params: Any, raw_request: Request) -> None:
    """Move extra arguments of the token route to ``extra_args`` of its sampling parameters.

    The route's models have no ``vllm_xargs`` and drop them.

    Raises:
        InvalidRequest: the arguments are no object, or differ between the two places.
    """
    # Starlette has kept the body and its JSON.
    if XARGS.encode() not in await raw_request.body():
        return
    sent = await raw_request.json()
    places = {XARGS: sent.get(XARGS), f"{SAMPLING_PARAMS}.{XARGS}": (sent.get(SAMPLING_PARAMS) or {}).get(XARGS)}
    merged = dict(params.extra_args or {})
    for place, xargs in places.items():
        if xargs is None:
            continue
        if not isinstance(xargs, dict):
            raise InvalidRequest(place, "must be an object; correct or omit it")
        for name, value in xargs.items():
            if merged.setdefault(name, value) != value:
                raise InvalidRequest(f"{place}.{name}", "has another value in another place; send it once")
    params.extra_args = merged or None


# --- control routes -------------------------------------------------------------


@dataclass(slots=True)
class _ControlCall:
    is_abort_pending: bool
    error: DartsError | None = None


_control_call: ContextVar[_ControlCall | None] = ContextVar("darts_control_call", default=None)


@contextmanager
def record_darts_error() -> Iterator[None]:
    """Record an error of ours that the block raises, for `_raise_recorded_errors`."""
    try:
        yield
    except DartsError as error:
        call = _control_call.get()
        if call is not None and call.error is None:
            call.error = error
        raise


def take_route_abort() -> bool:
    """Return True once per call of ``/abort_requests``."""
    call = _control_call.get()
    if call is None or not call.is_abort_pending:
        return False
    call.is_abort_pending = False
    return True


def _raise_recorded_errors(handler: Handler, *, is_abort: bool) -> Handler:
    """Return a handler that raises our recorded error, even if ``handler`` catches it."""

    @wraps(handler)
    async def handle(**values: Any) -> Any:
        # The handler's first call of `abort` takes the flag, see `take_route_abort`.
        call = _ControlCall(is_abort_pending=is_abort)
        token = _control_call.set(call)
        answer = None
        try:
            answer = await handler(**values)
        except Exception:
            if call.error is None:
                raise
        finally:
            _control_call.reset(token)
        # Our error takes the place of vLLM's answer or exception.
        if call.error is not None:
            raise call.error from None
        return answer

    return handle


checks_finite: ContextVar[bool] = ContextVar("darts_checks_finite", default=True)
"""Whether the update that ends in this call fails if the model has NaN or infinity."""


def _read_check_finite(handler: Handler) -> Handler:
    @wraps(handler)
    async def handle(raw_request: Request, **values: Any) -> Any:
        parameter = raw_request.query_params.get(CHECK_FINITE, "true")
        if parameter not in ("true", "false"):
            raise InvalidRequest(CHECK_FINITE, "must be true or false")
        token = checks_finite.set(parameter == "true")
        try:
            return await handler(raw_request=raw_request, **values)
        finally:
            checks_finite.reset(token)

    return handle


# --- errors of generation routes --------------------------------------------------


def _make_error_response(
    create_error_response: Callable[..., Any],
    error_fields: ErrorFields,
    message: Any,
    *args: Any,
    **more: Any,
) -> Any:
    """Stand in for vLLM's ``create_error_response``."""
    # A message is a text or an error. vLLM also passes it by this name.
    if not isinstance(message, DartsError):
        return create_error_response(message, *args, **more)
    fields = error_fields(message)
    status = HTTPStatus(fields["code"])
    response = create_error_response(
        fields["message"],
        err_type=fields["type"],
        status_code=status,
        param=fields["param"],
    )
    # vLLM removes parts of a message that look like a path.
    response.error.message = fields["message"]
    return response


def _report_responses_errors(responses: Any) -> None:
    """Report errors and aborts of the Responses API."""
    make_response = responses.responses_full_generator
    stream = responses.responses_stream_generator
    stream_stored = responses.responses_background_stream_generator
    run = responses._run_background_request

    async def make_response_or_cancel(*args: Any, **more: Any) -> Any:
        response = await make_response(*args, **more)
        # vLLM reports an aborted response as "cancelled" for one family of models, and as "completed" for all others.
        call = route_call.get()
        has_aborted_answer = call is not None and call.has_aborted_answer
        if has_aborted_answer and getattr(response, "status", None) in ("completed", "incomplete"):
            response.status = "cancelled"
            response.incomplete_details = None
        return response

    async def mark_failed(response_id: str) -> None:
        async with responses.response_store_lock:
            stored = responses.response_store.get(response_id)
            if stored is not None and stored.status not in ("completed", "cancelled"):
                stored.status = "failed"

    async def stream_with_error(request: Any, *args: Any, **more: Any) -> AsyncGenerator[Any, None]:
        last_number = -1
        try:
            async with aclosing(stream(request, *args, **more)) as events:
                async for event in events:
                    last_number = getattr(event, "sequence_number", last_number)
                    yield event
        except Exception as error:
            if not isinstance(error, DartsError):
                logger.exception("a stream of the Responses API failed")
            await mark_failed(request.request_id)
            fields = responses.create_error_response(error).error
            yield ResponseErrorEvent(
                type="error",
                code=str(fields.code),
                message=fields.message,
                param=fields.param,
                sequence_number=last_number + 1,
            )

    async def stream_stored_until_error(*args: Any, **more: Any) -> AsyncGenerator[Any, None]:
        # vLLM's generator ends only with the event of the response's completion.
        async with aclosing(stream_stored(*args, **more)) as events:
            async for event in events:
                yield event
                if isinstance(event, ResponseErrorEvent):
                    return

    async def run_in_background(request: Any, *args: Any, **more: Any) -> None:
        try:
            await run(request, *args, **more)
        except DartsError as error:
            logger.warning("response %s, which runs in the background, failed: %s", request.request_id, error)
            await mark_failed(request.request_id)

    def raise_error(error: Exception) -> None:
        raise error

    # vLLM's method converts an engine's error to an event that vLLM has no type for.
    responses._convert_generation_error_to_streaming_response = raise_error
    responses.responses_full_generator = make_response_or_cancel
    responses.responses_stream_generator = stream_with_error
    responses.responses_background_stream_generator = stream_stored_until_error
    responses._run_background_request = run_in_background


def _report_messages_errors(messages: Any) -> None:
    """Let ``/v1/messages`` return this server's errors and the state of the session."""
    chat = messages.create_chat_completion
    convert_stream = messages.message_stream_converter
    convert_response = messages.messages_full_converter

    async def create_or_report(*args: Any, **more: Any) -> Any:
        try:
            return await chat(*args, **more)
        except DartsError as error:
            # The middleware adds the headers of the error.
            caller.get().answered_error = error
            return messages.create_error_response(error)

    def convert_with_session(response: Any) -> Any:
        state = getattr(response, SESSION_FIELD, None)
        converted = convert_response(response)
        return converted if state is None else _add_session_field(converted, state)

    async def convert_with_errors(chunks: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
        stream_error: Mapping[str, Any] | None = None
        session_state: Mapping[str, Any] | None = None

        async def read_until_error() -> AsyncGenerator[Any, None]:
            nonlocal stream_error, session_state
            async with aclosing(chunks):
                async for chunk in chunks:
                    stream_error = find_stream_error(chunk)
                    # vLLM's converter cannot parse the error, and would report its own failure to parse it.
                    if stream_error is not None:
                        return
                    # The converter drops our field.
                    if isinstance(chunk, str) and f'"{SESSION_FIELD}"' in chunk:
                        session_state = json.loads(chunk.removeprefix("data: "))[SESSION_FIELD]
                    yield chunk

        async with (
            aclosing(read_until_error()) as chunks_before_error,
            aclosing(convert_stream(chunks_before_error)) as events,
        ):
            async for event in events:
                if session_state is not None and event.startswith(MESSAGE_END):
                    event = _insert_session_field(event, session_state)
                yield event
        if stream_error is not None:
            # Anthropic's error event.
            error = {"type": stream_error["type"], "message": stream_error["message"]}
            data = {"type": "error", "error": error}
            yield f"event: error\ndata: {json.dumps(data)}\n\n"

    messages.create_chat_completion = create_or_report
    messages.messages_full_converter = convert_with_session
    messages.message_stream_converter = convert_with_errors


# --- the token route ----------------------------------------------------------------


def _allow_several_choices(serving_tokens: Any) -> None:
    stream = serving_tokens.serve_tokens_stream_generator
    serving_tokens.serve_tokens_stream_generator = lambda request, outputs, *more: stream(
        request, _add_missing_choices(outputs, request.sampling_params.n), *more
    )


async def _add_missing_choices(
    outputs: AsyncGenerator[RequestOutput, None], choices: int
) -> AsyncGenerator[RequestOutput, None]:
    """Add missing choices to the first output."""
    is_first = True
    async with aclosing(outputs):
        async for output in outputs:
            if is_first:
                is_first = False
                missing = set(range(choices)) - {choice.index for choice in output.outputs}
                # vLLM's generator sizes its list of token counts by the first output, and would fail at another
                # choice later. It sends no event for an empty choice.
                empty = [CompletionOutput(index, "", [], None, None) for index in sorted(missing)]
                output = copy(output)
                output.outputs = [*output.outputs, *empty]
            yield output
