"""A prompt as vLLM's ``generate()`` gets it, and the sampling parameters of its candidates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from zlib import crc32

import numpy as np
from msgspec import structs
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from darts_server.engine.port import Probe, RequestTokens
from darts_server.rollout.learned.prompts import key_of
from darts_server.vllm.held import PASSED_ON
from darts_server.vllm.probe.capture import ARGUMENT

SEED_MASK = (1 << 64) - 1
SESSION_ARGUMENT = "session_id"
"""vLLM's name for the session in ``vllm_xargs``: each trajectory of a group may have its own."""
SEED_FIELDS = {"seed": None, "output_kind": None}
"""Sampling parameters that may differ between requests of one group."""


@dataclass(frozen=True)
class PromptRequest:
    """The arguments of ``generate()`` for one prompt.

    ``options``: keyword arguments of ``generate()`` beside prompt, sampling parameters and request id.
    """

    prompt: Any
    params: SamplingParams
    request_id: str
    options: Mapping[str, Any] = field(default_factory=dict)

    # --- identity -----------------------------------------------------------

    @cached_property
    def prompt_key(self) -> str:
        """The key of the prompt's statistics, derived from what the model sees: the same for text as for its tokens."""
        prompt = self.prompt if isinstance(self.prompt, dict) else {"prompt": self.prompt}
        tokens, lora = prompt.get("prompt_token_ids"), self.options.get("lora_request")
        text = None if tokens else prompt.get("prompt")
        others = [text, prompt.get("mm_hashes"), None if lora is None else lora.lora_name]
        return key_of(tokens or (), *(repr(part) for part in others if part))

    @property
    def tokens(self) -> RequestTokens:
        """Tokens of the prompt, 1 if it has none, as one of embeddings; and those that a candidate may have."""
        prompt = self.prompt.get("prompt_token_ids") if isinstance(self.prompt, dict) else None
        return RequestTokens(max(1, len(prompt or ())), self.params.max_tokens)

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
        extra = {name: value for name, value in (params["extra_args"] or {}).items() if not _is_own(name)}
        return f"{self.prompt_key} {params | SEED_FIELDS | {'extra_args': extra}}"

    # --- candidates ---------------------------------------------------------

    def params_of(self, index: int) -> SamplingParams:
        """Sampling parameters of candidate ``index``: n = 1, final-only output, seed + index."""
        return self._unseeded if self.params.seed is None else self._child(index)

    def probed_params_of(self, index: int, probe: Probe, number: int | None) -> SamplingParams:
        """The same for a probed candidate. ``number``: identifies its hidden states; ``None`` if none are sent."""
        child = self._child(index)
        if number is not None:
            child.extra_args = {**(child.extra_args or {}), ARGUMENT: [number, *probe.detect_at]}
        if probe.logprobs:
            child.extra_args = {**(child.extra_args or {}), PASSED_ON: True}
        if self.adds_logprobs(probe):
            child.logprobs = 0
        return child

    def adds_logprobs(self, probe: Probe) -> bool:
        """Whether log-probs are computed for the probe alone, as the request did not ask for any."""
        return probe.logprobs and self.params.logprobs is None

    def resumed(self, index: int, prefix: Sequence[int]) -> tuple[Any, SamplingParams]:
        """Return prompt and sampling parameters of candidate ``index`` that has generated ``prefix`` already.

        The random numbers of its first tokens must not come again, so the others have a seed of their own.
        """
        child, tokens = self._child(index), len(prefix)
        child.max_tokens = None if child.max_tokens is None else child.max_tokens - tokens
        child.min_tokens = max(0, child.min_tokens - tokens)
        child.seed = None if child.seed is None else resumed_seed(child.seed, tokens)
        return {**self.prompt, "prompt_token_ids": [*self.prompt["prompt_token_ids"], *prefix]}, child

    @cached_property
    def _unseeded(self) -> SamplingParams:
        return self._child(0)

    def _child(self, index: int) -> SamplingParams:
        child = self.params.clone()
        child.n = 1
        child.seed = None if child.seed is None else child.seed + index
        child.output_kind = RequestOutputKind.FINAL_ONLY
        child.skip_clone = True  # vLLM would clone it once more for each candidate, and nothing else holds this one
        return child


def resumed_seed(seed: int, tokens: int) -> int:
    """Return the seed of a candidate with this seed from its token number ``tokens``, from 0, on."""
    state = np.random.SeedSequence((seed & SEED_MASK, tokens)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(2))  # positive, and far from vLLM's largest


def _is_own(name: str) -> bool:
    """Whether an extra argument may differ between requests of one group."""
    return name.startswith("darts_") or name == SESSION_ARGUMENT
