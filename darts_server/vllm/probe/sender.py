"""Out of the device, and out of the worker, beside its steps."""

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
    """Rows of a step on their way to the host: [n, width].

    ``tokens``: generated ones of each, if the step knew them; else ``computed`` tells, [n], prompt included. Both
    tensors may be read once ``ready`` has happened.
    """

    watches: Sequence[ProbedRequest]
    rows: torch.Tensor
    tokens: Sequence[int] | None
    computed: torch.Tensor | None
    ready: torch.cuda.Event | None


class HostCopies:
    """Copies tensors to the host without anyone waiting.

    On CUDA into pinned memory on a stream of its own, which waits for what the current one has been given so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        """The copies, and what says that they are there. The tensors must belong to nobody else."""
        if self._stream is None:
            return [tensor.cpu() for tensor in tensors], None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
            for tensor in tensors:
                tensor.record_stream(self._stream)
            ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            ready.record()
        return copies, ready


class Sender(threading.Thread):
    """Sends to the API process, from a thread that sleeps until a copy is there.

    What waits here is bounded: at most one state for each point of each request that the API process has started.
    """

    def __init__(self, address: str) -> None:
        super().__init__(name="darts-probe", daemon=True)
        self.broken: Callable[[], None] = lambda: None
        """Called from the thread when it can send no more."""
        self._address = address
        self._queue: SimpleQueue[CapturedRows | Sequence[bytes]] = SimpleQueue()

    def put(self, sent: CapturedRows | Sequence[bytes]) -> None:
        """Send rows, or a message as it is. Returns at once."""
        self._queue.put(sent)

    def run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.connect(self._address)
            while True:
                sent = self._queue.get()
                try:
                    message = message_of(sent) if isinstance(sent, CapturedRows) else sent
                except Exception as error:
                    self.broken()
                    message = [wire.FAULT, f"{type(error).__name__}: {error}".encode()]
                if message is not None:
                    socket.send_multipart(message)


def message_of(taken: CapturedRows) -> Sequence[bytes] | None:
    """What to send of these rows; ``None`` if none has reached a point after all. Waits until they are there."""
    if taken.ready is not None:
        taken.ready.synchronize()
    rows, watches, tokens = taken.rows, taken.watches, taken.tokens
    if tokens is None:
        assert taken.computed is not None
        told = [watch.take(count) for watch, count in zip(watches, taken.computed.tolist(), strict=True)]
        wanted = [place for place, count in enumerate(told) if count is not None]
        if not wanted:
            return None
        rows, watches = rows[wanted], [watches[place] for place in wanted]
        tokens = [count for count in told if count is not None]
    return wire.pack_states([watch.number for watch in watches], tokens, rows.float().numpy())
