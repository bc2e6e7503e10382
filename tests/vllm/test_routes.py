import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import State
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from darts_server.exceptions import DartsError, GroupAborted, GroupFailed, InvalidRequest, NotFound, Overloaded
from darts_server.http.errors import fields_of
from darts_server.serving.admission import Caller, caller
from darts_server.vllm.routes import attach

pytestmark = pytest.mark.anyio


def attach_to(handlers: dict[str, Any]) -> None:
    application: Any = SimpleNamespace(routes=[], state=State(handlers))
    attach(application, fields_of)


class Completions:
    """A handler as vLLM's."""

    create_error_response = staticmethod(create_error_response)


class Responses(Completions):
    """Streams two events, and then an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.response_store: dict[str, Any] = {}
        self.response_store_lock = asyncio.Lock()

    async def _run_background_request(self, request: Any) -> None:
        raise self.error

    async def responses_background_stream_generator(self, response_id: str) -> AsyncGenerator[Any, None]:
        """Go on until a response is completed."""
        async for event in self.responses_stream_generator(SimpleNamespace(request_id=response_id)):
            yield event
        await asyncio.Event().wait()

    async def responses_stream_generator(self, request: Any) -> AsyncGenerator[Any, None]:
        yield SimpleNamespace(sequence_number=0)
        yield SimpleNamespace(sequence_number=1)
        raise self.error


class Messages(Completions):
    """Converts the chunks of a chat."""

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        raise request

    async def message_stream_converter(self, chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        async for chunk in chunks:
            yield chunk.upper()


@pytest.mark.parametrize(
    ("error", "kind", "param", "code"),
    [
        (GroupAborted("all of /tmp/was aborted"), "InternalServerError", None, 503),
        (GroupFailed("too few"), "InternalServerError", None, 500),
        (Overloaded("too many", 3), "RateLimitError", None, 429),
        (NotFound("model", "was removed"), "NotFoundError", "model", 404),
        (InvalidRequest("n", "is odd"), "BadRequestError", "n", 400),
    ],
)
async def test_an_event_for_our_error_is_what_the_whole_answer_would_be(
    error: DartsError, kind: str, param: str | None, code: int
) -> None:
    completions, responses, messages = Completions(), Responses(error), Messages()
    state = {"openai_serving_completion": completions, "openai_serving_responses": responses}
    attach_to(state | {"anthropic_serving_messages": messages})
    expected = {"message": str(error), "type": kind, "param": param, "code": code}
    caller.set(Caller())
    assert completions.create_error_response(error).error.model_dump() == expected
    assert (await messages.create_chat_completion(error)).error.model_dump() == expected
    assert caller.get().answered is error, "the middleware adds its headers"
    *_, event = [event async for event in responses.responses_stream_generator(SimpleNamespace(request_id="r"))]
    event = event.model_dump()
    assert event == {
        "type": "error",
        "code": str(code),
        "message": str(error),
        "param": param,
        "sequence_number": 2,
    }


@pytest.mark.parametrize(("before", "after"), [("queued", "failed"), ("in_progress", "failed"), ("cancelled",) * 2])
async def test_a_response_in_the_background_that_is_not_streamed_fails(before: str, after: str) -> None:
    responses = Responses(GroupAborted("no"))
    responses.response_store["r"] = SimpleNamespace(status=before)
    attach_to({"openai_serving_responses": responses})
    await responses._run_background_request(SimpleNamespace(request_id="r"))
    assert responses.response_store["r"].status == after


async def test_a_response_in_the_background_fails_and_its_stream_ends() -> None:
    responses = Responses(GroupAborted("was aborted"))
    responses.response_store["r"] = SimpleNamespace(status="in_progress")
    attach_to({"openai_serving_responses": responses})
    stream = responses.responses_background_stream_generator("r")
    async with asyncio.timeout(10):
        *_, event = [event async for event in stream]
    assert (event.type, event.code, event.sequence_number) == ("error", "503", 2)
    assert responses.response_store["r"].status == "failed"


async def test_errors_of_vllm_stay_as_they_are() -> None:
    error = ValueError("no")
    completions, responses, messages = Completions(), Responses(error), Messages()
    state = {"openai_serving_completion": completions, "openai_serving_responses": responses}
    attach_to(state | {"anthropic_serving_messages": messages})
    assert completions.create_error_response(error) == create_error_response(error)
    assert completions.create_error_response("no", param="n") == create_error_response("no", param="n")
    with pytest.raises(ValueError, match="no"):
        await messages.create_chat_completion(error)
    *_, event = [event async for event in responses.responses_stream_generator(SimpleNamespace(request_id="r"))]
    assert (event.code, event.message) == ("400", "no")


async def test_a_stream_of_messages_ends_with_the_error_of_the_chat() -> None:
    messages = Messages()
    attach_to({"anthropic_serving_messages": messages})

    async def chat() -> AsyncGenerator[str, None]:
        yield "data: {}\n\n"
        yield 'data: {"error": {"message": "was aborted", "type": "InternalServerError", "code": 503}}\n\n'
        yield "data: [DONE]\n\n"

    first, last = [event async for event in messages.message_stream_converter(chat())]
    assert first == "DATA: {}\n\n"
    assert last == (
        'event: error\ndata: {"type": "error", "error": {"type": "InternalServerError", "message": "was aborted"}}\n\n'
    )
