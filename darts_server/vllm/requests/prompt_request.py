"""A prompt as vLLM's ``generate()`` gets it: its candidates, those that go on, and its trajectory."""

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

from darts_server.engine.port import Probe, RequestTokens
from darts_server.exceptions import InvalidRequest
from darts_server.rollout.learned.statistics import key_of
from darts_server.rollout.turns import Turn
from darts_server.types import OFF, RequestOptions
from darts_server.vllm.engine_core.holding import NOT_HELD
from darts_server.vllm.engine_core.probe_capture import ARGUMENT

SEED_MASK = (1 << 64) - 1
SESSION_ARGUMENT = "session_id"
"""vLLM's name for the session in ``vllm_xargs``: each trajectory of a group may have its own."""
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
UNSTABLE_END = re.compile(r"\s*(?:<think>\s*(?:</think>\s*)?)?\Z")
"""What a template puts before an answer, and not there again when the answer has become a part of the chat: it begins
the reasoning, or leaves it out at once, and white space joins that of the answer in one token."""
LONGEST_END = 24  # tokens of it, at most
SEED_FIELDS = {"seed": None, "output_kind": None}
"""Sampling parameters that may differ between requests of one group, as may our own extra arguments."""
SCHEDULING = frozenset({"trace_headers", "priority", "data_parallel_rank", "session_id", "kv_hints", "prompt_text"})
"""Options of ``generate()`` that may differ too: they say when and where a request runs, not what is sampled."""
NAMED = ("prompt_token_ids", "prompt", "mm_hashes")
"""Fields of a prompt that its key has by themselves."""
DERIVED = frozenset(
    {
        *("type", "arrival_time", "prompt_token_offsets"),
        *("mm_kwargs", "mm_placeholders"),  # vLLM itself identifies what they are by the hashes
        "cache_salt",  # part of the join key: statistics outlive a salt that changes with every step of training
    }
)
"""Fields of a prompt that follow from others, or change nothing that the model sees. All other fields are part of the
prompt's key, also those of later versions of vLLM."""


@dataclass(frozen=True)
class PromptRequest:
    """The arguments of ``generate()`` for one prompt.

    ``options``: keyword arguments of ``generate()`` beside prompt, sampling parameters and request id.
    """

    prompt: Any
    params: SamplingParams
    request_id: str
    options: Mapping[str, Any] = field(default_factory=dict)
    _shared: list[SamplingParams] = field(default_factory=list, init=False, repr=False, compare=False)

    # --- identity -----------------------------------------------------------

    @cached_property
    def prompt_key(self) -> str:
        """The key of the prompt's statistics, derived from what the model sees: the same for text as for its tokens."""
        prompt = self.prompt if isinstance(self.prompt, dict) else {"prompt": self.prompt}
        tokens, lora = prompt.get("prompt_token_ids"), self.options.get("lora_request")
        text = None if tokens else prompt.get("prompt")
        named = [text, prompt.get("mm_hashes"), None if lora is None else lora.lora_name]
        rest = {name: value for name, value in prompt.items() if name not in NAMED and value is not None}
        texts = [*map(repr, filter(None, named)), describe(rest)]
        return key_of(tokens or (), *filter(None, texts))

    @property
    def tokens(self) -> RequestTokens:
        """Tokens of the prompt, and those that a candidate may have. A prompt of embeddings has no tokens."""
        prompt = self.prompt.get("prompt_token_ids") if isinstance(self.prompt, dict) else None
        return RequestTokens(len(prompt) if prompt else None, self.params.max_tokens)

    @cached_property
    def tail_seed(self) -> Sequence[int] | None:
        """Seed of the sampled tail, from seed and prompt: a request can be repeated. ``None`` without a seed."""
        if self.params.seed is None:
            return None
        tokens = self.prompt.get("prompt_token_ids", ()) if isinstance(self.prompt, dict) else self.prompt
        return (self.params.seed & SEED_MASK, crc32(repr(tokens).encode()))

    @cached_property
    def join_key(self) -> str:
        """Equal for requests whose trajectories may answer each other: same prompt and sampling, except the seed."""
        params = structs.asdict(self.params)
        extra = {
            name: value
            for name, value in (params["extra_args"] or {}).items()
            if not name.startswith("darts_") and name != SESSION_ARGUMENT
        }
        options = {name: value for name, value in self.options.items() if name not in SCHEDULING and value is not None}
        if (lora := options.get("lora_request")) is not None:
            options["lora_request"] = (lora.lora_name, lora.lora_int_id)
        prompt = self.prompt if isinstance(self.prompt, dict) else {}
        salt = prompt.get("cache_salt") or prompt.get("decoder_prompt", {}).get("cache_salt")
        return f"{self.prompt_key} {salt!r} {options} {params | SEED_FIELDS | {'extra_args': extra}}"

    # --- candidates ---------------------------------------------------------

    def params_of(self, index: int, *, is_own: bool = False) -> SamplingParams:
        """Sampling parameters of candidate ``index``: n = 1, final-only output, seed + index.

        Without a seed all candidates have the same object. ``is_own``: return one that may be changed.
        """
        if self._shared and not is_own:
            return self._shared[0]
        child = self.params.clone()
        child.n = 1
        child.seed = None if child.seed is None else child.seed + index
        child.output_kind = RequestOutputKind.FINAL_ONLY
        child.skip_clone = True  # vLLM would clone it once more for each candidate, and nothing else holds this one
        if child.seed is None and not is_own:
            self._shared.append(child)
        return child

    def probed_params_of(self, index: int, probe: Probe, number: int | None) -> SamplingParams:
        """The same for a probed candidate. ``number``: identifies its hidden states; ``None`` if none are sent."""
        child = self.params_of(index, is_own=True)
        if number is not None:
            child.extra_args = {**(child.extra_args or {}), ARGUMENT: [number, *probe.detect_at]}
        if probe.logprobs:
            child.extra_args = {**(child.extra_args or {}), NOT_HELD: True}
        if self.adds_logprobs(probe):
            child.logprobs = 0
        return child

    def adds_logprobs(self, probe: Probe) -> bool:
        """Whether log-probs are computed for the probe alone, as the request did not ask for any."""
        return probe.logprobs and self.params.logprobs is None

    def resumed(self, index: int, prefix: Sequence[int]) -> tuple[Any, SamplingParams]:
        """Return prompt and sampling parameters of candidate ``index`` that has generated ``prefix`` already."""
        child = self.params_of(index, is_own=True)
        leave_rest(child, len(prefix))
        return {**self.prompt, "prompt_token_ids": [*self.prompt["prompt_token_ids"], *prefix]}, child


def describe(value: object) -> str:
    """Return a text that is equal for equal parts of prompts only.

    A part of a type that is not known here gets a text that no other part has. The text is empty for a mapping that has
    derived fields alone.
    """
    if isinstance(value, Mapping):
        fields = sorted((str(name), describe(each)) for name, each in value.items() if name not in DERIVED)
        return f"{{{fields}}}" if fields else ""
    if isinstance(value, list | tuple):
        return repr([describe(each) for each in value])
    if isinstance(value, torch.Tensor):
        # As bytes, since NumPy does not have all types of tensors.
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{value.dtype} {list(value.shape)} {blake2b(data.data, digest_size=16).hexdigest()}"
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    return str(uuid4())


def leave_rest(params: SamplingParams, tokens: int) -> None:
    """Leave in sampling parameters what is left to generate after so many tokens.

    The random numbers of the first tokens must not come again, so the others have a seed of their own.
    """
    params.max_tokens = None if params.max_tokens is None else params.max_tokens - tokens
    params.min_tokens = max(0, params.min_tokens - tokens)
    if params.seed is not None:
        state = np.random.SeedSequence((params.seed & SEED_MASK, tokens)).generate_state(1, np.uint64)
        params.seed = int(state[0] >> np.uint64(2))  # positive, and far from vLLM's largest


# --- candidates that go on from what they had generated when they were stopped -------


def check_resumable(params: SamplingParams) -> None:
    """Raise `InvalidRequest` for the first parameter that depends on the prompt's end, or needs what is not kept."""
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
    names = (name for name in params.__struct_fields__ if not name.startswith("_") and name not in RESUMABLE)
    return next((name for name in names if getattr(params, name) not in (getattr(neutral, name), None, [], 0)), None)


# --- the trajectory that a request belongs to ---------------------------------------


def make_turn(
    request: PromptRequest, shaping: RequestOptions, session: str | None, caller: str | None, tokenizer: Any = None
) -> Turn:
    """``session``: by a header that trainers send. ``caller``: the key's name. ``tokenizer``: the model's, if any.

    Evaluation has no sessions: trainers name those by prompts' numbers too, and training's first prompts would look
    like later turns of them.
    """
    prompt, params = request.prompt, request.params
    name = shaping.session or request.options.get("session_id") or session
    is_greedy = params.temperature == 0
    token_ids: Sequence[int] = ()
    # Beside embeddings, tokens are only a part of a prompt: another prompt may have the same.
    if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is None:
        token_ids = prompt.get("prompt_token_ids") or ()
    scores_prompt = params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
    return Turn(
        token_ids,
        None if tokenizer is None else count_stable(tokenizer, token_ids),
        None if is_greedy or shaping.policy == OFF else name,
        opens_session=shaping.session is not None,
        greedy=is_greedy,
        scoring=params.max_tokens == 1 or scores_prompt,
        caller=caller or "",
    )


def count_stable(tokenizer: Any, token_ids: Sequence[int]) -> int:
    """Return how many tokens of a prompt a later turn begins with: all but the end that templates render otherwise."""
    tail = list(token_ids[-LONGEST_END:])
    if not tail or min(tail) < 0:  # what stands for an image
        return len(token_ids)
    match = UNSTABLE_END.search(tokenizer.decode(tail))
    end = "" if match is None else match[0]
    count = 0
    for length in range(1, len(tail) + 1):
        text = tokenizer.decode(tail[-length:])
        if len(text) > len(end):
            break
        if end.endswith(text):
            count = length
    return len(token_ids) - count
