"""Sends states from the device to the API process, beside the worker's steps."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch
import zmq

from darts_server.vllm.probe import wire
from darts_server.vllm.probe.probed_requests import ProbedRequest


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


class HostCopies:
    """Copies tensors to the host without blocking the worker.

    On CUDA it copies into pinned memory, on its own stream, which waits for the work queued on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        """Return copies, and the event after which they may be read. The tensors must not be written to any more."""
        if self._stream is None:
            return [tensor.cpu() for tensor in tensors], None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
            for tensor in tensors:
                tensor.record_stream(self._stream)  # or the allocator could reuse its memory before the copy
            ready = torch.cuda.Event(blocking=True)
            ready.record()
        return copies, ready


class Sender(threading.Thread):
    """Sends to the API process from its own thread, which sleeps until a copy is ready.

    The queue is bounded by the API process: at most one state per point of each request that it has started.
    """

    def __init__(self, address: str) -> None:
        super().__init__(name="darts-probe", daemon=True)
        self.on_failure: Callable[[], None] = lambda: None
        """Called from the thread when it cannot send states any more."""
        self._address = address
        self._queue: SimpleQueue[CapturedRows | Sequence[bytes]] = SimpleQueue()

    def put(self, item: CapturedRows | Sequence[bytes]) -> None:
        """Queue rows, or the frames of a message. Returns at once."""
        self._queue.put(item)

    def run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.connect(self._address)
            while True:
                item = self._queue.get()
                try:
                    message = create_message(item) if isinstance(item, CapturedRows) else item
                except Exception as error:
                    self.on_failure()
                    message = [wire.FAULT, f"{type(error).__name__}: {error}".encode()]
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
    return wire.pack_states([request.number for request in requests], tokens, rows.float().numpy())
