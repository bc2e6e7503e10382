"""Errors of vLLM, including those at its limits `--max-num-queued-reqs` and `--max-num-queued-tokens`."""

from collections.abc import AsyncGenerator

import pytest
from vllm import SamplingParams
from vllm.exceptions import GenerationError, MaxQueuedTokensError, QueueOverflowError, VLLMNotFoundError
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from darts_server.exceptions import CandidateFailed, EngineBusy, EngineDead, EngineRefused
from darts_server.serving.admission import Admission
from darts_server.vllm.api.engine import translate_error
from darts_server.vllm.api.llm import ShapingLLM
from darts_server.vllm.api.routes import RouteCall
from darts_server.vllm.api.unshaped import Generation
from darts_server.vllm.requests.prompt_request import PromptRequest


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (VLLMNotFoundError("no"), EngineRefused),
        (ValueError("no"), EngineRefused),
        (TypeError("no"), EngineRefused),
        (EngineDeadError("gone"), EngineDead),
        (GenerationError("oh"), CandidateFailed),
        (RuntimeError("oh"), CandidateFailed),
        (QueueOverflowError(), EngineBusy),
        (MaxQueuedTokensError(), EngineBusy),
    ],
)
def test_refusals_and_full_queues_are_not_failures_of_a_candidate(error: Exception, expected: type[Exception]) -> None:
    assert type(translate_error(error)) is expected


@pytest.mark.anyio
async def test_vllms_routes_get_vllms_own_exception() -> None:
    full = QueueOverflowError()

    class Full(ShapingLLM):
        def __init__(self) -> None:
            pass

        async def _generate_unshaped(self, generation: Generation) -> AsyncGenerator[RequestOutput, None]:
            raise translate_error(full) from full
            yield

    admission = Admission(lambda: 0, None)
    generation = Generation(PromptRequest({}, SamplingParams(), "a"), RouteCall(), admission.admit(1))
    with pytest.raises(QueueOverflowError) as raised:
        async for _ in Full()._serve(generation):
            pass
    assert raised.value is full
    assert admission.unanswered_requests == 0
