"""Errors of vLLM, and its own limits on its queue, `--max-num-queued-reqs` and `--max-num-queued-tokens`."""

from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import GenerationError, MaxQueuedTokensError, QueueOverflowError, VLLMNotFoundError
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from darts_server.exceptions import CandidateFailed, EngineBusy, EngineDead, EngineRefused
from darts_server.http.errors import fields_of, headers_of, status_of
from darts_server.serving.admission import Admission
from darts_server.vllm.engine import translate
from darts_server.vllm.llm import Generation, ShapingLLM
from darts_server.vllm.prompt_request import PromptRequest
from darts_server.vllm.routes import RouteCall

FULL: list[Any] = [QueueOverflowError, MaxQueuedTokensError]


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (VLLMNotFoundError("no"), EngineRefused),
        (ValueError("no"), EngineRefused),
        (TypeError("no"), EngineRefused),
        (EngineDeadError("gone"), EngineDead),
        (GenerationError("oh"), CandidateFailed),
        (RuntimeError("oh"), CandidateFailed),
    ],
)
def test_rejected_requests_are_distinguished_from_failures(error: Exception, wanted: type[Exception]) -> None:
    assert type(translate(error)) is wanted


@pytest.mark.parametrize("error_class", FULL)
def test_a_full_queue_of_vllm_has_its_status_and_says_when_to_retry(error_class: Any) -> None:
    full = error_class()
    error = translate(full)
    assert isinstance(error, EngineBusy)
    assert status_of(error) == full.http_status == HTTPStatus.SERVICE_UNAVAILABLE
    assert headers_of(error)["Retry-After"]
    assert fields_of(error) == {
        "message": full.message,
        "type": "InternalServerError",
        "param": None,
        "code": 503,
    }


@pytest.mark.anyio
async def test_vllms_own_routes_get_its_own_exception() -> None:
    full = FULL[0]()

    class Full(ShapingLLM):
        def __init__(self) -> None:
            pass

        async def _generate_unshaped(self, generation: Generation) -> AsyncGenerator[RequestOutput, None]:
            raise translate(full) from full
            yield

    admission = Admission(lambda: 0, None)
    generation = Generation(PromptRequest({}, SamplingParams(), "a"), RouteCall(), admission.admit(1))
    with pytest.raises(QueueOverflowError) as raised:
        async for _ in Full()._serve(generation):
            pass
    assert raised.value is full
    assert admission.requests == 0
