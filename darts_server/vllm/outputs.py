"""vLLM's output objects: several into one answer, and the first tokens of one."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from vllm import SamplingParams
from vllm.logprobs import SampleLogprobs
from vllm.outputs import RequestOutput
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from darts_server.types import FinishReason
from darts_server.vllm.compat.engine import cut_mask


def as_one(request_id: str, outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One finished answer with a choice for each output, numbered in the order given."""
    answer = as_choice(request_id, outputs[0], 0, last=True)
    answer.outputs = [replace(output.outputs[0], index=index) for index, output in enumerate(outputs)]
    return answer


def as_choice(request_id: str, output: RequestOutput, index: int, *, last: bool) -> RequestOutput:
    """One choice of a streamed answer: the whole trajectory in one piece."""
    answer = copy(output)
    answer.request_id = request_id
    answer.outputs = [replace(output.outputs[0], index=index)]
    answer.finished = last
    return answer


def first_tokens(
    output: RequestOutput, tokens: int, params: SamplingParams, tokenizer: TokenizerLike | None
) -> RequestOutput:
    """``output`` as if ``tokens`` had been its ``max_tokens``: token ids, log-probs, text and finish reason."""
    whole = output.outputs[0]
    token_ids = list(whole.token_ids)[:tokens]
    logprobs = whole.logprobs[:tokens] if whole.logprobs is not None else None
    cut = replace(
        whole,
        token_ids=token_ids,
        text=_text_of(token_ids, output.prompt_token_ids or [], params, tokenizer),
        logprobs=logprobs,
        cumulative_logprob=_total(token_ids, logprobs) if whole.cumulative_logprob is not None else None,
        finish_reason=FinishReason.LENGTH.value,
        stop_reason=None,
        **cut_mask(whole, tokens),
    )
    answer = copy(output)
    answer.outputs = [cut]
    return answer


def without_logprobs(output: RequestOutput) -> RequestOutput:
    """``output`` as it is for a request that asks for none."""
    answer = copy(output)
    answer.outputs = [replace(whole, logprobs=None, cumulative_logprob=None) for whole in output.outputs]
    return answer


def logprobs_of(logprobs: SampleLogprobs, tokens: Sequence[int]) -> list[float]:
    """The log-prob of each of these tokens."""
    return [position[token].logprob for position, token in zip(logprobs, tokens, strict=True) if position]


def _total(token_ids: Sequence[int], logprobs: SampleLogprobs | None) -> float | None:
    if logprobs is None:
        return None
    return sum(logprobs_of(logprobs, token_ids))


def _text_of(
    token_ids: list[int], prompt_token_ids: list[int], params: SamplingParams, tokenizer: TokenizerLike | None
) -> str:
    """The text vLLM itself would have given for these tokens, by its own incremental detokenizer."""
    request = EngineCoreRequest(
        request_id="cut",
        prompt_token_ids=list(prompt_token_ids),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer if params.detokenize else None, request)
    detokenizer.update(token_ids, False)
    return detokenizer.get_next_output_text(finished=True, delta=False)
