"""A prompt as vLLM's ``generate()`` gets it, the requests of its candidates, and the trajectory that it continues."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any
from uuid import uuid4
from zlib import crc32

import numpy as np
import torch
from msgspec import structs
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest

from darts_server.engine.port import Probe, RequestTokens
from darts_server.exceptions import InvalidRequest
from darts_server.rollout.learned.statistics import key_of
from darts_server.rollout.turns import Turn
from darts_server.types import OFF, RequestOptions
from darts_server.vllm.engine_core.drafter import PROMPT_TOKENS
from darts_server.vllm.engine_core.holding import NOT_HELD
from darts_server.vllm.engine_core.plugin import SEED
from darts_server.vllm.engine_core.probe_capture import ARGUMENT

SEED_MASK = (1 << 64) - 1
# vLLM's name for the session in ``vllm_xargs``. Each trajectory of a group may have its own.
SESSION_ARGUMENT = "session_id"
RESUMABLE = frozenset(
    {
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "logprobs",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "output_kind",
        "extra_args",
        "skip_clone",
        "skip_reading_prefix_cache",
        # vLLM sets it to the length of the longest stop string.
        "output_text_buffer_length",
    }
)
"""Sampling parameters that do not depend on where the prompt ends. All others are assumed to depend on it."""
# White space and reasoning tags before an answer.
UNSTABLE_END = re.compile(r"\s*(?:<think>\s*(?:</think>\s*)?)?\Z")
MAX_END_TOKENS = 24
SEED_FIELDS = {"seed": None, "output_kind": None}
"""Sampling parameters that may differ between requests of one group, as may our own extra arguments."""
SCHEDULING = frozenset({"trace_headers", "priority", "data_parallel_rank", "session_id", "kv_hints", "prompt_text"})
"""Options of ``generate()`` that may differ too: they decide when and where a request runs, not what is sampled."""
IDENTIFYING_FIELDS = ("prompt_token_ids", "prompt", "mm_hashes")
DERIVED = frozenset(
    {
        "type",
        "arrival_time",
        "prompt_token_offsets",
        # vLLM itself identifies media by `mm_hashes`.
        "mm_kwargs",
        "mm_placeholders",
        # Statistics outlive a salt that changes with every step of training. The salt is a part of the join key.
        "cache_salt",
    }
)
"""Fields of a prompt that change nothing that the model sees. All others are a part of the prompt's key."""


@dataclass(eq=False)
class PromptRequest:
    """The arguments of ``generate()`` for one prompt. ``options``: further keyword arguments."""

    prompt: Any
    params: SamplingParams
    request_id: str
    options: Mapping[str, Any] = field(default_factory=dict)
    reused_seed: int | None = field(default=None, init=False)
    """Seed of streams that the prompt had before, see `VllmPromptRenderer.reuse_streams`."""
    engine_request: EngineCoreRequest | None = field(default=None, init=False)
    """The request that vLLM has made for the first candidate, see `change_before_send`."""
    _shared_params: SamplingParams | None = field(default=None, init=False)

    @property
    def prompt_fields(self) -> Mapping[str, Any]:
        """Fields of a rendered prompt. A text has none."""
        return self.prompt if isinstance(self.prompt, dict) else {}

    # --- identity -----------------------------------------------------------

    @cached_property
    def prompt_key(self) -> str:
        """Key of the prompt's statistics, made of what the model sees: the same for a text as for its tokens."""
        prompt = self.prompt_fields or {"prompt": self.prompt}
        token_ids = prompt.get("prompt_token_ids") or ()
        # A prompt with tokens is identified by its tokens alone, and not by its text.
        text = None if token_ids else prompt.get("prompt")
        lora = self.options.get("lora_request")
        adapter = None if lora is None else lora.lora_name
        parts = [repr(value) for value in (text, prompt.get("mm_hashes"), adapter) if value]

        # All other fields that the model sees, such as embeddings.
        others = {name: value for name, value in prompt.items() if name not in IDENTIFYING_FIELDS and value is not None}
        description = describe_for_key(others)
        if description:
            parts.append(description)
        return key_of(token_ids, *parts)

    @property
    def tokens(self) -> RequestTokens:
        token_ids = self.prompt_fields.get("prompt_token_ids")
        return RequestTokens(len(token_ids) if token_ids else None, self.params.max_tokens)

    @cached_property
    def tail_seed(self) -> Sequence[int] | None:
        """Seed that selects the group's tail, equal if the request is repeated. None if the request has no seed."""
        if self.params.seed is None:
            return None
        prompt = self.prompt
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt_token_ids", ())
        # Trainers send one seed with all prompts, but the longer answers of each group are drawn independently.
        return (self.params.seed & SEED_MASK, crc32(repr(prompt).encode()))

    @cached_property
    def join_key(self) -> str:
        """Key of requests that may share a group. Their seeds may differ."""
        params = structs.asdict(self.params)
        extra_args = {
            name: value
            for name, value in (params["extra_args"] or {}).items()
            if not name.startswith("darts_") and name != SESSION_ARGUMENT
        }
        options = {name: value for name, value in self.options.items() if name not in SCHEDULING and value is not None}
        lora = options.get("lora_request")
        if lora is not None:
            # An adapter that is pushed again has another folder.
            options["lora_request"] = (lora.lora_name, lora.lora_int_id)
        # Prompts of encoder-decoder models have the salt in an inner prompt.
        prompt = self.prompt_fields
        salt = prompt.get("cache_salt") or prompt.get("decoder_prompt", {}).get("cache_salt")

        # Fields that may differ have the same value in all keys.
        params |= SEED_FIELDS | {"extra_args": extra_args}
        return f"{self.prompt_key} {salt!r} {options} {params}"

    # --- candidates ---------------------------------------------------------

    def make_params(self, index: int, *, may_share: bool = True) -> SamplingParams:
        """Return sampling parameters of candidate ``index``. The caller must not change an object that is shared."""
        # Without any seed all candidates have the same parameters.
        if self._shared_params is not None and may_share:
            return self._shared_params
        params = self.params.clone()
        params.n = 1
        params.seed = None if params.seed is None else params.seed + index
        params.output_kind = RequestOutputKind.FINAL_ONLY
        # vLLM would clone it once more for each candidate.
        params.skip_clone = True
        if self.reused_seed is not None:
            params.extra_args = (params.extra_args or {}) | {SEED: self.reused_seed + index}
        elif params.seed is None and may_share:
            self._shared_params = params
        return params

    def make_probed_params(self, index: int, probe: Probe, probe_number: int | None) -> SamplingParams:
        """Add a probe to `make_params`. ``probe_number``: identifies hidden states, or None if none are sent."""
        params = self.make_params(index, may_share=False)
        extra_args = dict(params.extra_args or {})
        if probe_number is not None:
            extra_args[ARGUMENT] = [probe_number, *probe.detect_at]
        if probe.logprobs:
            # The log-probs are read while the candidate runs.
            extra_args[NOT_HELD] = True
        params.extra_args = extra_args or None
        if self.adds_logprobs(probe):
            # For vLLM 0 means the log-probs of the sampled tokens only.
            params.logprobs = 0
        return params

    def adds_logprobs(self, probe: Probe) -> bool:
        return probe.logprobs and self.params.logprobs is None

    def make_resumed(self, index: int, prefix: Sequence[int]) -> tuple[Any, SamplingParams]:
        """Return prompt and sampling parameters for the rest of candidate ``index``."""
        prompt_token_ids = self.prompt["prompt_token_ids"]
        params = self.make_params(index, may_share=False)
        # The drafter counts the prefix as a part of the answer.
        params.extra_args = (params.extra_args or {}) | {PROMPT_TOKENS: len(prompt_token_ids)}
        if params.seed is not None:
            # Coupled sampling continues with the random numbers of the first seed.
            params.extra_args[SEED] = params.seed
        adjust_for_prefix(params, len(prefix))
        return {**self.prompt, "prompt_token_ids": [*prompt_token_ids, *prefix]}, params


def describe_for_key(value: object) -> str:
    """Return a text that is equal only for equal parts of prompts.

    The text is empty for a mapping that has only derived fields.
    """
    if isinstance(value, Mapping):
        fields = sorted((str(name), describe_for_key(part)) for name, part in value.items() if name not in DERIVED)
        return f"{{{fields}}}" if fields else ""
    if isinstance(value, list | tuple):
        return repr([describe_for_key(part) for part in value])
    if isinstance(value, torch.Tensor):
        # As bytes, because NumPy lacks some of torch's types.
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{value.dtype} {list(value.shape)} {blake2b(data.data, digest_size=16).hexdigest()}"
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    # A part of an unknown type equals no other part.
    return str(uuid4())


def adjust_for_prefix(params: SamplingParams, prefix_tokens: int) -> None:
    if params.max_tokens is not None:
        params.max_tokens -= prefix_tokens
    params.min_tokens = max(0, params.min_tokens - prefix_tokens)
    if params.seed is not None:
        # Another seed, because the random numbers of the first tokens must not be used again.
        state = np.random.SeedSequence((params.seed & SEED_MASK, prefix_tokens)).generate_state(1, np.uint64)
        # The shift makes the seed positive, and far from vLLM's largest.
        params.seed = int(state[0] >> np.uint64(2))


# --- candidates that resume ---------------------------------------------------------


def check_resumable(params: SamplingParams) -> None:
    # 1 loses nothing, because a batch answers only log-probs of generated tokens.
    if params.logprobs is not None and not 0 <= params.logprobs <= 1:
        raise InvalidRequest(
            "sampling.logprobs",
            'must be at most 1 with "carry": "resume", since only log-probs of generated tokens are kept; '
            f'got {params.logprobs}, change it, or use "restart"',
        )
    name = find_prompt_end_parameter(params)
    if name is not None:
        raise InvalidRequest(
            f"sampling.{name}",
            'does not work with "carry": "resume", since it depends on which tokens were generated after the '
            'prompt; leave it out, or use "restart"',
        )


def find_prompt_end_parameter(params: SamplingParams) -> str | None:
    """Return the first parameter in use that depends on where the prompt ends, or None."""
    defaults = SamplingParams()
    for name in params.__struct_fields__:
        if name.startswith("_") or name in RESUMABLE:
            continue
        # None, an empty list and 0 turn a parameter off, whatever its default is.
        is_unused = getattr(params, name) in (getattr(defaults, name), None, [], 0)
        if not is_unused:
            return name
    return None


# --- the trajectory that a request continues ----------------------------------------


def make_turn(
    request: PromptRequest,
    shaping: RequestOptions,
    header_session: str | None,
    caller: str | None,
    tokenizer: Any = None,
) -> Turn:
    """Describe a request as a turn of a trajectory.

    ``header_session``: from a header that trainers send. ``caller``: name of the key.
    """
    prompt = request.prompt
    params = request.params
    is_greedy = params.temperature == 0
    # Requests of an evaluation have no session. Trainers use the numbers of prompts as names of sessions, in training
    # and in evaluation. So a prompt of training would look like a later turn of an evaluation.
    session = None
    if not is_greedy and shaping.policy != OFF:
        session = shaping.session or request.options.get("session_id") or header_session
    token_ids: Sequence[int] = ()
    # Beside embeddings, tokens are only a part of the prompt, and other prompts may have the same tokens.
    if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is None:
        token_ids = prompt.get("prompt_token_ids") or ()
    stable_tokens = None if tokenizer is None else count_stable_tokens(tokenizer, token_ids)
    # A trainer's request for the log-probs of a finished answer is no turn.
    scores_prompt = params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
    return Turn(
        token_ids,
        stable_tokens,
        session,
        # With any other name, the first request may continue a trajectory.
        opens_session=shaping.session is not None,
        greedy=is_greedy,
        scoring=params.max_tokens == 1 or scores_prompt,
        caller=caller or "",
    )


def count_stable_tokens(tokenizer: Any, token_ids: Sequence[int]) -> int:
    """Count the first tokens of a prompt with which a later turn begins, too."""
    # Templates render the end of a prompt otherwise when an answer follows in the chat.
    last_tokens = list(token_ids[-MAX_END_TOKENS:])
    # Negative numbers stand for images.
    if not last_tokens or min(last_tokens) < 0:
        return len(token_ids)
    match = UNSTABLE_END.search(tokenizer.decode(last_tokens))
    unstable_text = "" if match is None else match[0]
    # Find the most tokens whose text is an end of the unstable text.
    unstable_tokens = 0
    for count in range(1, len(last_tokens) + 1):
        text = tokenizer.decode(last_tokens[-count:])
        if len(text) > len(unstable_text):
            break
        if unstable_text.endswith(text):
            unstable_tokens = count
    return len(token_ids) - unstable_tokens
