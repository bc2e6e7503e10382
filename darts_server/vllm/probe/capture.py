"""Takes states out of the steps of a worker."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from darts_server.vllm.probe import wire
from darts_server.vllm.probe.probed_requests import ProbedRequest, ProbedRequests
from darts_server.vllm.probe.sender import CapturedRows, HostCopies, Sender
from darts_server.vllm.probe.steps import Step, reader_of


def install(worker: Any, address: str) -> str | None:
    """Have this worker tell states to ``address``; why it cannot, if so. It does not raise.

    Of an engine's workers one tells: the first of those that have the model's last layer. The others do nothing.
    """
    try:
        if get_tp_group().rank_in_group != 0 or not get_pp_group().is_last_rank:
            return None
        sender = Sender(address)
        capture = Capture(worker.model_runner, sender.put)
        sender.broken = capture.end
        sender.start()
        capture.begin()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Capture:
    """Stands before the runner's ``execute_model``.

    Args:
        put: takes what is to be sent, and returns at once.

    Raises:
        ValueError: see `reader_of`.
    """

    def __init__(self, runner: Any, put: Callable[[CapturedRows | Sequence[bytes]], None]) -> None:
        self._name, self._read = reader_of(runner)
        self._runner = runner
        self._execute = runner.execute_model
        self._width: int = runner.model_config.get_hidden_size()
        self._watches = ProbedRequests(1 + runner.vllm_config.num_speculative_tokens)
        self._copy = HostCopies(runner.device)
        self._put = put

    def begin(self) -> None:
        """Take the runner's steps from now on, and say so. What will not work on this device fails here."""
        self._copy([torch.zeros(1, device=self._runner.device)])
        self._put([wire.READY, str(self._width).encode(), self._name.encode()])
        self._runner.execute_model = self.execute_model

    def end(self) -> None:
        """Leave the runner as it was."""
        self._runner.__dict__.pop("execute_model", None)

    def execute_model(self, scheduled: Any, *args: Any, **options: Any) -> Any:
        """The runner's, with a look at what it has made if anyone asked."""
        if options.get("dummy_run"):
            return self._execute(scheduled, *args, **options)
        if self._watches or scheduled.scheduled_new_reqs:
            try:
                self._watches.update(scheduled)
            except Exception as error:
                self._give_up(error)
        output = self._execute(scheduled, *args, **options)
        if self._watches:
            try:
                self._look(scheduled)
            except Exception as error:
                self._give_up(error)
        return output

    def _look(self, scheduled: Any) -> None:
        due = self._watches.due()
        if not due:
            return
        step = self._read(self._runner, scheduled)
        reached: list[tuple[ProbedRequest, int]] = []
        for watch in due:
            computed = None if step is None else step.computed(watch.request_id)
            if computed is not None and watch.reaches(computed):
                reached.append((watch, computed))
            else:
                self._watches.again(watch, computed)
        if step is not None and reached:
            self._take(step, reached)

    def _take(self, step: Step, reached: Sequence[tuple[ProbedRequest, int]]) -> None:
        watches = [watch for watch, _ in reached]
        # If the step does not know how many tokens there are, the sender decides: it has what the device says.
        tokens = [computed - watch.prompt for watch, computed in reached] if step.exact else None
        with torch.inference_mode():
            rows, counts = step.states([watch.request_id for watch in watches])
            if rows.shape[1] != self._width:
                raise ValueError(f"states are {rows.shape[1]} wide, and the model's width is {self._width}")
            (rows, *more), ready = self._copy([rows] if counts is None else [rows, counts])
        self._put(CapturedRows(watches, rows, tokens, more[0] if more else None, ready))
        for watch, computed in reached:
            if step.exact:
                watch.take(computed)
            self._watches.again(watch, computed)

    def _give_up(self, error: Exception) -> None:
        """The engine goes on without being looked at."""
        self.end()
        self._watches = ProbedRequests(1)
        self._put([wire.FAULT, f"{type(error).__name__}: {error}".encode()])
