"""Take hidden states out of the steps of a worker, and send them to the API process beside these steps.

A request has a probe if it has the extra argument ``[number, point, …]``: a number that identifies it in the API
process, and numbers of generated tokens, ascending. A worker sends messages of several frames, the first of which is
the kind of message.
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

from darts_server.vllm.engine_core.probe_steps import check_runner, read_step

ARGUMENT = "darts_probe"
"""Name of the extra argument. Callers cannot send it: unknown arguments that begin with ``darts_`` are refused."""
INSTALL = "darts_install_probe"  # name of the workers' method that installs the probe

READY = b"ready"  # followed by the width of the states, as text: this worker will send states
STATES = b"states"
"""Followed by the number and the tokens of each request, [n, 2] of int64, and by states, [n, width] of float32."""
FAULT = b"fault"  # followed by an error message: this worker will send nothing more


def pack_states(numbers: Sequence[int], tokens: Sequence[int], rows: NDArray[np.float32]) -> list[bytes]:
    """Pack states, one per request, [n, width], into the frames of a message."""
    pairs = np.array([numbers, tokens], dtype=np.int64).T
    return [STATES, pairs.tobytes(), np.ascontiguousarray(rows, dtype=np.float32).tobytes()]


def unpack_states(pairs: bytes, rows: bytes) -> list[tuple[int, int, NDArray[np.float32]]]:
    """Unpack number, tokens and state of each request from the frames behind `STATES`. States own their memory."""
    identified = np.frombuffer(pairs, dtype=np.int64).reshape(-1, 2)
    states = np.frombuffer(rows, dtype=np.float32).reshape(len(identified), -1)
    return [(int(number), int(tokens), row.copy()) for (number, tokens), row in zip(identified, states, strict=True)]


@dataclass(slots=True, eq=False)
class ProbedRequest:
    """A request with a probe.

    ``number``: identifies it in the API process. ``prompt_tokens``: their number. ``points``: numbers of generated
    tokens, ascending, at which no state was taken yet.
    """

    request_id: str
    number: int
    prompt_tokens: int
    points: tuple[int, ...]
    prompt_step: int | None = None  # the step that computed the last token of its prompt

    def reached(self, computed: int) -> int | None:
        """Return how many are generated at the ``computed``-th token, prompt included, if it is at or past a point."""
        points = self.points  # one read, because the sender's thread may replace them
        tokens = computed - self.prompt_tokens
        return tokens if points and tokens >= points[0] else None

    def take(self, computed: int) -> int | None:
        """Remove the points that were `reached`: one state stands for all of them, so it is sent once."""
        if (tokens := self.reached(computed)) is not None:
            self.points = tuple(point for point in self.points if point > tokens)
        return tokens


# --- sending --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class CapturedRows:
    """Rows of a step, [n, width], that are being copied to the host.

    ``tokens``: generated tokens of each request, if the host knows them; otherwise ``computed``, [n], holds those that
    are computed, prompt included. Both tensors may be read after the event ``ready``.
    """

    requests: Sequence[ProbedRequest]
    rows: torch.Tensor
    tokens: Sequence[int] | None
    computed: torch.Tensor | None
    ready: torch.cuda.Event | None


def copy_to_host(
    tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream | None
) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
    """Return copies, and the event after which they may be read. The tensors must not be written to any more.

    On CUDA the worker is not blocked: it copies into pinned memory, on a ``stream`` of its own, which waits for the
    work queued on the current stream.
    """
    if stream is None:
        return [tensor.cpu() for tensor in tensors], None
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
        for tensor in tensors:
            tensor.record_stream(stream)  # or the allocator could reuse its memory before the copy
        ready = torch.cuda.Event(blocking=True)
        ready.record()
    return copies, ready


class Sender(threading.Thread):
    """Sends to the API process from its own thread, which sleeps until a copy is ready.

    The queue is bounded by the API process: at most one state per point of each request that it has started.
    """

    def __init__(self, address: str, on_failure: Callable[[], None]) -> None:
        super().__init__(name="darts-probe", daemon=True)
        self._address = address
        self._on_failure = on_failure  # called from the thread when it cannot send states any more
        self.queue: SimpleQueue[CapturedRows | Sequence[bytes]] = SimpleQueue()  # of rows, and of messages' frames

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
                    message = [FAULT, f"{type(error).__name__}: {error}".encode()]
                if message is not None:
                    socket.send_multipart(message)


def create_message(captured: CapturedRows) -> Sequence[bytes] | None:
    """Wait for the rows and create their message; ``None`` if no request has reached a point after all."""
    if captured.ready is not None:
        captured.ready.synchronize()
    rows, requests, tokens = captured.rows, captured.requests, captured.tokens
    if tokens is None:
        assert captured.computed is not None
        taken = [request.take(count) for request, count in zip(requests, captured.computed.tolist(), strict=True)]
        places = [place for place, count in enumerate(taken) if count is not None]
        if not places:
            return None
        rows, requests = rows[places], [requests[place] for place in places]
        tokens = [count for count in taken if count is not None]
    return pack_states([request.number for request in requests], tokens, rows.float().numpy())


# --- in the worker's steps -------------------------------------------------------


def install(worker: Any, address: str) -> str | None:
    """Send states of this worker's requests to ``address``; return the reason if that is impossible. Never raises.

    One worker of an engine sends states: the first of those that have the model's last layer. For the others this does
    nothing.
    """
    try:
        if get_tp_group().rank_in_group != 0 or not get_pp_group().is_last_rank:
            return None
        sender = Sender(address, lambda: capture.stop())
        capture = Capture(worker.model_runner, sender.queue.put)
        sender.start()
        capture.start()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Capture:
    """Wraps the model runner's ``execute_model``, and takes states of requests with a probe out of its steps.

    Requests whose points are all taken are kept until their end as well: vLLM's second model runner receives a
    preempted request as if it were new, and it must not be probed a second time. A request is looked at when it can
    have reached its next point: however often it is preempted, a step adds a limited number of tokens to what it has
    generated since its prompt was computed.

    ``put``: queues what is to be sent, and returns at once. Raises `ValueError`, see `check_runner`.
    """

    def __init__(self, runner: Any, put: Callable[[CapturedRows | Sequence[bytes]], None]) -> None:
        check_runner(runner)
        self._runner = runner
        self._execute = runner.execute_model
        self._width: int = runner.model_config.get_hidden_size()
        self._max_step_tokens = 1 + int(runner.vllm_config.num_speculative_tokens)
        self._stream = torch.cuda.Stream(runner.device) if runner.device.type == "cuda" else None
        self._put = put
        self.requests: dict[str, ProbedRequest] = {}  # those with a probe, from their first step to their end
        self._due: dict[int, list[ProbedRequest]] = {}  # by the step in which they are looked at
        self._step = 0  # counted while there are any

    def start(self) -> None:
        """Wrap the runner's steps from now on, and announce it. Whatever fails on this device fails here."""
        copy_to_host([torch.zeros(1, device=self._runner.device)], self._stream)
        self._put([READY, str(self._width).encode()])
        self._runner.execute_model = self.execute_model

    def stop(self) -> None:
        """Unwrap the runner."""
        self._runner.__dict__.pop("execute_model", None)

    def execute_model(self, scheduled: Any, *args: Any, **options: Any) -> Any:
        """Execute the step, then take states out of it if requests with a probe are in it.

        A fault of the probe ends the probe, and not the engine.
        """
        if options.get("dummy_run"):
            return self._execute(scheduled, *args, **options)
        fault: Exception | None = None
        if self.requests or scheduled.scheduled_new_reqs:
            try:
                self._update_requests(scheduled)
            except Exception as error:
                fault = error
        output = self._execute(scheduled, *args, **options)
        if self.requests and fault is None:
            try:
                self._capture_step(scheduled)
            except Exception as error:
                fault = error
        if fault is not None:
            self.stop()
            self.requests.clear()
            self._put([FAULT, f"{type(fault).__name__}: {fault}".encode()])
        return output

    def _update_requests(self, scheduled: Any) -> None:
        """Remove ended and add new requests before a step. ``scheduled``: vLLM's ``SchedulerOutput``."""
        if self.requests:
            for request_id in scheduled.finished_req_ids:  # first, because a new request may reuse the id
                self.requests.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            arguments = new.sampling_params and new.sampling_params.extra_args
            if arguments and ARGUMENT in arguments and new.req_id not in self.requests:
                number, *points = arguments[ARGUMENT]
                prompt = new.prompt_token_ids if new.prompt_token_ids is not None else new.prompt_embeds
                request = self.requests[new.req_id] = ProbedRequest(new.req_id, number, len(prompt), tuple(points))
                self._due.setdefault(self._step + 1, []).append(request)

    def _capture_step(self, scheduled: Any) -> None:
        self._step += 1
        due = self._due.pop(self._step, ())
        due = [each for each in due if each.points and self.requests.get(each.request_id) is each]
        if not due:
            return
        step = read_step(self._runner, scheduled)
        reached: list[tuple[ProbedRequest, int]] = []
        for request in due:
            computed = None if step is None else step.computed(request.request_id)
            if computed is not None and request.reached(computed) is not None:
                reached.append((request, computed))
            else:
                self._reschedule(request, computed)
        if step is None or not reached:
            return
        requests = [request for request, _ in reached]
        # If the host does not know the numbers of tokens, the sender decides by those that are copied from the device.
        tokens = [computed - request.prompt_tokens for request, computed in reached] if step.exact else None
        with torch.inference_mode():
            rows, counts = step.states([request.request_id for request in requests])
            if rows.shape[1] != self._width:
                raise ValueError(f"states are {rows.shape[1]} wide, and the model's width is {self._width}")
            (rows, *more), ready = copy_to_host([rows] if counts is None else [rows, counts], self._stream)
        self._put(CapturedRows(requests, rows, tokens, more[0] if more else None, ready))
        for request, computed in reached:
            if step.exact:
                request.take(computed)
            self._reschedule(request, computed)

    def _reschedule(self, request: ProbedRequest, computed: int | None) -> None:
        """Schedule the next look at a request of which this step computed the ``computed``-th token, if any."""
        if not (points := request.points):
            return
        if request.prompt_step is None and computed is not None and computed >= request.prompt_tokens:
            request.prompt_step = self._step
        steps = -(-points[0] // self._max_step_tokens)  # rounded up
        earliest = 0 if request.prompt_step is None else request.prompt_step + steps
        self._due.setdefault(max(self._step + 1, earliest), []).append(request)
