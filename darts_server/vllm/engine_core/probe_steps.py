"""Reads hidden states from either of vLLM's model runners, after the forward pass of a step and before sampling.

A request's row is that of its last certain token: the last token of its prompt, or the last sampled token. Drafted
tokens follow it, so speculative decoding does not change it. Rows are the inputs of the output head.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch


class FirstRunnerStep:
    """A step of ``vllm.v1.worker.gpu_model_runner``, which the CPU's runner is based on."""

    # At the end of ``execute_model`` this runner has subtracted rejected drafts from its number of computed tokens.
    is_exact = True
    """Whether the host knows the numbers of tokens. It does not while the device verifies drafts."""

    def __init__(self, runner: Any, state: Any) -> None:
        self._batch = runner.input_batch
        self._scheduled = state.scheduler_output
        self._rows: torch.Tensor = state.sample_hidden_states

    def count_computed(self, request_id: str) -> int | None:
        """Return the number of a request's tokens up to the last certain one, or None if it is not in this step.

        The number includes the prompt. It may be too large unless the step ``is_exact``.
        """
        step_tokens = self._scheduled.num_scheduled_tokens.get(request_id)
        if step_tokens is None:
            return None
        computed_before = self._batch.num_computed_tokens_cpu[self._batch.req_id_to_index[request_id]]
        # Drafts are scheduled tokens that may be rejected.
        return int(computed_before) + int(step_tokens) - count_drafts(self._scheduled, request_id)

    def gather_states(self, request_ids: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gather the rows of requests, [n, width], and their exact numbers of tokens, [n], if the host lacks them."""
        places = [self._batch.req_id_to_index[request_id] for request_id in request_ids]
        if self._scheduled.scheduled_spec_decode_tokens:
            # Each request has a row for its certain token and a row for each draft.
            row_counts = (1 + count_drafts(self._scheduled, request_id) for request_id in self._batch.req_ids)
            first_rows = list(accumulate(row_counts, initial=0))
            places = [first_rows[place] for place in places]
        return self._rows[index_on(self._rows.device, places)], None


class SecondRunnerStep:
    """A step of ``vllm.v1.worker.gpu.model_runner``. With drafts only the device knows its numbers of tokens."""

    def __init__(self, runner: Any, state: Any, scheduled: Any) -> None:
        self.is_exact = runner.num_speculative_steps == 0
        self._batch = state.input_batch
        self._hidden: torch.Tensor = state.hidden_states
        self._scheduled = scheduled
        self._places = {request_id: place for place, request_id in enumerate(self._batch.req_ids)}

    def count_computed(self, request_id: str) -> int | None:
        place = self._places.get(request_id)
        if place is None:
            return None
        computed_before = self._batch.num_computed_tokens_np[place]
        step_tokens = self._scheduled.num_scheduled_tokens[request_id]
        return int(computed_before) + int(step_tokens) - count_drafts(self._scheduled, request_id)

    def gather_states(self, request_ids: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor | None]:
        places = index_on(self._hidden.device, [self._places[request_id] for request_id in request_ids])
        # A request has logits for its certain token and then for each draft.
        first_logits = self._batch.cu_num_logits[places].long()
        rows = self._hidden[self._batch.logits_indices[first_logits]]
        if self.is_exact:
            return rows, None
        draft_counts = self._batch.cu_num_logits[places + 1].long() - first_logits - 1
        return rows, self._batch.seq_lens[places] - draft_counts


Step = FirstRunnerStep | SecondRunnerStep


def count_drafts(scheduled: Any, request_id: str) -> int:
    return len(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))


def check_runner(runner: Any) -> None:
    """Raise `ValueError` with the reason if `read_step` cannot read a model runner."""
    if runner.is_pooling_model:
        raise ValueError("a pooling model generates nothing")
    if hasattr(runner, "input_batch"):
        return
    if not hasattr(runner, "req_states"):
        raise ValueError(f"{type(runner).__module__} is an unknown model runner")
    if runner.pcp_manager is not None:
        raise ValueError("prefill context parallelism spreads a prompt's states over workers")
    if runner.model_state.num_new_sampled_tokens_per_step != 1:
        raise ValueError("a diffusion model has no state of a last token")


def read_step(runner: Any, scheduled: Any) -> Step | None:
    """Read the current step, or return None if it had no forward pass or this worker lacks the last layer."""
    state = runner.execute_model_state
    if state is None:
        return None
    # Only vLLM's first runner keeps its batch between steps.
    if hasattr(runner, "input_batch"):
        return FirstRunnerStep(runner, state)
    if state.hidden_states is None:
        return None
    return SecondRunnerStep(runner, state, scheduled)


def index_on(device: torch.device, places: Sequence[int]) -> torch.Tensor:
    index = torch.tensor(places, dtype=torch.long)
    if device.type == "cuda":
        # Do not wait for the steps that the device has queued.
        return index.pin_memory().to(device, non_blocking=True)
    return index.to(device)
