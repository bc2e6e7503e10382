"""Our proposer of drafts, as vLLM's ``custom_class``. It runs in the worker that samples."""

import time
from functools import cache
from typing import Any

import numpy as np
import psutil
from vllm.config import VllmConfig

from darts_server.vllm.engine_core.holding import DRAFTS

PROMPT_TOKENS = "darts_prompt_tokens"
"""Name in ``extra_args`` of a resumed request: number of tokens of its true prompt, without generated tokens."""
HISTORY = "darts_history"
"""Name in ``extra_args`` of a request: answers of its prompt that the worker has not counted, `history.Answers`."""
MEMORY_SHARE = 32
MOST_BITS = 26
"""The counts take a 32nd part of the machine's memory, at most 2 GiB. A slot has 32 bytes, a token of a new text
takes seven, and 60 % are used, so 2 GiB are enough for 6 million tokens of different texts. Full counts are emptied."""
PADDED_BYTES = 1 << 28
"""If log-probs are returned, vLLM makes logits of as many tokens for each request as for the longest draft. They may
take so many bytes. 512 requests and a draft of 12 tokens would take 4 GB with 152,000 logits."""


@cache
def _bind_runners() -> None:
    """Let vLLM's model runner give itself to its drafter, which needs the ids of requests, and return the drafts."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    propose_drafts = GPUModelRunner.propose_draft_token_ids
    sample_tokens = GPUModelRunner.sample_tokens

    def propose_with_runner(self: Any, *args: Any, **more: Any) -> Any:
        if isinstance(self.drafter, Drafter):
            self.drafter.runner = self
        return propose_drafts(self, *args, **more)

    def sample_with_drafts(self: Any, *args: Any) -> Any:
        """Add the drafts of the step and the totals so far to the output of vLLM's ``sample_tokens``."""
        output = sample_tokens(self, *args)
        # All steps without requests share one empty output of vLLM's, which must not be changed.
        if isinstance(self.drafter, Drafter) and output.req_ids:
            totals = tuple(self.drafter.drafts.totals.ravel().tolist())
            setattr(output, DRAFTS, (self.take_draft_token_ids(), totals))
        return output

    GPUModelRunner.propose_draft_token_ids = propose_with_runner  # type: ignore[method-assign]
    GPUModelRunner.sample_tokens = sample_with_drafts  # type: ignore[assignment]


class Drafter:
    """Implements the proposer that ``GPUModelRunner`` calls after each step."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        # numba must not be imported before the worker has rebound vLLM's kernels, which is before its runner is made.
        from darts_server.drafts.contexts import SLOT_BYTES
        from darts_server.drafts.proposer import Drafts

        speculative = vllm_config.speculative_config
        assert speculative is not None
        self._longest = vllm_config.model_config.max_model_len
        rows = vllm_config.scheduler_config.max_num_seqs
        slots = psutil.virtual_memory().total // MEMORY_SHARE // SLOT_BYTES
        bits = min(int(slots).bit_length() - 1, MOST_BITS)
        logits = PADDED_BYTES // (4 * vllm_config.model_config.get_vocab_size())
        # vLLM's profile of memory has two rows for each sequence.
        padded = max(2 * rows, logits)
        self.drafts = Drafts(rows, speculative.num_speculative_tokens, bits, time.monotonic, padded)
        self.runner: Any = None
        self._names: list[str] = []
        # Of each request: the number of tokens of its prompt and its ``min_tokens``.
        self._first_ends = np.zeros(0, np.int64)
        _bind_runners()

    def load_model(self, *_: Any, **__: Any) -> None:
        """Load nothing. vLLM calls it for every proposer."""

    def propose(
        self,
        sampled: list[list[int]],
        ends: Any,
        token_ids: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return drafts of all requests, whose sampled tokens are at the ends of their token ids already."""
        count = len(sampled)
        names = self.runner.input_batch.req_ids[:count]
        if names != self._names:
            self._names = list(names)
            self._first_ends = np.asarray([self._first_end(name) for name in names], np.int64)
        now = ends[:count].astype(np.int64)
        # vLLM forbids the end after a whole draft if it was forbidden before the draft. So no draft of a request with
        # min_tokens may reach the place where the answer may first end.
        longest = np.where(now < self._first_ends, self._first_ends, self._longest)
        is_decoding = [len(tokens) > 0 for tokens in sampled]
        return self.drafts.propose(
            names,
            token_ids[:count],
            now,
            is_decoding,
            self._prompt_of,
            longest,
        )

    def _first_end(self, name: str) -> int:
        request = self.runner.requests[name]
        least = 0
        if request.sampling_params is not None:
            least = request.sampling_params.min_tokens
        end: int = request.num_prompt_tokens + least
        return end

    def _prompt_of(self, name: str) -> tuple[object, int, Any]:
        """Return the key of a request's prompt, and the prompt's number of tokens.

        Also return the prompt's earlier answers that this worker has not counted.
        """
        request = self.runner.requests[name]
        if request.prompt_token_ids is None:
            # A prompt of embeddings has no tokens that others could share.
            return name, request.num_prompt_tokens, []
        params = request.sampling_params
        extra = {}
        if params is not None and params.extra_args:
            extra = params.extra_args
        # The engine's prompt of a resumed request ends with generated tokens, which are no part of the key.
        prompt_tokens = extra.get(PROMPT_TOKENS) or len(request.prompt_token_ids)
        tokens = np.asarray(request.prompt_token_ids[:prompt_tokens], np.int32)
        adapter = None
        if request.lora_request is not None:
            adapter = request.lora_request.lora_name
        # Answers are taken out, so that they are neither kept in memory nor counted again.
        return (adapter, hash(tokens.tobytes())), prompt_tokens, extra.pop(HISTORY, [])
