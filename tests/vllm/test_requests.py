import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import State

from darts_server.exceptions import InvalidRequest
from darts_server.http.options import read_options
from darts_server.serving.admission import Admission
from darts_server.types import RequestOptions
from darts_server.vllm.requests import attach, current_route, move_xargs


class Serving:
    """A handler as vLLM's routes have them; notes what was known when it ran."""

    def __init__(self) -> None:
        self.seen: list[RequestOptions] = []

    async def create_completion(self, request: Any, raw_request: Any = None) -> str:
        self.seen.append(current_route().options)
        return "answer"


@pytest.mark.anyio
async def test_a_handler_sees_what_its_own_request_sets() -> None:
    serving = Serving()
    attach(State({"openai_serving_completion": serving}), read_options, frozenset({"tiny:raw"}))
    request = SimpleNamespace(headers={"X-Darts-Policy": "uniform", "X-Darts-Prompt-Key": "p"})
    plain = SimpleNamespace(headers={})
    assert await serving.create_completion(SimpleNamespace(model="tiny"), request) == "answer"
    await serving.create_completion(SimpleNamespace(model="tiny"), plain)
    await serving.create_completion(SimpleNamespace(model="tiny:raw"), request)
    await serving.create_completion(SimpleNamespace(model=None))
    assert [options.policy for options in serving.seen] == ["uniform", None, "off", None]
    assert [options.prompt_key for options in serving.seen] == ["p", None, "p", None]
    assert current_route().options.policy is None


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("prompt", "n", "beams"), [("a", 8, 8), ([1, 2], 8, 8), (["a", "b"], 8, 16), ([[1], [2]], 3, 6), (None, None, 1)]
)
async def test_a_beam_search_holds_all_its_beams_until_it_has_ended(prompt: Any, n: int | None, beams: int) -> None:
    admission = Admission(lambda: 0, None)

    class Beams:
        async def create_completion(self, request: Any, raw_request: Any = None) -> int:
            call = current_route()
            call.ticket = admission.admit(call.beams)
            return admission.ahead

    serving = Beams()
    attach(State({"openai_serving_completion": serving}), read_options, frozenset())
    request = SimpleNamespace(model="tiny", use_beam_search=True, prompt=prompt, n=n)
    assert await serving.create_completion(request) == beams
    assert (admission.ahead, admission.requests, current_route().beams) == (0, 0, 0)


UNPRINTABLE = ["a\nb", "\0", "\ud800", "x" * 257, "\u2028"]
BEAMS = {"use_beam_search": True, "prompt": "a", "n": 2, "vllm_xargs": {"darts_policy": "cap"}}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("sent", "headers", "message"),
    [
        ({}, {"x-darts-foo": "1"}, "unknown header"),
        *(({"request_id": bad}, {}, "request_id: must be 1 to 256 printable characters") for bad in UNPRINTABLE),
        *(({"request_id": "a"}, {"x-request-id": bad}, "X-Request-Id") for bad in UNPRINTABLE),
        (BEAMS, {}, "'cap' cannot shape a beam search"),
    ],
)
async def test_what_is_refused_never_reaches_the_handler(
    sent: dict[str, Any], headers: dict[str, str], message: str
) -> None:
    serving = Serving()
    attach(State({"openai_serving_completion": serving}), read_options, frozenset())
    with pytest.raises(InvalidRequest, match=message):
        await serving.create_completion(SimpleNamespace(model="tiny", **sent), SimpleNamespace(headers=headers))
    assert serving.seen == []
    for name in ("日本/ä'\"<script>", ""):
        await serving.create_completion(SimpleNamespace(model="tiny", request_id=name))
    assert len(serving.seen) == 2


class Body:
    """A request as Starlette gives it to the handler."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.headers: dict[str, str] = {}
        self._body = json.dumps(body).encode()

    async def body(self) -> bytes:
        return self._body


@pytest.mark.anyio
@pytest.mark.parametrize("inside", [True, False])
async def test_extra_arguments_of_the_token_route_are_moved_to_where_it_has_them(inside: bool) -> None:
    xargs = {"darts_policy": "off", "other": [1]}
    sent = {"sampling_params": {"vllm_xargs": xargs}} if inside else {"vllm_xargs": xargs}
    request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"other": [1]}))
    await move_xargs(request, Body(sent))
    assert request.sampling_params.extra_args == xargs
    await move_xargs(request, Body({"token_ids": [1]}))
    assert request.sampling_params.extra_args == xargs
    with pytest.raises(InvalidRequest, match=r"vllm_xargs\.other: has another value in another place"):
        await move_xargs(request, Body({"vllm_xargs": {"other": 2}}))
    with pytest.raises(InvalidRequest, match=r"sampling_params\.vllm_xargs: must be an object"):
        await move_xargs(request, Body({"sampling_params": {"vllm_xargs": []}}))


class Responses:
    """The Responses API's handler: its stream generates when it is read."""

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        async def stream() -> AsyncGenerator[str | None, None]:
            yield current_route().options.policy
            yield current_route().options.policy

        return stream()


@pytest.mark.anyio
async def test_a_stream_that_generates_while_it_is_read_has_the_options_of_its_request() -> None:
    serving, checked = Responses(), []
    attach(
        State({"openai_serving_responses": serving}),
        read_options,
        frozenset({"tiny:raw"}),
        check_options=lambda options, xargs: checked.append((options.policy, xargs)),
    )
    request = SimpleNamespace(model="tiny:raw", input="hi", previous_response_id=None, vllm_xargs={"a": 1})
    stream = await serving.create_responses(request)
    assert current_route().options.policy is None
    read = await asyncio.create_task(collect(stream))
    assert read == ["off", "off"]
    assert checked == [("off", {"a": 1})]
    assert current_route().options.policy is None


async def collect(stream: AsyncGenerator[str | None, None]) -> list[str | None]:
    return [part async for part in stream]
