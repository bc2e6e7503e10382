"""Our errors in the answers of vLLM's routes, which answer every exception that they do not know with a 500.

An error that is raised before its answer begins reaches FastAPI's handlers, ours among them. Three kinds do not:

* in a stream, whose status was sent, vLLM's generators turn the error into an event by ``create_error_response``;
* streams of the Responses API pass it on, and the connection breaks off; in the background they end with no event, and
  what is not streamed stays queued;
* ``/v1/messages`` turns it into an answer itself, and in a stream fails to parse the event that the chat route sends.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import wraps
from http import HTTPStatus
from logging import getLogger
from typing import Any, Literal

from pydantic import BaseModel
from starlette.datastructures import State

from darts_server.exceptions import DartsError
from darts_server.serving.admission import caller
from darts_server.vllm.compat import GENERATION_HANDLERS

logger = getLogger(__name__)

ERROR_EVENT = 'data: {"error":'

MakeError = Callable[..., Any]
"""vLLM's: takes an exception, or a message with ``err_type``, ``status_code`` and ``param``."""
ErrorFields = Callable[[DartsError], Mapping[str, Any]]
"""Returns OpenAI's error object: ``message``, ``type``, ``param`` and ``code``."""
Handler = Callable[..., Awaitable[Any]]
Stream = Callable[..., AsyncGenerator[Any, None]]


class ErrorEvent(BaseModel):
    """OpenAI's event for an error in a stream of the Responses API."""

    type: Literal["error"] = "error"
    code: str
    message: str
    param: str | None
    sequence_number: int


def attach(state: State, fields_of: ErrorFields) -> None:
    """Let the generation routes answer our errors as FastAPI's handlers do, with ``fields_of`` an error."""
    for attribute, _ in GENERATION_HANDLERS:
        if (serving := getattr(state, attribute, None)) is not None:
            serving.create_error_response = _with_own_errors(serving.create_error_response, fields_of)
    if (responses := getattr(state, "openai_serving_responses", None)) is not None:
        # vLLM's converts an error of the engine to an event that it has no type for.
        responses._convert_generation_error_to_streaming_response = _raise
        responses.responses_stream_generator = _ending_in_event(responses)
        responses._run_background_request = _marking_failed(responses)
        responses.responses_background_stream_generator = _ending_with_error(
            responses.responses_background_stream_generator
        )
    if (messages := getattr(state, "anthropic_serving_messages", None)) is not None:
        chat = messages.create_chat_completion
        messages.create_chat_completion = _answering_own_errors(chat, messages.create_error_response)
        messages.message_stream_converter = _passing_errors_on(messages.message_stream_converter)


def _with_own_errors(make_error: MakeError, fields_of: ErrorFields) -> MakeError:
    @wraps(make_error)
    def make(message: Any, *args: Any, **more: Any) -> Any:
        if not isinstance(message, DartsError):
            return make_error(message, *args, **more)
        fields = fields_of(message)
        status = HTTPStatus(fields["code"])
        response = make_error(fields["message"], err_type=fields["type"], status_code=status, param=fields["param"])
        response.error.message = fields["message"]  # vLLM removes what looks like a path
        return response

    return make


def _raise(error: Exception) -> None:
    raise error


def _ending_in_event(responses: Any) -> Stream:
    stream, make_error = responses.responses_stream_generator, responses.create_error_response

    @wraps(stream)
    async def stream_with_error(request: Any, *args: Any, **more: Any) -> AsyncGenerator[Any, None]:
        number = -1
        try:
            async with aclosing(stream(request, *args, **more)) as events:
                async for event in events:
                    number = getattr(event, "sequence_number", number)
                    yield event
        except Exception as error:
            if not isinstance(error, DartsError):
                logger.exception("a stream of the Responses API failed")
            await _mark_failed(responses, request.request_id)
            fields = make_error(error).error
            yield ErrorEvent(
                code=str(fields.code), message=fields.message, param=fields.param, sequence_number=number + 1
            )

    return stream_with_error


def _marking_failed(responses: Any) -> Handler:
    run = responses._run_background_request

    @wraps(run)
    async def run_and_mark(request: Any, *args: Any, **more: Any) -> None:
        try:
            await run(request, *args, **more)
        except DartsError as error:
            logger.warning("response %s, which runs in the background, failed: %s", request.request_id, error)
            await _mark_failed(responses, request.request_id)

    return run_and_mark


async def _mark_failed(responses: Any, response_id: str) -> None:
    """Say of a response that runs in the background, and is stored, that it has failed, as vLLM does for its errors."""
    async with responses.response_store_lock:
        stored = responses.response_store.get(response_id)
        if stored is not None and stored.status not in ("completed", "cancelled"):
            stored.status = "failed"


def _ending_with_error(stream: Stream) -> Stream:
    """vLLM's stream of a response that runs in the background ends with nothing but the event of its completion."""

    @wraps(stream)
    async def until_error(*args: Any, **more: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(stream(*args, **more)) as events:
            async for event in events:
                yield event
                if isinstance(event, ErrorEvent):
                    return

    return until_error


def _answering_own_errors(handler: Handler, make_error: MakeError) -> Handler:
    @wraps(handler)
    async def handle(*args: Any, **more: Any) -> Any:
        try:
            return await handler(*args, **more)
        except DartsError as error:
            caller.get().answered = error  # for its headers
            return make_error(error)

    return handle


def _passing_errors_on(convert: Callable[[AsyncGenerator[str, None]], AsyncGenerator[str, None]]) -> Any:
    @wraps(convert)
    async def convert_with_errors(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        errors: list[Mapping[str, Any]] = []

        async def until_error() -> AsyncGenerator[str, None]:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if chunk.startswith(ERROR_EVENT):
                        errors.append(json.loads(chunk.removeprefix("data: "))["error"])
                        return
                    yield chunk

        async with aclosing(until_error()) as whole, aclosing(convert(whole)) as events:
            async for event in events:
                yield event
        for error in errors:
            data = {"type": "error", "error": {"type": error["type"], "message": error["message"]}}
            yield f"event: error\ndata: {json.dumps(data)}\n\n"

    return convert_with_errors
