"""Build vLLM's request outputs: merge candidates into one response, or make one of an aborted candidate."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from vllm import SamplingParams
from vllm.logprobs import SampleLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

ABORTED = "abort"
"""vLLM's finish reason of requests that were aborted."""


def merge_outputs(request_id: str, outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Merge candidates' outputs into one finished output, whose choices are numbered in the given order."""
    merged = to_choice(request_id, outputs[0], 0, last=True)
    merged.outputs = [replace(output.outputs[0], index=index) for index, output in enumerate(outputs)]
    return merged


def to_choice(request_id: str, output: RequestOutput, index: int, *, last: bool) -> RequestOutput:
    """Copy a candidate's output as choice ``index`` of the caller's request. ``last``: it finishes the request."""
    choice = copy(output)
    choice.request_id = request_id
    choice.outputs = [replace(output.outputs[0], index=index)]
    choice.finished = last
    return choice


def aborted_output(prompt: Any, params: SamplingParams) -> RequestOutput:
    """Make the output of a request that was aborted while it waited: no tokens, and vLLM's finish reason for it."""
    inputs: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=[],
        cumulative_logprob=None if params.logprobs is None else 0.0,
        logprobs=None if params.logprobs is None else [],
        finish_reason=ABORTED,
    )
    return RequestOutput(
        request_id="aborted",  # `to_choice` and `merge_outputs` set the caller's
        prompt=inputs.get("prompt"),
        prompt_token_ids=inputs.get("prompt_token_ids") or [],
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
    )


def token_logprobs(logprobs: SampleLogprobs, tokens: Sequence[int]) -> list[float]:
    """Return the log-prob of each sampled token. vLLM's entry for a position also has the top tokens' log-probs."""
    return [position[token].logprob for position, token in zip(logprobs, tokens, strict=True) if position]


def new_detokenizer(
    prompt_token_ids: Sequence[int], params: SamplingParams, tokenizer: TokenizerLike | None
) -> IncrementalDetokenizer:
    """Create what vLLM detokenizes a request with, before the first token."""
    request = EngineCoreRequest(
        request_id="detokenized",
        prompt_token_ids=list(prompt_token_ids),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    return IncrementalDetokenizer.from_new_request(tokenizer if params.detokenize else None, request)
