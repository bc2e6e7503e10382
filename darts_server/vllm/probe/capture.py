"""Takes hidden states out of the steps of a worker."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from darts_server.vllm.probe import wire
from darts_server.vllm.probe.probed_requests import ProbedRequest, ProbedRequests
from darts_server.vllm.probe.sender import CapturedRows, HostCopies, Sender
from darts_server.vllm.probe.steps import Step, reader_for


def install(worker: Any, address: str) -> str | None:
    """Send states of this worker's requests to ``address``; return the reason if that is impossible. Never raises.

    One worker of an engine sends states: the first of those that have the model's last layer. For the others this does
    nothing.
    """
    try:
        if get_tp_group().rank_in_group != 0 or not get_pp_group().is_last_rank:
            return None
        sender = Sender(address)
        capture = Capture(worker.model_runner, sender.put)
        sender.on_failure = capture.stop
        sender.start()
        capture.start()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Capture:
    """Wraps the model runner's ``execute_model``.

    Args:
        put: queues what is to be sent, and returns at once.

    Raises:
        ValueError: see `reader_for`.
    """

    def __init__(self, runner: Any, put: Callable[[CapturedRows | Sequence[bytes]], None]) -> None:
        self._name, self._read_step = reader_for(runner)
        self._runner = runner
        self._execute = runner.execute_model
        self._width: int = runner.model_config.get_hidden_size()
        self._requests = ProbedRequests(1 + runner.vllm_config.num_speculative_tokens)
        self._copy = HostCopies(runner.device)
        self._put = put

    def start(self) -> None:
        """Wrap the runner's steps from now on, and announce it. Whatever fails on this device fails here."""
        self._copy([torch.zeros(1, device=self._runner.device)])
        self._put([wire.READY, str(self._width).encode(), self._name.encode()])
        self._runner.execute_model = self.execute_model

    def stop(self) -> None:
        """Unwrap the runner."""
        self._runner.__dict__.pop("execute_model", None)

    def execute_model(self, scheduled: Any, *args: Any, **options: Any) -> Any:
        """Execute the step, then take states out of it if requests with a probe are in it."""
        if options.get("dummy_run"):
            return self._execute(scheduled, *args, **options)
        if self._requests or scheduled.scheduled_new_reqs:
            try:
                self._requests.update(scheduled)
            except Exception as error:
                self._disable(error)
        output = self._execute(scheduled, *args, **options)
        if self._requests:
            try:
                self._capture_step(scheduled)
            except Exception as error:
                self._disable(error)
        return output

    def _capture_step(self, scheduled: Any) -> None:
        due = self._requests.due()
        if not due:
            return
        step = self._read_step(self._runner, scheduled)
        reached: list[tuple[ProbedRequest, int]] = []
        for request in due:
            computed = None if step is None else step.computed(request.request_id)
            if computed is not None and request.reaches(computed):
                reached.append((request, computed))
            else:
                self._requests.reschedule(request, computed)
        if step is not None and reached:
            self._capture_rows(step, reached)

    def _capture_rows(self, step: Step, reached: Sequence[tuple[ProbedRequest, int]]) -> None:
        requests = [request for request, _ in reached]
        # If the host does not know the numbers of tokens, the sender decides by those that are copied from the device.
        tokens = [computed - request.prompt_tokens for request, computed in reached] if step.exact else None
        with torch.inference_mode():
            rows, counts = step.states([request.request_id for request in requests])
            if rows.shape[1] != self._width:
                raise ValueError(f"states are {rows.shape[1]} wide, and the model's width is {self._width}")
            (rows, *more), ready = self._copy([rows] if counts is None else [rows, counts])
        self._put(CapturedRows(requests, rows, tokens, more[0] if more else None, ready))
        for request, computed in reached:
            if step.exact:
                request.take(computed)
            self._requests.reschedule(request, computed)

    def _disable(self, error: Exception) -> None:
        """Stop capturing, so that a fault of the probe does not stop the engine."""
        self.stop()
        self._requests = ProbedRequests(1)
        self._put([wire.FAULT, f"{type(error).__name__}: {error}".encode()])
