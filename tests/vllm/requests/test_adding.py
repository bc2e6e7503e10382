"""The candidates of a group share the request that vLLM makes for the first of them."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from darts_server.vllm.requests.adding import added_candidate, change_before_send, share_processed_inputs
from darts_server.vllm.requests.prompt_request import PromptRequest


class Processor:
    """Makes requests as vLLM's input processor does, and counts them."""

    def __init__(self) -> None:
        self.processed = 0
        share_processed_inputs(self)

    def process_inputs(self, request_id: str, prompt: Any, params: Any, priority: int = 0) -> EngineCoreRequest:
        self.processed += 1
        return EngineCoreRequest(
            request_id, prompt, None, params.clone(), None, 0.0, None, None, None, priority=priority
        )


def add(processor: Processor, request: PromptRequest, index: int, shared: PromptRequest | None) -> EngineCoreRequest:
    with change_before_send(lambda *_: None, shared):
        made = processor.process_inputs(f"{index}_r", request.prompt, request.make_params(index), priority=index)
        candidate = added_candidate.get()
        assert candidate is not None
        candidate.change = None
    return made


def test_siblings_differ_in_id_seed_and_priority_alone() -> None:
    processor = Processor()
    request = PromptRequest([1, 2], SamplingParams(seed=7, temperature=0.5), "r")
    first = add(processor, request, 0, request)
    # vLLM changes the request that it gets.
    first.request_id = "changed"
    second = add(processor, request, 3, request)
    assert processor.processed == 1
    assert repr(second) == repr(add(processor, request, 3, None))
    assert processor.processed == 2
    assert first.sampling_params is not None
    assert first.sampling_params is not second.sampling_params
    assert (first.sampling_params.seed, first.priority) == (7, 0)
    assert added_candidate.get() is None


def test_a_candidate_that_was_not_sent_as_expected_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="without EngineCoreClient"), change_before_send(lambda *_: None):
        pass
