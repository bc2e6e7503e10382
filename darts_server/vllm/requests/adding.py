"""Add a candidate by vLLM's ``add_request``, with changes that its arguments cannot express.

For each request vLLM validates the sampling parameters and all tokens of the prompt. The candidates of a group differ
only in their id, their seed and their place in the queue, so they share the request that vLLM makes for the first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import RequestState

from darts_server.vllm.requests.prompt_request import PromptRequest

UNSHARED_OPTIONS = ("lora_request", "priority", "data_parallel_rank")
"""Options of ``add_request`` that siblings do not share. An adapter may be replaced while a group starts."""

StateChange = Callable[[EngineCoreRequest, RequestState], None]


@dataclass(slots=True, eq=False)
class AddedCandidate:
    """A candidate that is being added to vLLM. ``change``: None once it was called. See `change_before_send`."""

    change: StateChange | None
    shared_request: PromptRequest | None


added_candidate: ContextVar[AddedCandidate | None] = ContextVar("darts_added_candidate", default=None)


@contextmanager
def change_before_send(change: StateChange, shared_request: PromptRequest | None = None) -> Iterator[None]:
    """Change the candidate that this task adds in the block.

    ``change``: called with its request and its new state in vLLM, before the request is sent. ``shared_request``: keeps
    the request that vLLM makes, for the other candidates. None if this candidate differs from them.

    Raises:
        RuntimeError: ``change`` was not called.
    """
    candidate = AddedCandidate(change, shared_request)
    token = added_candidate.set(candidate)
    try:
        yield
    finally:
        added_candidate.reset(token)
    # `HeldRequests` has replaced that method of vLLM's client, and calls the change.
    if candidate.change is not None:
        raise RuntimeError("vLLM has sent a candidate without EngineCoreClient.add_request_async")


def share_processed_inputs(input_processor: Any) -> None:
    """Let vLLM's ``input_processor`` make one request for the candidates that share it."""
    vllm_process_inputs = input_processor.process_inputs

    def process_inputs(
        request_id: str,
        prompt: Any,
        params: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        candidate = added_candidate.get()
        shared_request = None if candidate is None else candidate.shared_request
        if shared_request is None:
            return vllm_process_inputs(request_id, prompt, params, *args, **options)
        if shared_request.engine_request is None:
            shared_request.engine_request = vllm_process_inputs(request_id, prompt, params, *args, **options)

        # vLLM changes the request that it gets, so each candidate has a copy.
        request = copy(shared_request.engine_request)
        request.request_id = request_id
        request.sampling_params = copy(request.sampling_params)
        assert request.sampling_params is not None
        request.sampling_params.seed = params.seed
        request.sampling_params.extra_args = params.extra_args
        for name in UNSHARED_OPTIONS:
            if name in options:
                setattr(request, name, options[name])
        return request

    input_processor.process_inputs = process_inputs
