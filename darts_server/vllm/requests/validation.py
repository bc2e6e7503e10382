"""Validate a request before any candidate starts.

The thread of vLLM's engine that receives requests ends at the first request that it cannot decode, and the engine's
process at the first token id that its model does not have.
"""

from copy import copy
from functools import partial

import msgspec
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from darts_server.exceptions import DartsError, InvalidRequest
from darts_server.vllm.requests.prompt_request import PromptRequest
from darts_server.vllm.requests.sampling import REFUSALS, split_validation_error
from darts_server.vllm.requests.structured_outputs import MAX_SAMPLING_BYTES, too_large

PROMPT = "prompt"
"""Field that errors name for a prompt. Our own routes replace it by theirs."""
MIN_SEED = -(2**63)
MAX_SEED = 2**63 - 1
# More candidates than any group starts, restarts included. Candidate i is generated with ``seed`` + i.
MAX_CANDIDATES = 2**32
PARAMS = "sampling_params"
WITHOUT_DRAFTS = ("min_p", "logit_bias")
"""Sampling parameters that vLLM does not support together with speculative decoding."""
ENCODER = MsgpackEncoder()
DECODER = MsgpackDecoder(EngineCoreRequest)


def check_request(config: VllmConfig, request: PromptRequest) -> None:
    """Check that the engine can decode a request and survives it.

    Raises:
        InvalidRequest: ``field`` is `PROMPT`, a sampling parameter, or an option of ``generate()``.
        vLLM's own exceptions: it checks parameters against each other whenever they are decoded.
    """
    params = request.params
    prompt = request.prompt_fields

    # vLLM's engine on CPU dies if one step has log-probs of a prompt and a request with an adapter.
    if current_platform.is_cpu() and params.prompt_logprobs is not None and config.lora_config is not None:
        raise InvalidRequest(
            "prompt_logprobs",
            "vLLM on CPU cannot compute them with --enable-lora, and its engine would crash; leave this out, or start "
            "the server without that flag",
        )
    # It also dies if a seeded prompt is split over steps (chunked prefill). Even a short prompt can be split, because
    # other requests use a part of a step's token budget.
    if current_platform.is_cpu() and params.seed is not None and config.scheduler_config.enable_chunked_prefill:
        raise InvalidRequest(
            "seed",
            "vLLM on CPU cannot split a seeded prompt over several steps "
            f"(max_num_batched_tokens = {config.scheduler_config.max_num_batched_tokens}), and its engine would crash; "
            "leave the seed out, or start the server with --no-enable-chunked-prefill and --max-num-batched-tokens of "
            "at least the model's length",
        )
    if params.logprob_token_ids is not None:
        raise InvalidRequest(
            "logprob_token_ids",
            "vLLM applies it to all requests that run at the same time, so other requests would lose the log-probs of "
            "their likeliest tokens; leave it out, and use logprobs",
        )
    if config.speculative_config is not None:
        for name in WITHOUT_DRAFTS:
            if getattr(params, name):
                raise InvalidRequest(
                    name,
                    "vLLM cannot verify drafts with it, and this server speculates (--speculate or "
                    "--speculative-config); leave it out, or serve without speculation",
                )
    _check_seed(params, params.n)

    # vLLM allows token ids that either the tokenizer or the model has, but the model has embeddings only for its own.
    # In other types of prompts, token ids may stand for images or embeddings. The size is 0 if the configuration has
    # none.
    token_ids = None
    if prompt.get("type", "token") == "token":
        token_ids = prompt.get("prompt_token_ids")
    vocabulary_size = config.model_config.get_vocab_size()
    if token_ids and vocabulary_size:
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < vocabulary_size:
                raise InvalidRequest(
                    PROMPT,
                    f"token id {token_id} is out of vocabulary: this model has the token ids 0 to "
                    f"{vocabulary_size - 1}",
                )

    # Encode the request as vLLM does when it sends a candidate, and decode it as the engine does.
    candidate_params = copy(params)
    candidate_params.n = 1
    engine_request = EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=token_ids,
        mm_features=None,
        sampling_params=candidate_params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=prompt.get("cache_salt"),
        data_parallel_rank=None,
    )
    for name in engine_request.__struct_fields__:
        if name in request.options:
            setattr(engine_request, name, request.options[name])
    try:
        DECODER.decode(ENCODER.encode(engine_request))
    except msgspec.ValidationError as error:
        # The encoded request is an array: ``[3].seed`` is the seed of the sampling parameters.
        field, problem = split_validation_error(error)
        index, _, inner_path = field.removeprefix("[").partition("]")
        if index.isdecimal():
            field = EngineCoreRequest.__struct_fields__[int(index)]
        if field == PARAMS and inner_path:
            field = inner_path.lstrip(".")
        raise InvalidRequest(field, problem) from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        field = _find_unsendable_field(engine_request)
        raise InvalidRequest(field, f"cannot be sent to the engine: {error}") from error

    size_bytes = _encoded_size(params)
    if size_bytes > MAX_SAMPLING_BYTES:
        values = msgspec.structs.asdict(params)
        largest = max(values, key=lambda name: _encoded_size(values[name]))
        raise too_large(largest, size_bytes)


def _encoded_size(value: object) -> int:
    # vLLM encodes a value as several buffers.
    return sum(map(len, ENCODER.encode(value)))


def check_group(llm: AsyncLLM, request: PromptRequest) -> None:
    """Check that vLLM can process the prompt of a group.

    Otherwise vLLM would refuse the second prompt of a request after the first was started, and the prompt of a stream
    after the status was sent.

    Raises:
        InvalidRequest: as from `check_request`.
        vLLM's own exceptions, see :data:`darts_server.vllm.requests.sampling.REFUSALS`.
    """
    _check_seed(request.params, MAX_CANDIDATES)
    # A prompt that is not rendered would be tokenized in the event loop.
    is_rendered = "type" in request.prompt_fields
    if not is_rendered:
        return
    # The result is dropped. Candidates are processed again when they start.
    process = partial(
        llm.input_processor.process_inputs,
        request.request_id,
        request.prompt,
        supported_tasks=llm._supported_tasks,
        # vLLM may refuse these options of ``generate()``.
        lora_request=request.options.get("lora_request"),
        data_parallel_rank=request.options.get("data_parallel_rank"),
    )
    try:
        process(request.params)
    except DartsError:
        raise
    except Exception as error:
        if request.params.structured_outputs is not None:
            # vLLM's libraries for grammars name no field. It is this field if the request is valid without it.
            params = request.params.clone()
            params.structured_outputs = None
            try:
                process(params)
            except Exception:
                pass
            else:
                raise InvalidRequest("structured_outputs", str(error)) from error
        if isinstance(error, REFUSALS):
            raise
        raise InvalidRequest(PROMPT, f"vLLM cannot process it: {type(error).__name__}: {error}") from error


def _check_seed(params: SamplingParams, candidates: int) -> None:
    max_seed = MAX_SEED - candidates + 1
    if params.seed is not None and not MIN_SEED <= params.seed <= max_seed:
        raise InvalidRequest(
            "seed",
            f"must be {MIN_SEED} to {max_seed}, got {params.seed}: candidate i is generated with seed + i, in 64 bits",
        )


def _find_unsendable_field(engine_request: EngineCoreRequest) -> str:
    fields = msgspec.structs.asdict(engine_request)
    params = fields.pop(PARAMS)
    for name, value in (msgspec.structs.asdict(params) | fields).items():
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        except (ValueError, TypeError, OverflowError, RecursionError):
            return name
    return "body"
