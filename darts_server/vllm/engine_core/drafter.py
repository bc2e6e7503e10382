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
MEMORY_DIVISOR = 32
MOST_BITS = 26
"""The counts take a 32nd part of the machine's memory, at most 2 GiB. A slot has 32 bytes, a token of a new text
takes seven, and 60 % are used, so 2 GiB are enough for 6 million tokens of different texts. Full counts are emptied."""
MAX_LOGITS_BYTES = 1 << 28
"""512 requests and a draft of 12 tokens would take 4 GB with 152,000 logits."""


@cache
def _wrap_runners() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    vllms_propose = GPUModelRunner.propose_draft_token_ids
    vllms_sample = GPUModelRunner.sample_tokens

    def propose_with_runner(self: Any, *args: Any, **more: Any) -> Any:
        # The drafter needs the ids of requests, which vLLM does not pass.
        if isinstance(self.drafter, Drafter):
            self.drafter.runner = self
        return vllms_propose(self, *args, **more)

    def sample_with_drafts(self: Any, *args: Any) -> Any:
        output = vllms_sample(self, *args)
        # All steps without requests share one empty output of vLLM's, which must not be changed.
        if isinstance(self.drafter, Drafter) and output.req_ids:
            totals = tuple(self.drafter.drafts.totals.ravel().tolist())
            # The engine reads this attribute, so that it need not call the worker again.
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
        self._max_model_len = vllm_config.model_config.max_model_len
        max_sequences = vllm_config.scheduler_config.max_num_seqs
        slots = psutil.virtual_memory().total // MEMORY_DIVISOR // SLOT_BYTES
        max_bits = min(int(slots).bit_length() - 1, MOST_BITS)
        # If log-probs are returned, vLLM makes logits of as many tokens for each request as for the longest draft. Each
        # token has a row of logits as wide as the vocabulary.
        float_bytes = 4
        row_bytes = float_bytes * vllm_config.model_config.get_vocab_size()
        affordable_rows = MAX_LOGITS_BYTES // row_bytes
        # vLLM's profile of memory has two rows for each sequence.
        max_logprob_rows = max(2 * max_sequences, affordable_rows)
        self.drafts = Drafts(
            max_sequences,
            speculative.num_speculative_tokens,
            max_bits,
            time.monotonic,
            max_logprob_rows,
        )
        self.runner: Any = None
        self._batch_ids: list[str] = []
        # Length of each request's text at which its answer may first end.
        self._first_ends = np.zeros(0, np.int64)
        _wrap_runners()

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
        batch_ids = self.runner.input_batch.req_ids[:count]
        if batch_ids != self._batch_ids:
            self._batch_ids = list(batch_ids)
            self._first_ends = np.asarray([self._first_end(request_id) for request_id in batch_ids], np.int64)
        lengths = ends[:count].astype(np.int64)
        # vLLM forbids the end after a whole draft if it was forbidden before the draft. So no draft of a request with
        # min_tokens may reach the place where the answer may first end.
        max_lengths = np.where(lengths < self._first_ends, self._first_ends, self._max_model_len)
        # A request whose prompt is computed in parts has no sampled token before the last part.
        is_decoding = [len(tokens) > 0 for tokens in sampled]
        return self.drafts.propose(
            batch_ids,
            token_ids[:count],
            lengths,
            is_decoding,
            self._prompt_of,
            max_lengths,
        )

    def _first_end(self, request_id: str) -> int:
        request = self.runner.requests[request_id]
        min_tokens = 0
        if request.sampling_params is not None:
            min_tokens = request.sampling_params.min_tokens
        first_end: int = request.num_prompt_tokens + min_tokens
        return first_end

    def _prompt_of(self, request_id: str) -> tuple[object, int, Any]:
        """Return the prompt's key, its number of tokens, and its earlier answers that this worker has not counted."""
        request = self.runner.requests[request_id]
        if request.prompt_token_ids is None:
            # A prompt of embeddings has no tokens that others could share.
            return request_id, request.num_prompt_tokens, []
        params = request.sampling_params
        extra_args = {}
        if params is not None and params.extra_args:
            extra_args = params.extra_args
        # The engine's prompt of a resumed request ends with generated tokens, which are no part of the key.
        prompt_tokens = extra_args.get(PROMPT_TOKENS) or len(request.prompt_token_ids)
        tokens = np.asarray(request.prompt_token_ids[:prompt_tokens], np.int32)
        adapter = None
        if request.lora_request is not None:
            adapter = request.lora_request.lora_name
        key = (adapter, hash(tokens.tobytes()))
        # Answers are taken out, so that they are neither kept in memory nor counted again.
        return key, prompt_tokens, extra_args.pop(HISTORY, [])
