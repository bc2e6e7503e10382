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
# White space and reasoning tags before an answer. Templates render them otherwise when the answer is part of the chat.
UNSTABLE_END = re.compile(r"\s*(?:<think>\s*(?:</think>\s*)?)?\Z")
MAX_END_TOKENS = 24
SEED_FIELDS = {"seed": None, "output_kind": None}
"""Sampling parameters that may differ between requests of one group, as may our own extra arguments."""
SCHEDULING = frozenset({"trace_headers", "priority", "data_parallel_rank", "session_id", "kv_hints", "prompt_text"})
"""Options of ``generate()`` that may differ too: they decide when and where a request runs, not what is sampled."""
NAMED = ("prompt_token_ids", "prompt", "mm_hashes")
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
    """The arguments of ``generate()`` for one prompt.

    ``options``: further keyword arguments of ``generate()``.
    """

    prompt: Any
    params: SamplingParams
    request_id: str
    options: Mapping[str, Any] = field(default_factory=dict)
    reused_seed: int | None = field(default=None, init=False)
    """Seed of streams that the prompt had before, see `VllmPromptRenderer.reuse_streams`."""
    made: EngineCoreRequest | None = field(default=None, init=False)
    """The request that vLLM has made for the first candidate, see `adding_candidate`."""
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
        tokens = prompt.get("prompt_token_ids") or ()
        lora = self.options.get("lora_request")
        # A prompt with tokens is identified by its tokens alone, and not by its text.
        named = [
            None if tokens else prompt.get("prompt"),
            prompt.get("mm_hashes"),
            None if lora is None else lora.lora_name,
        ]
        rest = {name: value for name, value in prompt.items() if name not in NAMED and value is not None}
        texts = [repr(value) for value in named if value]
        description = describe(rest)
        if description:
            texts.append(description)
        return key_of(tokens, *texts)

    @property
    def tokens(self) -> RequestTokens:
        tokens = self.prompt_fields.get("prompt_token_ids")
        return RequestTokens(len(tokens) if tokens else None, self.params.max_tokens)

    @cached_property
    def tail_seed(self) -> Sequence[int] | None:
        """Seed that selects the group's tail, equal if the request is repeated. None if the request has no seed."""
        if self.params.seed is None:
            return None
        tokens = self.prompt
        if isinstance(tokens, dict):
            tokens = tokens.get("prompt_token_ids", ())
        return (self.params.seed & SEED_MASK, crc32(repr(tokens).encode()))

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
            options["lora_request"] = (lora.lora_name, lora.lora_int_id)
        prompt = self.prompt_fields
        salt = prompt.get("cache_salt") or prompt.get("decoder_prompt", {}).get("cache_salt")

        # Fields that may differ have the same value in all keys.
        params |= SEED_FIELDS | {"extra_args": extra_args}
        return f"{self.prompt_key} {salt!r} {options} {params}"

    # --- candidates ---------------------------------------------------------

    def params_of(self, index: int, *, is_own: bool = False) -> SamplingParams:
        """Return sampling parameters of candidate ``index``: n = 1, final output only, seed + index.

        Without any seed all candidates have the same object. ``is_own``: return an object that may be changed.
        """
        if self._shared_params is not None and not is_own:
            return self._shared_params
        child = self.params.clone()
        child.n = 1
        child.seed = None if child.seed is None else child.seed + index
        child.output_kind = RequestOutputKind.FINAL_ONLY
        # vLLM would clone it once more for each candidate.
        child.skip_clone = True
        if self.reused_seed is not None:
            child.extra_args = (child.extra_args or {}) | {SEED: self.reused_seed + index}
        elif child.seed is None and not is_own:
            self._shared_params = child
        return child

    def probed_params_of(self, index: int, probe: Probe, number: int | None) -> SamplingParams:
        """Return `params_of` with a probe. ``number``: identifies hidden states, or None if none are sent."""
        child = self.params_of(index, is_own=True)
        extra_args = dict(child.extra_args or {})
        if number is not None:
            extra_args[ARGUMENT] = [number, *probe.detect_at]
        if probe.logprobs:
            extra_args[NOT_HELD] = True
        child.extra_args = extra_args or None
        if self.adds_logprobs(probe):
            child.logprobs = 0
        return child

    def adds_logprobs(self, probe: Probe) -> bool:
        """Return whether the probe needs log-probs that the caller did not request."""
        return probe.logprobs and self.params.logprobs is None

    def resumed(self, index: int, prefix: Sequence[int]) -> tuple[Any, SamplingParams]:
        """Return prompt and sampling parameters for the rest of candidate ``index``, after the tokens ``prefix``."""
        child = self.params_of(index, is_own=True)
        child.extra_args = (child.extra_args or {}) | {PROMPT_TOKENS: len(self.prompt["prompt_token_ids"])}
        if child.seed is not None:
            child.extra_args[SEED] = child.seed
        continue_after(child, len(prefix))
        tokens = [*self.prompt["prompt_token_ids"], *prefix]
        return {**self.prompt, "prompt_token_ids": tokens}, child


def describe(value: object) -> str:
    """Return a text that is equal only for equal parts of prompts.

    The text is empty for a mapping that has only derived fields.
    """
    if isinstance(value, Mapping):
        fields = sorted((str(name), describe(part)) for name, part in value.items() if name not in DERIVED)
        return f"{{{fields}}}" if fields else ""
    if isinstance(value, list | tuple):
        return repr([describe(part) for part in value])
    if isinstance(value, torch.Tensor):
        # As bytes, because NumPy lacks some of torch's types.
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{value.dtype} {list(value.shape)} {blake2b(data.data, digest_size=16).hexdigest()}"
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    # A part of an unknown type equals no other part.
    return str(uuid4())


def continue_after(params: SamplingParams, tokens: int) -> None:
    """Change sampling parameters for the rest of an answer after ``tokens`` tokens."""
    if params.max_tokens is not None:
        params.max_tokens -= tokens
    params.min_tokens = max(0, params.min_tokens - tokens)
    if params.seed is not None:
        # Another seed, because the random numbers of the first tokens must not be used again.
        state = np.random.SeedSequence((params.seed & SEED_MASK, tokens)).generate_state(1, np.uint64)
        # The shift makes the seed positive, and far from vLLM's largest.
        params.seed = int(state[0] >> np.uint64(2))


# --- candidates that resume ---------------------------------------------------------


def check_resumable(params: SamplingParams) -> None:
    """Raise `InvalidRequest` if candidates with these sampling parameters cannot be resumed."""
    if params.logprobs is not None and not 0 <= params.logprobs <= 1:
        raise InvalidRequest(
            "sampling.logprobs",
            'must be at most 1 with "carry": "resume", since only log-probs of generated tokens are kept; '
            f'got {params.logprobs}, change it, or use "restart"',
        )
    name = depends_on_prompt_end(params)
    if name is not None:
        raise InvalidRequest(
            f"sampling.{name}",
            'does not work with "carry": "resume", since it depends on which tokens were generated after the '
            'prompt; leave it out, or use "restart"',
        )


def depends_on_prompt_end(params: SamplingParams) -> str | None:
    """Return the first parameter that depends on where the prompt ends, or None."""
    neutral = SamplingParams()
    for name in params.__struct_fields__:
        if name.startswith("_") or name in RESUMABLE:
            continue
        if getattr(params, name) not in (getattr(neutral, name), None, [], 0):
            return name
    return None


# --- the trajectory that a request continues ----------------------------------------


def make_turn(
    request: PromptRequest,
    shaping: RequestOptions,
    session: str | None,
    caller: str | None,
    tokenizer: Any = None,
) -> Turn:
    """Describe a request as a turn of a trajectory.

    ``session``: from a header that trainers send. ``caller``: name of the key. ``tokenizer``: the model's, if any.
    """
    prompt = request.prompt
    params = request.params
    is_greedy = params.temperature == 0
    # Requests of an evaluation have no session. Trainers use the numbers of prompts as names of sessions, in training
    # and in evaluation. So a prompt of training would look like a later turn of an evaluation.
    name = None
    if not is_greedy and shaping.policy != OFF:
        name = shaping.session or request.options.get("session_id") or session
    token_ids: Sequence[int] = ()
    # Beside embeddings, tokens are only a part of the prompt, and other prompts may have the same tokens.
    if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is None:
        token_ids = prompt.get("prompt_token_ids") or ()
    scores_prompt = params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
    return Turn(
        token_ids,
        None if tokenizer is None else count_stable(tokenizer, token_ids),
        name,
        opens_session=shaping.session is not None,
        greedy=is_greedy,
        scoring=params.max_tokens == 1 or scores_prompt,
        caller=caller or "",
    )


def count_stable(tokenizer: Any, token_ids: Sequence[int]) -> int:
    """Count a prompt's tokens without white space and reasoning tags at its end, which a later turn may not have."""
    tail = list(token_ids[-MAX_END_TOKENS:])
    # Negative numbers stand for images.
    if not tail or min(tail) < 0:
        return len(token_ids)
    match = UNSTABLE_END.search(tokenizer.decode(tail))
    end = "" if match is None else match[0]
    # Find the most tokens whose text is an end of this text.
    unstable = 0
    for length in range(1, len(tail) + 1):
        text = tokenizer.decode(tail[-length:])
        if len(text) > len(end):
            break
        if end.endswith(text):
            unstable = length
    return len(token_ids) - unstable
