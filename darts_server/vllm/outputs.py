"""Build vLLM's request outputs: merge candidates into one response, or make one of what was generated before."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from vllm import SamplingParams
from vllm.logprobs import Logprob, SampleLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from darts_server.engine.port import NOTHING, TokenSlice

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


def make_output(
    prompt: Any, params: SamplingParams, tokens: TokenSlice = NOTHING, finish_reason: str = ABORTED, text: str = ""
) -> RequestOutput:
    """Make the output of a request, with no other log-probs than those of its tokens.

    By default that of one that was aborted while it waited.
    """
    inputs: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
    values = tokens.logprobs or ()
    completion = CompletionOutput(
        index=0,
        text=text,
        token_ids=list(tokens.token_ids),
        cumulative_logprob=None if params.logprobs is None else float(sum(values)),
        logprobs=None
        if params.logprobs is None
        else [{token: Logprob(value)} for token, value in zip(tokens.token_ids, values, strict=True)],
        finish_reason=finish_reason,
    )
    return RequestOutput(
        request_id="made",  # `to_choice` and `merge_outputs` set the caller's
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
