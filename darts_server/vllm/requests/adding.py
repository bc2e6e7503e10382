"""Add a candidate by vLLM's ``add_request``, with changes that its arguments cannot express.

For each request vLLM validates the sampling parameters and all tokens of the prompt, and completes the parameters from
the model's configuration. The candidates of a group differ only in their id, their seed and their place in the queue,
so they share the request that vLLM makes for the first of them.
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

OWN_OPTIONS = ("lora_request", "priority", "data_parallel_rank")
"""Options of ``add_request`` that siblings do not share. An adapter may be replaced while a group starts."""

StateChange = Callable[[EngineCoreRequest, RequestState], None]


@dataclass(slots=True, eq=False)
class AddedCandidate:
    """A candidate that is being added to vLLM. ``change``: None once it was called. See `adding_candidate`."""

    change: StateChange | None
    shared: PromptRequest | None


added_candidate: ContextVar[AddedCandidate | None] = ContextVar("darts_added_candidate", default=None)


@contextmanager
def adding_candidate(change: StateChange, shared: PromptRequest | None = None) -> Iterator[None]:
    """Change the candidate that this task adds in the block.

    ``change``: called with its request and its new state in vLLM, before the request is sent. ``shared``: keeps the
    request that vLLM makes, for the other candidates. None if vLLM must make a request of this candidate's own.

    Raises:
        RuntimeError: ``change`` was not called, because this version of vLLM sends requests in another way.
    """
    candidate = AddedCandidate(change, shared)
    token = added_candidate.set(candidate)
    try:
        yield
    finally:
        added_candidate.reset(token)
    if candidate.change is not None:
        raise RuntimeError("vLLM has sent a candidate without EngineCoreClient.add_request_async")


def share_inputs(input_processor: Any) -> None:
    """Let vLLM's ``input_processor`` make one request for the candidates that share it."""
    process = input_processor.process_inputs

    def process_inputs(
        request_id: str,
        prompt: Any,
        params: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        candidate = added_candidate.get()
        shared = None if candidate is None else candidate.shared
        if shared is None:
            return process(request_id, prompt, params, *args, **options)
        if shared.made is None:
            shared.made = process(request_id, prompt, params, *args, **options)

        # A copy with the candidate's own values.
        request = copy(shared.made)
        request.request_id = request_id
        request.sampling_params = copy(request.sampling_params)
        assert request.sampling_params is not None
        request.sampling_params.seed = params.seed
        request.sampling_params.extra_args = params.extra_args
        for name in OWN_OPTIONS:
            if name in options:
                setattr(request, name, options[name])
        return request

    input_processor.process_inputs = process_inputs
