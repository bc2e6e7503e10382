import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import State
from starlette.requests import Request
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from darts_server.caller import Caller, caller
from darts_server.exceptions import DartsError, GroupAborted, InvalidRequest
from darts_server.http.errors import error_fields
from darts_server.http.options import read_options
from darts_server.serving.admission import Admission
from darts_server.types import RequestOptions
from darts_server.vllm.api.routes import RouteCall, extend_routes, move_xargs, route_call

pytestmark = pytest.mark.anyio


def attach_to(check_options: Callable[..., Any] = lambda *_: None, **handlers: Any) -> None:
    application: Any = SimpleNamespace(routes=[], state=State(handlers))
    extend_routes(application, error_fields, read_options, frozenset({"tiny:raw"}), check_options, [])


def raw(**headers: str) -> SimpleNamespace:
    """Return a request like FastAPI's."""
    return SimpleNamespace(headers=headers, state=State())


# --- errors -----------------------------------------------------------------------


class Completions:
    """A handler like vLLM's."""

    create_error_response = staticmethod(create_error_response)

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any: ...


class Responses(Completions):
    """Streams two events, and then raises an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.response_store: dict[str, Any] = {}
        self.response_store_lock = asyncio.Lock()

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any: ...

    async def _run_background_request(self, request: Any) -> None:
        raise self.error

    async def responses_full_generator(self, status: str) -> Any:
        return SimpleNamespace(status=status, incomplete_details="max_output_tokens")

    async def responses_background_stream_generator(self, response_id: str) -> AsyncGenerator[Any, None]:
        """Wait for an event that completes the response."""
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
        raise request.error

    async def message_stream_converter(self, chunks: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
        async for chunk in chunks:
            yield str(chunk).upper()

    def messages_full_converter(self, answer: Any) -> Any:
        return answer


@pytest.mark.parametrize(
    ("error", "kind", "param", "code"),
    [
        (GroupAborted("all of /tmp/was aborted"), "InternalServerError", None, 503),
        (InvalidRequest("n", "is odd"), "BadRequestError", "n", 400),
    ],
)
async def test_an_error_event_has_the_fields_of_an_error_answer(
    error: DartsError, kind: str, param: str | None, code: int
) -> None:
    completions = Completions()
    responses = Responses(error)
    messages = Messages()
    attach_to(
        openai_serving_completion=completions, openai_serving_responses=responses, anthropic_serving_messages=messages
    )
    expected = {"message": str(error), "type": kind, "param": param, "code": code}
    caller.set(Caller())
    assert completions.create_error_response(error).error.model_dump() == expected
    assert (await messages.create_chat_completion(SimpleNamespace(error=error), raw())).error.model_dump() == expected
    assert caller.get().answered_error is error, "the middleware adds its headers"
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
    attach_to(openai_serving_responses=responses)
    await responses._run_background_request(SimpleNamespace(request_id="r"))
    assert responses.response_store["r"].status == after


async def test_a_response_in_the_background_fails_and_its_stream_ends() -> None:
    responses = Responses(GroupAborted("was aborted"))
    responses.response_store["r"] = SimpleNamespace(status="in_progress")
    attach_to(openai_serving_responses=responses)
    stream = responses.responses_background_stream_generator("r")
    async with asyncio.timeout(10):
        *_, event = [event async for event in stream]
    assert (event.type, event.code, event.sequence_number) == ("error", "503", 2)
    assert responses.response_store["r"].status == "failed"


@pytest.mark.parametrize("status", ["completed", "incomplete"])
async def test_a_response_whose_answer_was_aborted_is_cancelled(status: str) -> None:
    responses = Responses(GroupAborted("no"))
    attach_to(openai_serving_responses=responses)
    call = RouteCall()
    route_call.set(call)
    assert (await responses.responses_full_generator(status)).status == status
    call.has_aborted_answer = True
    response = await responses.responses_full_generator(status)
    assert (response.status, response.incomplete_details) == ("cancelled", None)


async def test_errors_of_vllm_stay_as_they_are() -> None:
    error = ValueError("no")
    completions = Completions()
    responses = Responses(error)
    messages = Messages()
    attach_to(
        openai_serving_completion=completions, openai_serving_responses=responses, anthropic_serving_messages=messages
    )
    assert completions.create_error_response(error) == create_error_response(error)
    assert completions.create_error_response("no", param="n") == create_error_response("no", param="n")
    # vLLM names the argument if the model is unknown, and in streams.
    assert completions.create_error_response(message=error) == create_error_response(error)
    with pytest.raises(ValueError, match="no"):
        await messages.create_chat_completion(SimpleNamespace(error=error), raw())
    *_, event = [event async for event in responses.responses_stream_generator(SimpleNamespace(request_id="r"))]
    assert (event.code, event.message) == ("400", "no")


CHAT_ERROR = ErrorResponse(error=ErrorInfo(message="was aborted", type="InternalServerError", code=503))


@pytest.mark.parametrize(
    "error_chunk",
    [f"data: {json.dumps(CHAT_ERROR.model_dump())}\n\n", CHAT_ERROR],
    ids=["text", "object, as since vLLM 0.33"],
)
async def test_a_stream_of_messages_ends_with_the_error_of_the_chat(error_chunk: Any) -> None:
    messages = Messages()
    attach_to(anthropic_serving_messages=messages)

    async def chat() -> AsyncGenerator[Any, None]:
        yield "data: {}\n\n"
        yield error_chunk
        yield "data: [DONE]\n\n"

    first, last = [event async for event in messages.message_stream_converter(chat())]
    assert first == "DATA: {}\n\n"
    assert last == (
        'event: error\ndata: {"type": "error", "error": {"type": "InternalServerError", "message": "was aborted"}}\n\n'
    )


# --- options ----------------------------------------------------------------------


class Serving(Completions):
    """Records the options that each request has in the handler."""

    def __init__(self) -> None:
        self.seen: list[RequestOptions] = []

    async def create_completion(self, request: Any, raw_request: Any = None) -> str:
        self.seen.append((route_call.get() or RouteCall()).options)
        return "answer"


async def test_a_handler_sees_only_the_options_of_its_own_request() -> None:
    serving = Serving()
    attach_to(openai_serving_completion=serving)
    request = raw(**{"X-Darts-Policy": "uniform", "X-Darts-Prompt-Key": "p"})
    assert await serving.create_completion(SimpleNamespace(model="tiny"), request) == "answer"
    await serving.create_completion(SimpleNamespace(model="tiny"), raw())
    await serving.create_completion(SimpleNamespace(model="tiny:raw"), request)
    await serving.create_completion(SimpleNamespace(model=None), raw())
    assert [options.policy for options in serving.seen] == ["uniform", None, "off", None]
    assert [options.prompt_key for options in serving.seen] == ["p", None, "p", None]
    assert route_call.get() is None


@pytest.mark.parametrize(
    ("prompt", "n", "beams"), [("a", 8, 8), ([1, 2], 8, 8), (["a", "b"], 8, 16), ([[1], [2]], 3, 6), (None, None, 1)]
)
async def test_a_beam_search_holds_all_its_beams_until_it_has_ended(prompt: Any, n: int | None, beams: int) -> None:
    admission = Admission(lambda: 0, None)

    class Beams(Completions):
        async def create_completion(self, request: Any, raw_request: Any = None) -> int:
            call = route_call.get()
            assert call is not None
            call.beam_ticket = admission.admit(call.beams)
            return admission.not_in_engine

    serving = Beams()
    attach_to(openai_serving_completion=serving)
    request = SimpleNamespace(model="tiny", use_beam_search=True, prompt=prompt, n=n)
    assert await serving.create_completion(request, raw()) == beams
    assert (admission.not_in_engine, admission.unanswered_requests, route_call.get()) == (0, 0, None)


BEAMS = {"use_beam_search": True, "prompt": "a", "n": 2, "vllm_xargs": {"darts_policy": "cap"}}


@pytest.mark.parametrize(
    ("sent", "headers", "message"),
    [
        ({}, {"x-darts-foo": "1"}, "unknown header"),
        ({"request_id": "a\nb"}, {}, "request_id: must be 1 to 256 printable characters"),
        ({"request_id": "a"}, {"x-request-id": "a\nb"}, "X-Request-Id"),
        (BEAMS, {}, "'cap' cannot shape a beam search"),
    ],
)
async def test_a_refused_request_never_reaches_the_handler(
    sent: dict[str, Any], headers: dict[str, str], message: str
) -> None:
    serving = Serving()
    attach_to(openai_serving_completion=serving)
    with pytest.raises(InvalidRequest, match=message):
        await serving.create_completion(SimpleNamespace(model="tiny", **sent), raw(**headers))
    assert serving.seen == []
    for name in ("日本/ä'\"<script>", ""):
        await serving.create_completion(SimpleNamespace(model="tiny", request_id=name), raw())
    assert len(serving.seen) == 2


class Body(Request):
    """A request with a body."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__({"type": "http"})
        self._body = json.dumps(body).encode()


@pytest.mark.parametrize("inside", [True, False])
async def test_extra_arguments_of_the_token_route_are_moved_to_its_sampling_parameters(inside: bool) -> None:
    xargs = {"darts_policy": "off", "other": [1]}
    sent = {"sampling_params": {"vllm_xargs": xargs}} if inside else {"vllm_xargs": xargs}
    params = SimpleNamespace(extra_args={"other": [1]})
    await move_xargs(params, Body(sent))
    assert params.extra_args == xargs
    await move_xargs(params, Body({"token_ids": [1]}))
    assert params.extra_args == xargs
    with pytest.raises(InvalidRequest, match=r"vllm_xargs\.other: has another value in another place"):
        await move_xargs(params, Body({"vllm_xargs": {"other": 2}}))
    with pytest.raises(InvalidRequest, match=r"sampling_params\.vllm_xargs: must be an object"):
        await move_xargs(params, Body({"sampling_params": {"vllm_xargs": []}}))


async def test_a_stream_that_generates_while_it_is_read_has_the_options_of_its_request() -> None:
    class Late(Responses):
        async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
            async def stream() -> AsyncGenerator[str | None, None]:
                for _ in range(2):
                    yield (route_call.get() or RouteCall()).options.policy

            return stream()

    async def collect(stream: AsyncGenerator[str | None, None]) -> list[str | None]:
        return [part async for part in stream]

    serving = Late(ValueError())
    checked: list[Any] = []
    attach_to(lambda options, xargs: checked.append((options.policy, xargs)), openai_serving_responses=serving)
    request = SimpleNamespace(model="tiny:raw", input="hi", previous_response_id=None, vllm_xargs={"a": 1})
    stream = await serving.create_responses(request, raw())
    assert route_call.get() is None
    assert await asyncio.create_task(collect(stream)) == ["off", "off"]
    assert checked == [("off", {"a": 1})]
    assert route_call.get() is None
