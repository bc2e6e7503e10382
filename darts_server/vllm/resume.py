"""Continue candidates of vLLM from what they had generated when they were stopped.

The engine gets the prompt with these tokens, most of which its prefix cache may have, and generates the others. vLLM's
state of the request in this process, which detokenizes, looks for stop strings and collects log-probs, begins with
these tokens too: the output is that of a request that was never stopped, also where a stop string or a character has
tokens on both sides.
"""

from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine.output_processor import RequestState

from darts_server.engine.port import TokenSlice
from darts_server.exceptions import InvalidRequest
from darts_server.vllm.outputs import new_detokenizer

RESUMABLE = frozenset(
    {
        *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "allowed_token_ids"),
        *("seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens"),
        *("logprobs", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        *("output_kind", "extra_args", "skip_clone", "skip_reading_prefix_cache"),
        "output_text_buffer_length",  # vLLM sets it to the length of the longest stop string
    }
)
"""Sampling parameters under which the next token depends on the tokens so far, whichever of them were in the prompt.
All others, also those of later versions of vLLM, are taken to depend on where the prompt ends."""


def begin_with(
    prefix: TokenSlice,
    prompt_token_ids: list[int],
    params: SamplingParams,
    tokenizer: TokenizerLike | None,
    state: RequestState,
) -> None:
    """Let a new request's state begin with the tokens that were generated before.

    ``prompt_token_ids``, ``params``: of the candidate as if it had not been stopped.
    """
    state.prompt_token_ids = prompt_token_ids
    state.detokenizer = new_detokenizer(prompt_token_ids, params, tokenizer)
    state.detokenizer.update(list(prefix.token_ids), False)
    logprobs = None if state.logprobs_processor is None else state.logprobs_processor.logprobs
    if state.logprobs_processor is not None and logprobs is not None and prefix.logprobs is not None:
        for token, logprob in zip(prefix.token_ids, prefix.logprobs, strict=True):
            logprobs.append({token: Logprob(logprob)})
        state.logprobs_processor.cumulative_logprob = sum(prefix.logprobs)


def check_resumable(params: SamplingParams) -> None:
    """
    Raises:
        InvalidRequest: names the first parameter that depends on where the prompt ends or needs more than is kept.
    """
    if params.logprobs is not None and not 0 <= params.logprobs <= 1:
        raise InvalidRequest(
            "sampling.logprobs",
            'must be at most 1 with "carry": "resume", since only log-probs of generated tokens are kept; '
            f'got {params.logprobs}, change it, or use "restart"',
        )
    if (name := depends_on_prompt_end(params)) is not None:
        raise InvalidRequest(
            f"sampling.{name}",
            'does not work with "carry": "resume", since it depends on which tokens were generated after the '
            'prompt; leave it out, or use "restart"',
        )


def depends_on_prompt_end(params: SamplingParams) -> str | None:
    """Return the name of the first parameter that depends on where the prompt ends, if there is one."""
    neutral = SamplingParams()
    for name in params.__struct_fields__:
        if name.startswith("_") or name in RESUMABLE:
            continue
        if getattr(params, name) not in (getattr(neutral, name), None, [], 0):
            return name
    return None
