"""Out of the worker, on a real socket."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from darts_server.vllm.probe import wire
from darts_server.vllm.probe.probed_requests import ProbedRequest
from darts_server.vllm.probe.sender import CapturedRows, HostCopies, Sender, message_of


def watch(number: int, *points: int) -> ProbedRequest:
    return ProbedRequest(f"name-{number}", number, 10, points)


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are too deep for a socket's name
        yield f"ipc://{Path(folder) / 'states'}"


def test_rows_are_sent_in_order_and_what_fails_is_told(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(address)
        sender, broken = Sender(address), list[bool]()
        sender.broken = lambda: broken.append(True)
        sender.start()
        sender.put([wire.READY, b"2", b"first"])
        sender.put(CapturedRows([watch(7)], torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16), [4], None, None))
        sender.put(CapturedRows([watch(8)], torch.tensor([[1.0, 2.0]]), None, torch.tensor([1, 2]), None))
        assert socket.poll(10_000)
        assert socket.recv_multipart() == [wire.READY, b"2", b"first"]
        kind, *rest = socket.recv_multipart()
        assert kind == wire.STATES
        [(number, tokens, state)] = wire.unpack_states(*rest)
        assert (number, tokens, state.tolist()) == (7, 4, [1.5, 2.5])
        assert state.dtype == np.float32
        kind, why = socket.recv_multipart()
        assert kind == wire.FAULT
        assert b"ValueError" in why
        assert broken == [True]


def test_what_the_device_says_decides_where_the_step_could_not() -> None:
    early, reached, told = watch(1, 5), watch(2, 5, 6), watch(3)
    rows = torch.tensor([[1.0], [2.0], [3.0]])
    taken = CapturedRows([early, reached, told], rows, None, torch.tensor([14, 17, 15]), None)
    frames = message_of(taken)
    assert frames is not None
    assert [(number, tokens, state.tolist()) for number, tokens, state in wire.unpack_states(*frames[1:])] == [
        (2, 7, [2.0])
    ]
    assert (early.points, reached.points) == ((5,), ())
    assert message_of(taken) is None


def test_copies_wait_for_nothing_on_cpu() -> None:
    [copied], ready = HostCopies(torch.device("cpu"))([torch.ones(2, 3)])
    assert copied.tolist() == [[1.0] * 3] * 2
    assert ready is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_copies_are_there_when_their_event_has_happened() -> None:
    device = torch.device("cuda")
    rows = torch.arange(1 << 20, device=device, dtype=torch.float32).reshape(1024, -1)
    wanted = (rows * 3).cpu()
    [copied], ready = HostCopies(device)([rows * 3])
    assert ready is not None
    ready.synchronize()
    assert copied.is_pinned()
    assert torch.equal(copied, wanted)
