"""Stream several choices from vLLM's token route, which has room only for the choices of the first output."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from copy import copy
from typing import Any

from starlette.datastructures import State
from vllm.outputs import CompletionOutput, RequestOutput


def announce_choices(state: State) -> None:
    """Let the route's streams begin with all choices, most of them empty; the route sends no event for these."""
    if (serving := getattr(state, "serving_tokens", None)) is None:
        return
    stream = serving.serve_tokens_stream_generator

    def stream_all(request: Any, outputs: AsyncGenerator[RequestOutput, None], *more: Any) -> Any:
        return stream(request, with_all_choices(outputs, request.sampling_params.n), *more)

    serving.serve_tokens_stream_generator = stream_all


async def with_all_choices(
    outputs: AsyncGenerator[RequestOutput, None], choices: int
) -> AsyncGenerator[RequestOutput, None]:
    """Add the missing ones of ``choices`` choices to the first output, empty and unfinished."""
    is_first = True
    async with aclosing(outputs):
        async for output in outputs:
            yield _with_all_choices(output, choices) if is_first else output
            is_first = False


def _with_all_choices(output: RequestOutput, choices: int) -> RequestOutput:
    present = {choice.index for choice in output.outputs}
    missing = [
        CompletionOutput(index=index, text="", token_ids=[], cumulative_logprob=None, logprobs=None)
        for index in range(choices)
        if index not in present
    ]
    whole = copy(output)
    whole.outputs = [*output.outputs, *missing]
    return whole
