"""The probe of a worker, with a fake scheduler that does everything that vLLM's may do, and fake model runners.

The state of request r at its p-th token is [r, p], so that a row shows where it was taken. Rejected drafts and
padding rows are [-1, -1].
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
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

from darts_server.vllm.engine_core import probe_capture as capture
from darts_server.vllm.engine_core.probe_capture import (
    ARGUMENT,
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
from darts_server.vllm.engine_core.probe_steps import check_runner, read_step

WIDTH = 2


@dataclass
class Request:
    number: int
    request_id: str
    prompt: int
    length: int
    points: tuple[int, ...]
    generated: int = 0
    computed: int = 0
    announced: bool = False
    overestimated: int = 0
    """Number of tokens by which the host overestimates the computed tokens: rejected drafts of the last step."""
    certain: list[int] = field(default_factory=list)
    """Generated tokens that were certain after each of its steps."""

    @property
    def known(self) -> int:
        return self.prompt + self.generated

    @property
    def done(self) -> bool:
        return self.generated >= self.length


@dataclass(frozen=True)
class Part:
    """The part of a request that a step computes: known tokens, then drafts. The first drafts are accepted."""

    request: Request
    known: int
    drafts: int
    accepted: int

    def row(self, place: int) -> list[float]:
        """Create the state of the request's ``place``-th token."""
        is_certain = place < self.known + self.accepted
        return [float(self.request.number), float(self.request.computed + place + 1)] if is_certain else [-1.0, -1.0]


class Runner:
    """Base of both runners. ``max_drafts``: drafts of each step at most."""

    is_pooling_model = False
    device = torch.device("cpu")
    announces_again: bool
    """Whether a preempted request returns as if it were new."""

    def __init__(self, max_drafts: int) -> None:
        self.model_config = SimpleNamespace(get_hidden_size=lambda: WIDTH)
        self.vllm_config = SimpleNamespace(num_speculative_tokens=max_drafts)
        self.execute_model_state: Any = None
        self.parts: Sequence[Part] = ()

    def execute_model(self, scheduled: Any, *_: Any, dummy_run: bool = False) -> None:
        if self.parts and not dummy_run:
            self._forward(scheduled)

    def _forward(self, scheduled: Any) -> None:
        raise NotImplementedError


class FirstRunner(Runner):
    announces_again = False

    def __init__(self, max_drafts: int) -> None:
        super().__init__(max_drafts)
        self.input_batch = SimpleNamespace()

    def _forward(self, scheduled: Any) -> None:
        ids = [part.request.request_id for part in self.parts]
        self.input_batch.req_ids = ids
        self.input_batch.req_id_to_index = {request_id: place for place, request_id in enumerate(ids)}
        self.input_batch.num_computed_tokens_cpu = np.array([p.request.computed for p in self.parts], dtype=np.int32)
        rows = [p.row(place) for p in self.parts for place in range(p.known - 1, p.known + p.drafts)]
        self.execute_model_state = SimpleNamespace(
            scheduler_output=scheduled, sample_hidden_states=torch.tensor(rows, dtype=torch.bfloat16)
        )


class SecondRunner(Runner):
    announces_again = True

    def __init__(self, max_drafts: int) -> None:
        super().__init__(max_drafts)
        self.num_speculative_steps = max_drafts
        self.req_states = self.pcp_manager = None
        self.model_state = SimpleNamespace(num_new_sampled_tokens_per_step=1)

    def _forward(self, scheduled: Any) -> None:
        hidden = list[list[float]]()
        indices = list[int]()
        first = [0]
        for p in self.parts:
            indices += range(len(hidden) + p.known - 1, len(hidden) + p.known + p.drafts)
            hidden += [p.row(place) for place in range(p.known + p.drafts)]
            first.append(len(indices))
        estimated = [p.request.computed + p.request.overestimated for p in self.parts]
        batch = SimpleNamespace(
            req_ids=[p.request.request_id for p in self.parts],
            num_computed_tokens_np=np.array(estimated, dtype=np.int32),
            cu_num_logits=torch.tensor(first, dtype=torch.int32),
            logits_indices=torch.tensor(indices, dtype=torch.int64),
            seq_lens=torch.tensor([p.request.computed + p.known + p.drafts for p in self.parts], dtype=torch.int32),
        )
        self.execute_model_state = SimpleNamespace(
            input_batch=batch, hidden_states=torch.tensor([*hidden, [-1.0, -1.0]], dtype=torch.float32)
        )


class FakeScheduler:
    """A scheduler over one of the runners, with the probe installed. ``sent``: tokens and states by request number."""

    def __init__(self, runner: Runner, rng: Random, requests: Sequence[Request]) -> None:
        self.sent: dict[int, list[tuple[int, list[float]]]] = {}
        self.faults: list[bytes] = []
        self._runner = runner
        self._rng = rng
        self._max_drafts = int(runner.vllm_config.num_speculative_tokens)
        self._waiting = list(requests)
        self._running: list[Request] = []
        self._finished: set[str] = set()
        self._queue: list[CapturedRows | Sequence[bytes]] = []
        self.capture = Capture(runner, self._queue.append)
        self.capture.start()

    def run(self) -> None:
        """Run until all requests have ended, and one step more."""
        while self._waiting or self._running:
            self._step()
        self._step()
        self._deliver(len(self._queue))

    def _step(self) -> None:
        rng = self._rng
        # Some are aborted before they are done.
        for request in [r for r in self._running if r.done or rng.random() < 0.01]:
            self._running.remove(request)
            self._finished.add(request.request_id)
        names = {r.request_id for r in self._running}
        while self._waiting and self._waiting[0].request_id not in names and rng.random() < 0.7:
            names.add(self._waiting[0].request_id)
            self._running.append(self._waiting.pop(0))
        for request in self._running:
            # Preempt some.
            if request.announced and rng.random() < 0.1:
                request.computed = request.overestimated = 0
                request.announced = not self._runner.announces_again
        chosen = [r for r in self._running if rng.random() < 0.8]
        rng.shuffle(chosen)
        new = []
        parts = []
        for request in chosen:
            if not request.announced:
                request.announced = True
                # The cache has a prefix of some.
                if rng.random() < 0.3:
                    request.computed = rng.randrange(request.known)
                new.append(self._new(request))
            missing = request.known - request.computed
            known = rng.randint(1, missing) if rng.random() < 0.5 else missing
            drafts = rng.randint(0, self._max_drafts) if known == missing else 0
            parts.append(Part(request, known, drafts, rng.randint(0, drafts)))
        self._runner.parts = parts
        self._runner.execute_model_state = None
        self._runner.execute_model(
            SimpleNamespace(
                scheduled_new_reqs=new,
                finished_req_ids=self._finished,
                num_scheduled_tokens={p.request.request_id: p.known + p.drafts for p in parts},
                scheduled_spec_decode_tokens={p.request.request_id: [0] * p.drafts for p in parts if p.drafts},
            ),
            None,
        )
        self._finished = set()
        for part in parts:
            request = part.request
            request.computed += part.known
            request.certain.append(request.computed - request.prompt)
            if request.computed == request.known:
                request.computed += part.accepted
                request.generated += part.accepted + 1
                request.overestimated = part.drafts - part.accepted
        self._deliver(rng.randrange(len(self._queue) + 1))

    def _deliver(self, count: int) -> None:
        for _ in range(count):
            taken = self._queue.pop(0)
            frames = create_message(taken) if isinstance(taken, CapturedRows) else taken
            if frames is None:
                continue
            kind, *rest = frames
            if kind == FAULT:
                self.faults += rest
            elif kind == STATES:
                for number, tokens, state in unpack_states(*rest):
                    self.sent.setdefault(number, []).append((tokens, state.tolist()))

    @staticmethod
    def _new(request: Request) -> Any:
        extra = {"other": 1, ARGUMENT: [request.number, *request.points]} if request.points else None
        return SimpleNamespace(
            req_id=request.request_id,
            prompt_token_ids=[0] * request.prompt,
            prompt_embeds=None,
            sampling_params=SimpleNamespace(extra_args=extra),
        )


# --- states ---


RUNNERS: list[type[Runner]] = [FirstRunner, SecondRunner]
points = st.sets(st.integers(1, 25), max_size=3).map(lambda some: tuple(sorted(some)))
drawn_requests = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 30), points, st.integers(0, 3)), min_size=1, max_size=6
)


def expected(request: Request) -> list[int]:
    """Return the tokens of the first step that reaches each point, once if a step reaches several points."""
    reached = [next((c for c in request.certain if c >= point), None) for point in request.points]
    return sorted({count for count in reached if count is not None})


@pytest.mark.parametrize("runner", RUNNERS)
@given(drawn=drawn_requests, max_drafts=st.integers(0, 4), seed=st.integers(0, 2**32))
def test_every_passed_point_is_sent_once_in_order_and_with_its_own_state(
    runner: type[Runner], drawn: list[Any], max_drafts: int, seed: int
) -> None:
    # Some have the id of an earlier request.
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
    assert not scheduler.capture.requests


@pytest.mark.parametrize("runner", RUNNERS)
def test_no_step_is_read_if_no_request_has_a_probe(runner: type[Runner], monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(*_: Any) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(capture, "read_step", unread)
    scheduler = FakeScheduler(runner(0), Random(1), [Request(i, str(i), 4, 20, ()) for i in range(4)])
    scheduler.run()
    assert scheduler.faults == []
    assert not scheduler.capture.requests


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


def test_a_step_without_the_last_layer_has_no_states() -> None:
    runner = SecondRunner(0)
    runner.execute_model_state = SimpleNamespace(hidden_states=None)
    assert read_step(runner, None) is None


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


def test_rows_are_sent_in_order_and_a_failure_is_sent_as_a_fault() -> None:
    request = ProbedRequest("name", 7, 10, ())
    rows = torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16)
    failures = list[bool]()
    with (
        # The paths of pytest's own folders are too long for a socket.
        tempfile.TemporaryDirectory() as folder,
        zmq.Context() as context,
        context.socket(zmq.PULL) as socket,
    ):
        address = f"ipc://{Path(folder) / 'states'}"
        socket.bind(address)
        sender = Sender(address, lambda: failures.append(True))
        sender.start()
        sender.queue.put([READY, b"2"])
        sender.queue.put(CapturedRows([request], rows, [4], None, None))
        sender.queue.put(CapturedRows([request], rows, None, torch.tensor([1, 2]), None))
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
