"""Validate a request as the engine will decode it, before anything is started.

The thread of vLLM's engine that receives requests ends at the first one that it cannot decode, and the engine's process
at the first token id that its model does not have. So every request is encoded and decoded here once, as on its way to
the engine. What the engine keeps for each candidate is limited in size.
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
from darts_server.vllm.requests.sampling import REFUSALS, split_place
from darts_server.vllm.requests.structured_outputs import MAX_SAMPLING_BYTES, too_large

PROMPT = "prompt"  # the field that errors name for a prompt: our own routes replace it by theirs
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
MAX_CANDIDATES = 2**32  # more than any group starts, restarts included. Candidate i is generated with ``seed`` + i
PARAMS = "sampling_params"
ENCODER, DECODER = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)


def check_request(config: VllmConfig, request: PromptRequest) -> None:
    """Check that the engine can decode a request and survives it. Cheap, and never blocks.

    Raises:
        InvalidRequest: ``field`` is `PROMPT`, a sampling parameter, or an option of ``generate()``.
        vLLM's own exceptions: it checks parameters against each other whenever they are decoded.
    """
    params, prompt = request.params, request.prompt if isinstance(request.prompt, dict) else {}
    # These kill vLLM's engine on CPU. Log-probs of the prompt, if LoRA is enabled: it dies of a step that also has a
    # request with an adapter. A seed, if prompts may be split over steps (chunked prefill): any may be, even a short
    # one, since other requests use part of a step's token budget.
    if current_platform.is_cpu() and params.prompt_logprobs is not None and config.lora_config is not None:
        raise InvalidRequest(
            "prompt_logprobs",
            "vLLM on CPU cannot compute them with --enable-lora, and its engine would crash; leave this out, or start "
            "the server without that flag",
        )
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
            "vLLM applies it to all requests that run at the same time, so that those of others would lose the "
            "log-probs of their likeliest tokens; leave it out, and use logprobs",
        )
    _check_seed(params, params.n)
    # vLLM allows what either tokenizer or model has, but the model has no embedding for ids beyond its own. Those of
    # other types of prompts may stand for images or embeddings. The size is 0 where the configuration has none.
    token_ids = prompt.get("prompt_token_ids") if prompt.get("type", "token") == "token" else None
    size = config.model_config.get_vocab_size()
    if token_ids and size and ((lowest := min(token_ids)) < 0 or max(token_ids) >= size):
        wrong = lowest if lowest < 0 else max(token_ids)
        raise InvalidRequest(
            PROMPT, f"token id {wrong} is out of vocabulary: this model has the token ids 0 to {size - 1}"
        )
    sent = copy(params)
    sent.n = 1  # as it is sent for each candidate
    salt = prompt.get("cache_salt")
    message = EngineCoreRequest(request.request_id, token_ids, None, sent, None, 0.0, None, salt, None)
    for name in message.__struct_fields__:
        if name in request.options:
            setattr(message, name, request.options[name])
    try:
        DECODER.decode(ENCODER.encode(message))
    except msgspec.ValidationError as error:
        # The message is an array: ``[3].seed`` is the seed of the sampling parameters.
        field, text = split_place(error)
        index, _, inside = field.removeprefix("[").partition("]")
        name = EngineCoreRequest.__struct_fields__[int(index)] if index.isdecimal() else field
        raise InvalidRequest(inside.lstrip(".") if name == PARAMS and inside else name, text) from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequest(_unsendable(message), f"cannot be sent to the engine: {error}") from error
    if (whole := sum(map(len, ENCODER.encode(params)))) > MAX_SAMPLING_BYTES:
        values = msgspec.structs.asdict(params)
        raise too_large(max(values, key=lambda name: sum(map(len, ENCODER.encode(values[name])))), whole)


def check_group(llm: AsyncLLM, request: PromptRequest) -> None:
    """Check a request further that candidates are started with: process its prompt once, and drop the result.

    vLLM processes a prompt when it is added to the engine. For the second prompt of a request that is after the first
    one was started, and for a stream after the status was sent.

    Raises:
        InvalidRequest: as from `check_request`.
        vLLM's own exceptions, see :data:`darts_server.vllm.requests.sampling.REFUSALS`.
    """
    _check_seed(request.params, MAX_CANDIDATES)
    is_rendered = isinstance(request.prompt, dict) and "type" in request.prompt
    if not is_rendered:
        return
    process = partial(
        llm.input_processor.process_inputs,
        request.request_id,
        request.prompt,
        supported_tasks=llm._supported_tasks,
        # The options of ``generate()`` that vLLM may refuse.
        lora_request=request.options.get("lora_request"),
        data_parallel_rank=request.options.get("data_parallel_rank"),
    )
    try:
        process(request.params)
    except DartsError:
        raise
    except Exception as error:
        if request.params.structured_outputs is not None:
            # vLLM's libraries for grammars name no field: is all well without one?
            params = request.params.clone()
            params.structured_outputs = None
            try:
                process(params)
            except Exception:
                pass  # nor without it
            else:
                raise InvalidRequest("structured_outputs", str(error)) from error
        if isinstance(error, REFUSALS):
            raise
        raise InvalidRequest(PROMPT, f"vLLM cannot process it: {type(error).__name__}: {error}") from error


def _check_seed(params: SamplingParams, candidates: int) -> None:
    highest = MAX_SEED - candidates + 1
    if params.seed is not None and not MIN_SEED <= params.seed <= highest:
        raise InvalidRequest(
            "seed",
            f"must be {MIN_SEED} to {highest}, got {params.seed}: candidate i is generated with seed + i, in 64 bits",
        )


def _unsendable(message: EngineCoreRequest) -> str:
    """Name the first field that cannot be sent."""
    fields = msgspec.structs.asdict(message)
    params = fields.pop(PARAMS)
    for name, value in (msgspec.structs.asdict(params) | fields).items():
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        except (ValueError, TypeError, OverflowError, RecursionError):
            return name
    return "body"
