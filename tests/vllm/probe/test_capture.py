"""The probe of a worker, with a fake scheduler that does all that vLLM's may do, and runners that compute nothing."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from darts_server.vllm.probe import capture
from darts_server.vllm.probe.capture import (
    FAULT,
    READY,
    STATES,
    Capture,
    CapturedRows,
    ProbedRequest,
    Sender,
    copy_to_host,
    create_message,
    unpack_states,
)
from darts_server.vllm.probe.steps import check_runner, read_step
from tests.vllm.probe.fakes import FakeScheduler, FirstRunner, Request, Runner, SecondRunner

RUNNERS: list[type[Runner]] = [FirstRunner, SecondRunner]
points = st.sets(st.integers(1, 25), max_size=3).map(lambda some: tuple(sorted(some)))
drawn_requests = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 30), points, st.integers(0, 3)), min_size=1, max_size=6
)


def expected(request: Request) -> list[int]:
    """Return the tokens of the first step that reaches each point; once if it reaches several."""
    reached = [next((c for c in request.certain if c >= point), None) for point in request.points]
    return sorted({count for count in reached if count is not None})


@pytest.mark.parametrize("runner", RUNNERS)
@given(drawn=drawn_requests, max_drafts=st.integers(0, 4), seed=st.integers(0, 2**32))
def test_every_passed_point_is_sent_once_in_order_and_with_its_own_state(
    runner: type[Runner], drawn: list[Any], max_drafts: int, seed: int
) -> None:
    # Some have the id of an earlier one.
    wanted = [Request(i, f"name-{name}", prompt, length, at) for i, (prompt, length, at, name) in enumerate(drawn)]
    scheduler = FakeScheduler(runner(max_drafts), Random(seed), wanted)
    scheduler.run()
    assert scheduler.faults == []
    for request in wanted:
        sent = scheduler.sent.get(request.number, [])
        assert [tokens for tokens, _ in sent] == expected(request)
        assert all(state == [request.number, request.prompt + tokens] for tokens, state in sent)
        if not max_drafts:
            assert [tokens for tokens, _ in sent] == [p for p in request.points if p <= max(request.certain, default=0)]
    assert scheduler.tracked == 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_no_step_is_read_if_no_request_has_a_probe(runner: type[Runner], monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(*_: Any) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(capture, "read_step", unread)
    scheduler = FakeScheduler(runner(0), Random(1), [Request(i, str(i), 4, 20, ()) for i in range(4)])
    scheduler.run()
    assert scheduler.faults == []
    assert scheduler.tracked == 0


def test_a_fault_disables_the_probe_and_not_the_engine() -> None:
    sent: list[Any] = []
    runner = FirstRunner(0)
    before = runner.execute_model
    wrapper = Capture(runner, sent.append)
    wrapper.start()
    assert runner.execute_model == wrapper.execute_model
    broken = SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(sampling_params=None), None], finished_req_ids=set())
    runner.execute_model(broken)
    assert runner.execute_model == before
    assert [frames[0] for frames in sent] == [READY, FAULT]
    assert b"AttributeError" in sent[1][1]


def test_states_of_another_width_than_the_models_are_a_fault() -> None:
    runner = FirstRunner(0)
    runner.model_config.get_hidden_size = lambda: 3
    scheduler = FakeScheduler(runner, Random(2), [Request(0, "a", 3, 9, (2,))])
    scheduler.run()
    [fault] = scheduler.faults
    assert b"2 wide" in fault
    assert scheduler.sent == {}


def test_a_step_without_a_forward_pass_or_without_the_last_layer_has_no_states() -> None:
    for runner in (FirstRunner(0), SecondRunner(0)):
        assert read_step(runner, None) is None
    second = SecondRunner(0)
    second.execute_model_state = SimpleNamespace(hidden_states=None)
    assert read_step(second, None) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"is_pooling_model": True}, "pooling"),
        ({"pcp_manager": object()}, "context parallelism"),
        ({"model_state": SimpleNamespace(num_new_sampled_tokens_per_step=0)}, "diffusion"),
    ],
)
def test_a_runner_that_cannot_be_read_is_refused(changes: dict[str, Any], why: str) -> None:
    runner = SecondRunner(0)
    for name, value in changes.items():
        setattr(runner, name, value)
    with pytest.raises(ValueError, match=why):
        check_runner(runner)
    with pytest.raises(ValueError, match="unknown model runner"):
        check_runner(SimpleNamespace(is_pooling_model=False, device=torch.device("cpu")))


# --- sending ---


def create_request(number: int, *points: int) -> ProbedRequest:
    return ProbedRequest(f"name-{number}", number, 10, points)


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are too deep for a socket's name
        yield f"ipc://{Path(folder) / 'states'}"


def test_rows_are_sent_in_order_and_a_failure_is_sent_as_a_fault(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(address)
        failures = list[bool]()
        sender = Sender(address, lambda: failures.append(True))
        sender.start()
        sender.queue.put([READY, b"2"])
        sender.queue.put(
            CapturedRows([create_request(7)], torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16), [4], None, None)
        )
        sender.queue.put(
            CapturedRows([create_request(8)], torch.tensor([[1.0, 2.0]]), None, torch.tensor([1, 2]), None)
        )
        assert socket.poll(10_000)
        assert socket.recv_multipart() == [READY, b"2"]
        kind, *rest = socket.recv_multipart()
        assert kind == STATES
        [(number, tokens, state)] = unpack_states(*rest)
        assert (number, tokens, state.tolist()) == (7, 4, [1.5, 2.5])
        assert state.dtype == np.float32
        kind, why = socket.recv_multipart()
        assert kind == FAULT
        assert b"ValueError" in why
        assert failures == [True]


def test_counts_from_the_device_decide_if_the_host_has_none() -> None:
    early, reached, done = create_request(1, 5), create_request(2, 5, 6), create_request(3)
    rows = torch.tensor([[1.0], [2.0], [3.0]])
    taken = CapturedRows([early, reached, done], rows, None, torch.tensor([14, 17, 15]), None)
    frames = create_message(taken)
    assert frames is not None
    assert [(number, tokens, state.tolist()) for number, tokens, state in unpack_states(*frames[1:])] == [(2, 7, [2.0])]
    assert (early.points, reached.points) == ((5,), ())
    assert create_message(taken) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_copies_are_complete_after_their_event() -> None:
    device = torch.device("cuda")
    rows = torch.arange(1 << 20, device=device, dtype=torch.float32).reshape(1024, -1)
    wanted = (rows * 3).cpu()
    [copied], ready = copy_to_host([rows * 3], torch.cuda.Stream(device))
    assert ready is not None
    ready.synchronize()
    assert copied.is_pinned()
    assert torch.equal(copied, wanted)
