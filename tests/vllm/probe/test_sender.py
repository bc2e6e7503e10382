"""States are sent from a worker over a real socket."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from darts_server.vllm.probe import wire
from darts_server.vllm.probe.probed_requests import ProbedRequest
from darts_server.vllm.probe.sender import CapturedRows, HostCopies, Sender, create_message


def create_request(number: int, *points: int) -> ProbedRequest:
    return ProbedRequest(f"name-{number}", number, 10, points)


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are too deep for a socket's name
        yield f"ipc://{Path(folder) / 'states'}"


def test_rows_are_sent_in_order_and_a_failure_is_sent_as_a_fault(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(address)
        sender, failures = Sender(address), list[bool]()
        sender.on_failure = lambda: failures.append(True)
        sender.start()
        sender.put([wire.READY, b"2", b"first"])
        sender.put(CapturedRows([create_request(7)], torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16), [4], None, None))
        sender.put(CapturedRows([create_request(8)], torch.tensor([[1.0, 2.0]]), None, torch.tensor([1, 2]), None))
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
        assert failures == [True]


def test_counts_from_the_device_decide_if_the_host_has_none() -> None:
    early, reached, done = create_request(1, 5), create_request(2, 5, 6), create_request(3)
    rows = torch.tensor([[1.0], [2.0], [3.0]])
    taken = CapturedRows([early, reached, done], rows, None, torch.tensor([14, 17, 15]), None)
    frames = create_message(taken)
    assert frames is not None
    assert [(number, tokens, state.tolist()) for number, tokens, state in wire.unpack_states(*frames[1:])] == [
        (2, 7, [2.0])
    ]
    assert (early.points, reached.points) == ((5,), ())
    assert create_message(taken) is None


def test_copies_on_cpu_need_no_event() -> None:
    [copied], ready = HostCopies(torch.device("cpu"))([torch.ones(2, 3)])
    assert copied.tolist() == [[1.0] * 3] * 2
    assert ready is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_copies_are_complete_after_their_event() -> None:
    device = torch.device("cuda")
    rows = torch.arange(1 << 20, device=device, dtype=torch.float32).reshape(1024, -1)
    wanted = (rows * 3).cpu()
    [copied], ready = HostCopies(device)([rows * 3])
    assert ready is not None
    ready.synchronize()
    assert copied.is_pinned()
    assert torch.equal(copied, wanted)
