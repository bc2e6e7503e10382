"""Takes hidden states out of the steps of a worker, and sends them to the API process beside vLLM's own messages.

A request with a probe has the extra argument ``[number, point, …]``: a number that identifies it in the API process,
and ascending numbers of generated tokens at which a state is wanted. The first frame of a message is its kind.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import zmq
from numpy.typing import NDArray
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from darts_server.vllm.engine_core.probe_steps import Step, check_runner, read_step

ARGUMENT = "darts_probe"
"""Name of the extra argument. Callers cannot send it: unknown arguments that begin with ``darts_`` are refused."""
INSTALL = "darts_install_probe"

READY = b"ready"
"""Kind of the first message, followed by the width of the states, as text."""
STATES = b"states"
"""Kind of a message with states: number and tokens of each request, [n, 2] of int64; states, [n, width] of float32."""
FAULT = b"fault"
"""Kind of the last message of a worker that cannot send states, followed by an error message."""


def pack_states(numbers: Sequence[int], tokens: Sequence[int], rows: NDArray[np.float32]) -> list[bytes]:
    """Pack states, [n, width], into the frames of a message."""
    numbers_and_tokens = np.array([numbers, tokens], dtype=np.int64).T
    return [STATES, numbers_and_tokens.tobytes(), np.ascontiguousarray(rows, dtype=np.float32).tobytes()]


def unpack_states(numbers_and_tokens: bytes, rows: bytes) -> list[tuple[int, int, NDArray[np.float32]]]:
    """Unpack number, tokens and state of each request from the frames after `STATES`."""
    pairs = np.frombuffer(numbers_and_tokens, dtype=np.int64).reshape(-1, 2)
    states = np.frombuffer(rows, dtype=np.float32).reshape(len(pairs), -1)
    # Copies, so that a state does not keep the whole message.
    return [(int(number), int(tokens), state.copy()) for (number, tokens), state in zip(pairs, states, strict=True)]


@dataclass(slots=True, eq=False)
class ProbedRequest:
    """A request with a probe.

    ``pending_points``: numbers of generated tokens, ascending, for which no state was taken yet. ``prompt_step``: step
    that computed the last token of the prompt.
    """

    request_id: str
    number: int
    prompt_tokens: int
    pending_points: tuple[int, ...]
    prompt_step: int | None = None

    def tokens_if_due(self, computed_tokens: int) -> int | None:
        """Return the number of generated tokens, or None below the next point."""
        # Read the points once, because the sender's thread may replace them.
        points = self.pending_points
        generated_tokens = computed_tokens - self.prompt_tokens
        if points and generated_tokens >= points[0]:
            return generated_tokens
        return None

    def remove_reached(self, computed_tokens: int) -> int | None:
        """Return as `tokens_if_due`, and remove all points that are reached: they get the same state."""
        generated_tokens = self.tokens_if_due(computed_tokens)
        if generated_tokens is not None:
            self.pending_points = tuple(point for point in self.pending_points if point > generated_tokens)
        return generated_tokens


# --- sending --------------------------------------------------------------------


@dataclass(
    frozen=True,
    slots=True,
    eq=False,
)
class CapturedRows:
    """Rows of a step, [n, width], that are being copied to the host.

    ``generated_tokens``: of each request, if the host knows them. ``computed_tokens``: otherwise the numbers of
    computed tokens, [n], prompt included. ``copied``: event after which the tensors may be read.
    """

    requests: Sequence[ProbedRequest]
    rows: torch.Tensor
    generated_tokens: Sequence[int] | None
    computed_tokens: torch.Tensor | None
    copied: torch.cuda.Event | None


def copy_to_host(
    tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream | None
) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
    """Return copies of the tensors, and the event after which the copies may be read. Do not change the tensors later.

    On CUDA the worker does not wait: a separate ``stream`` copies to pinned memory after the current stream's work.
    """
    if stream is None:
        return [tensor.cpu() for tensor in tensors], None

    stream.wait_stream(torch.cuda.current_stream(stream.device))
    copies = []
    with torch.cuda.stream(stream):
        for tensor in tensors:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(pinned.copy_(tensor, non_blocking=True))
            # Otherwise the allocator could reuse the memory before it is copied.
            tensor.record_stream(stream)
        copied = torch.cuda.Event(blocking=True)
        copied.record()
    return copies, copied


class Sender(threading.Thread):
    """Sends to the API process from its own thread, which sleeps until a copy is ready.

    ``on_failure``: called from the thread when it cannot send states any more.
    """

    def __init__(self, address: str, on_failure: Callable[[], None]) -> None:
        super().__init__(name="darts-probe", daemon=True)
        self._address = address
        self._on_failure = on_failure
        # The API process limits this queue: it starts the requests, and each point has one state at most.
        self.queue: SimpleQueue[CapturedRows | Sequence[bytes]] = SimpleQueue()

    def run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.connect(self._address)
            while True:
                item = self.queue.get()
                try:
                    message = create_message(item) if isinstance(item, CapturedRows) else item
                except Exception as error:
                    self._on_failure()
                    message = fault_message(error)
                if message is not None:
                    socket.send_multipart(message)


def fault_message(error: Exception) -> list[bytes]:
    return [FAULT, f"{type(error).__name__}: {error}".encode()]


def create_message(captured: CapturedRows) -> Sequence[bytes] | None:
    if captured.copied is not None:
        captured.copied.synchronize()
    if captured.generated_tokens is not None:
        numbers = [request.number for request in captured.requests]
        return pack_states(numbers, captured.generated_tokens, captured.rows.float().numpy())

    # The device has counted the tokens. Send only the states of requests that have reached a point.
    assert captured.computed_tokens is not None
    computed_counts = captured.computed_tokens.tolist()
    due_rows = []
    due_numbers = []
    due_tokens = []
    for row, (request, computed) in enumerate(zip(captured.requests, computed_counts, strict=True)):
        generated_tokens = request.remove_reached(computed)
        if generated_tokens is not None:
            due_rows.append(row)
            due_numbers.append(request.number)
            due_tokens.append(generated_tokens)
    if not due_rows:
        return None
    return pack_states(due_numbers, due_tokens, captured.rows[due_rows].float().numpy())


# --- in the worker's steps -------------------------------------------------------


def install(worker: Any, address: str) -> str | None:
    """Send states of this worker's requests to ``address``. Return an error message or None.

    Only the first worker with the model's last layer sends states.
    """
    try:
        if get_tp_group().rank_in_group != 0 or not get_pp_group().is_last_rank:
            return None
        # The sender's thread calls `stop` only after both exist.
        sender = Sender(address, lambda: capture.stop())
        capture = Capture(worker.model_runner, sender.queue.put)
        sender.start()
        capture.start()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Capture:
    """Wraps the model runner's ``execute_model``, and takes states of requests with a probe out of its steps.

    A request is checked in the first step that can have reached its next point. A step adds a limited number of tokens,
    so earlier steps need no check.

    ``put``: queues rows or frames, and returns at once. Raises as `check_runner`.
    """

    def __init__(self, runner: Any, put: Callable[[CapturedRows | Sequence[bytes]], None]) -> None:
        check_runner(runner)
        self._runner = runner
        self._vllms_execute = runner.execute_model
        self._width: int = runner.model_config.get_hidden_size()
        self._max_step_tokens = 1 + int(runner.vllm_config.num_speculative_tokens)
        self._copy_stream = torch.cuda.Stream(runner.device) if runner.device.type == "cuda" else None
        self._put = put
        # A request stays here until it ends, because vLLM's second model runner receives a preempted request as if it
        # were new, and no request may be probed twice.
        self.requests: dict[str, ProbedRequest] = {}
        # Steps are counted while requests have a probe.
        self._step = 0
        self._checks_by_step: dict[int, list[ProbedRequest]] = {}

    def start(self) -> None:
        # A device that cannot copy fails here, and not in a step.
        copy_to_host([torch.zeros(1, device=self._runner.device)], self._copy_stream)
        self._put([READY, str(self._width).encode()])
        self._runner.execute_model = self.execute_model

    def stop(self) -> None:
        # The method of the runner's class is called again.
        self._runner.__dict__.pop("execute_model", None)

    def execute_model(self, scheduled: Any, *args: Any, **options: Any) -> Any:
        """Execute a step, then take states out of it. A fault of the probe ends the probe, and not the engine."""
        # A dummy run has no requests.
        if options.get("dummy_run"):
            return self._vllms_execute(scheduled, *args, **options)
        fault: Exception | None = None
        if self.requests or scheduled.scheduled_new_reqs:
            try:
                self._update_requests(scheduled)
            except Exception as error:
                fault = error
        output = self._vllms_execute(scheduled, *args, **options)
        if self.requests and fault is None:
            try:
                self._capture_step(scheduled)
            except Exception as error:
                fault = error
        if fault is not None:
            self.stop()
            self.requests.clear()
            self._put(fault_message(fault))
        return output

    def _update_requests(self, scheduled: Any) -> None:
        # Remove first, because a new request may reuse an id.
        if self.requests:
            for request_id in scheduled.finished_req_ids:
                self.requests.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            extra_args = None
            if new.sampling_params is not None:
                extra_args = new.sampling_params.extra_args
            if not extra_args or ARGUMENT not in extra_args or new.req_id in self.requests:
                continue
            number, *points = extra_args[ARGUMENT]
            prompt = new.prompt_token_ids
            if prompt is None:
                prompt = new.prompt_embeds
            request = ProbedRequest(new.req_id, number, len(prompt), tuple(points))
            self.requests[new.req_id] = request
            self._checks_by_step.setdefault(self._step + 1, []).append(request)

    def _capture_step(self, scheduled: Any) -> None:
        self._step += 1
        # Requests that have ended, or whose id was used again, are not checked.
        checked = [
            request
            for request in self._checks_by_step.pop(self._step, ())
            if request.pending_points and self.requests.get(request.request_id) is request
        ]
        if not checked:
            return

        step = read_step(self._runner, scheduled)
        due: list[tuple[ProbedRequest, int]] = []
        for request in checked:
            computed_tokens = None if step is None else step.count_computed(request.request_id)
            if computed_tokens is not None and request.tokens_if_due(computed_tokens) is not None:
                due.append((request, computed_tokens))
            else:
                self._schedule_check(request, computed_tokens)
        if step is None or not due:
            return

        self._put(self._copy_rows(step, due))
        for request, computed_tokens in due:
            # If the host does not know the numbers of tokens, the sender's thread removes the points.
            if step.is_exact:
                request.remove_reached(computed_tokens)
            self._schedule_check(request, computed_tokens)

    def _copy_rows(self, step: Step, due: Sequence[tuple[ProbedRequest, int]]) -> CapturedRows:
        """Start to copy states to the host. ``due``: requests and their computed tokens."""
        requests = [request for request, _ in due]
        generated_tokens = None
        if step.is_exact:
            generated_tokens = [computed - request.prompt_tokens for request, computed in due]
        with torch.inference_mode():
            rows, computed_counts = step.gather_states([request.request_id for request in requests])
            if rows.shape[1] != self._width:
                raise ValueError(f"states are {rows.shape[1]} wide, and the model's width is {self._width}")
            # If the host does not know the numbers of tokens, the sender decides by the numbers from the device.
            tensors = [rows] if computed_counts is None else [rows, computed_counts]
            copies, copied = copy_to_host(tensors, self._copy_stream)
        copied_counts = copies[1] if len(copies) > 1 else None
        return CapturedRows(
            requests,
            copies[0],
            generated_tokens,
            copied_counts,
            copied,
        )

    def _schedule_check(self, request: ProbedRequest, computed_tokens: int | None) -> None:
        """Schedule the next check of a request. ``computed_tokens``: None if the request was not in this step."""
        if not request.pending_points:
            return
        if request.prompt_step is None and computed_tokens is not None and computed_tokens >= request.prompt_tokens:
            request.prompt_step = self._step
        next_step = self._step + 1
        if request.prompt_step is not None:
            # Rounded up: the fewest steps in which the request can generate so many tokens.
            min_steps = -(-request.pending_points[0] // self._max_step_tokens)
            next_step = max(next_step, request.prompt_step + min_steps)
        self._checks_by_step.setdefault(next_step, []).append(request)
