"""What a step has made, read from either of vLLM's model runners after the forward pass and before sampling.

Of each sequence the row of its last certain token is taken: the last of its prompt, or the last that was sampled. What
a drafter guesses follows that row, so several tokens a step change nothing. Rows are those that the output head gets.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch


class Step(Protocol):
    """One step of a model runner."""

    def computed(self, request_id: str) -> int | None:
        """Number of the request's last certain token, prompt included; ``None`` if it was not in this step.

        It may be too large if :attr:`exact` is not set.
        """
        ...

    @property
    def exact(self) -> bool:
        """Whether the host knows how many tokens there are. It does not while it awaits which guesses were right."""
        ...

    def states(self, request_ids: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Their rows, [n, width], and what :meth:`computed` should have said, [n], if that may be wrong. New tensors
        on the model's device."""
        ...


class FirstRunnersStep:
    """Of ``vllm.v1.worker.gpu_model_runner``, which is also the CPU's.

    By the end of ``execute_model`` it has corrected the number of tokens by the guesses that were wrong.
    """

    exact = True

    def __init__(self, runner: Any, state: Any) -> None:
        self._batch = runner.input_batch
        self._scheduled = state.scheduler_output
        self._rows: torch.Tensor = state.sample_hidden_states

    def computed(self, request_id: str) -> int | None:
        scheduled = self._scheduled.num_scheduled_tokens.get(request_id)
        if scheduled is None:
            return None
        before = self._batch.num_computed_tokens_cpu[self._batch.req_id_to_index[request_id]]
        return int(before) + int(scheduled) - self._guesses(request_id)

    def states(self, request_ids: Sequence[str]) -> tuple[torch.Tensor, None]:
        places = [self._batch.req_id_to_index[request_id] for request_id in request_ids]
        if self._scheduled.scheduled_spec_decode_tokens:
            first = list(accumulate((1 + self._guesses(r) for r in self._batch.req_ids), initial=0))
            places = [first[place] for place in places]
        return self._rows[on(self._rows.device, places)], None

    def _guesses(self, request_id: str) -> int:
        return len(self._scheduled.scheduled_spec_decode_tokens.get(request_id, ()))


class SecondRunnersStep:
    """Of ``vllm.v1.worker.gpu.model_runner``. With a drafter it never has the number of tokens on the host."""

    def __init__(self, runner: Any, state: Any, scheduled: Any) -> None:
        self.exact = runner.num_speculative_steps == 0
        self._batch = state.input_batch
        self._hidden: torch.Tensor = state.hidden_states
        self._scheduled = scheduled
        self._places = {request_id: place for place, request_id in enumerate(self._batch.req_ids)}

    def computed(self, request_id: str) -> int | None:
        if (place := self._places.get(request_id)) is None:
            return None
        guesses = len(self._scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
        scheduled = self._scheduled.num_scheduled_tokens[request_id]
        return int(self._batch.num_computed_tokens_np[place]) + int(scheduled) - guesses

    def states(self, request_ids: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor | None]:
        places = on(self._hidden.device, [self._places[request_id] for request_id in request_ids])
        first = self._batch.cu_num_logits[places].long()
        rows = self._hidden[self._batch.logits_indices[first]]
        if self.exact:
            return rows, None
        guesses = self._batch.cu_num_logits[places + 1].long() - first - 1
        return rows, self._batch.seq_lens[places] - guesses


Reader = Callable[[Any, Any], Step | None]


def reader_of(runner: Any) -> tuple[str, Reader]:
    """The runner's name, and what reads its step: from it and the step's ``SchedulerOutput``.

    A step without a forward pass, or one that has not come to the model's last layer, gives ``None``.

    Raises:
        ValueError: it cannot be read; the message says why.
    """
    if runner.is_pooling_model:
        raise ValueError("a pooling model generates nothing")
    if hasattr(runner, "input_batch"):
        return "first", _first
    if not hasattr(runner, "req_states"):
        raise ValueError(f"{type(runner).__module__} is a model runner that is not known here")
    if runner.pcp_manager is not None:
        raise ValueError("prefill context parallelism spreads a prompt's states over workers")
    if runner.model_state.num_new_sampled_tokens_per_step != 1:
        raise ValueError("a diffusion model has no state of a last token")
    return "second", _second


def on(device: torch.device, places: Sequence[int]) -> torch.Tensor:
    """An index there, without waiting for the device."""
    index = torch.tensor(places, dtype=torch.long)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)


def _first(runner: Any, _: Any) -> Step | None:
    state = runner.execute_model_state
    return None if state is None else FirstRunnersStep(runner, state)


def _second(runner: Any, scheduled: Any) -> Step | None:
    state = runner.execute_model_state
    return None if state is None or state.hidden_states is None else SecondRunnersStep(runner, state, scheduled)
