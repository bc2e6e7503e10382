"""Make the requests of a group's candidates from the request of the first.

For each request vLLM validates the sampling parameters and all tokens of the prompt, and completes the parameters from
the model's configuration. The candidates of a group differ in their id, their seed and their place in the queue.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

OWN_OPTIONS = ("lora_request", "priority", "data_parallel_rank")
"""Options of ``add_request`` that siblings do not share. An adapter may be replaced while a group starts."""

_made: ContextVar[list[EngineCoreRequest] | None] = ContextVar("darts_made", default=None)


@contextmanager
def repeating_inputs(made: list[EngineCoreRequest]) -> Iterator[None]:
    """Let the candidate that this task adds in the block have a copy of the request in ``made``.

    If ``made`` is empty, vLLM makes the request, and it is put there.
    """
    token = _made.set(made)
    try:
        yield
    finally:
        _made.reset(token)


def repeat_inputs(input_processor: Any) -> None:
    """Change vLLM's object that makes requests: it obeys `repeating_inputs`."""
    process = input_processor.process_inputs

    def process_inputs(request_id: str, prompt: Any, params: Any, *args: Any, **options: Any) -> EngineCoreRequest:
        made = _made.get()
        if made:
            return copy_request(made[0], request_id, params, options)
        request: EngineCoreRequest = process(request_id, prompt, params, *args, **options)
        if made is not None:
            # vLLM changes the request itself.
            made.append(copy(request))
        return request

    input_processor.process_inputs = process_inputs


def copy_request(
    made: EngineCoreRequest,
    request_id: str,
    params: SamplingParams,
    options: dict[str, Any],
) -> EngineCoreRequest:
    """Return a copy of a request with its own id, seed, extra arguments and `OWN_OPTIONS`."""
    request = copy(made)
    request.request_id = request_id
    request.sampling_params = copy(made.sampling_params)
    assert request.sampling_params is not None
    request.sampling_params.seed = params.seed
    request.sampling_params.extra_args = params.extra_args
    for name in OWN_OPTIONS:
        if name in options:
            setattr(request, name, options[name])
    return request
