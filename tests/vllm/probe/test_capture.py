"""The probe of a worker, with a fake scheduler that does all that vLLM's may do, and runners that compute nothing."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from darts_server.vllm.probe import wire
from darts_server.vllm.probe.capture import Capture
from darts_server.vllm.probe.steps import reader_for
from tests.vllm.probe.fakes import FakeScheduler, FirstRunner, Request, Runner, SecondRunner

RUNNERS: list[type[Runner]] = [FirstRunner, SecondRunner]
points = st.sets(st.integers(1, 25), max_size=3).map(lambda some: tuple(sorted(some)))
drawn_requests = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 30), points, st.integers(0, 3)), min_size=1, max_size=6
)


def requests(drawn: list[tuple[int, int, tuple[int, ...], int]]) -> list[Request]:
    """Create requests, some with the id of an earlier one."""
    return [Request(i, f"name-{name}", prompt, length, at) for i, (prompt, length, at, name) in enumerate(drawn)]


def expected(request: Request) -> list[int]:
    """Return the tokens of the first step that reaches each point; once if it reaches several."""
    reached = [next((c for c in request.certain if c >= point), None) for point in request.points]
    return sorted({count for count in reached if count is not None})


@pytest.mark.parametrize("runner", RUNNERS)
@given(drawn=drawn_requests, max_drafts=st.integers(0, 4), seed=st.integers(0, 2**32))
def test_every_passed_point_is_sent_once_in_order_and_with_its_own_state(
    runner: type[Runner], drawn: list[Any], max_drafts: int, seed: int
) -> None:
    wanted = requests(drawn)
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
def test_no_step_is_read_if_no_request_has_a_probe(runner: type[Runner]) -> None:
    real = runner(0)

    def unread(*_: Any) -> None:
        raise AssertionError("it was read")

    scheduler = FakeScheduler(real, Random(1), [Request(i, str(i), 4, 20, ()) for i in range(4)])
    scheduler._capture._read_step = unread
    scheduler.run()
    assert scheduler.faults == []
    assert scheduler.tracked == 0


def test_a_fault_disables_the_probe_and_not_the_engine() -> None:
    sent: list[Any] = []
    runner = FirstRunner(0)
    before = runner.execute_model
    capture = Capture(runner, sent.append)
    capture.start()
    assert runner.execute_model == capture.execute_model
    broken = SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(sampling_params=None), None], finished_req_ids=set())
    runner.execute_model(broken)
    assert runner.execute_model == before
    assert [frames[0] for frames in sent] == [wire.READY, wire.FAULT]
    assert b"AttributeError" in sent[1][1]


def test_states_of_another_width_than_the_models_are_a_fault() -> None:
    runner = FirstRunner(0)
    runner.model_config.get_hidden_size = lambda: 3
    scheduler = FakeScheduler(runner, Random(2), [Request(0, "a", 3, 9, (2,))])
    scheduler.run()
    [fault] = scheduler.faults
    assert b"2 wide" in fault
    assert scheduler.sent == {}


def test_dummy_runs_are_not_captured() -> None:
    runner = SecondRunner(0)
    capture = Capture(runner, lambda _: None)
    capture.start()
    runner.execute_model(None, dummy_run=True)
    assert runner.execute_model == capture.execute_model


def test_a_step_without_a_forward_pass_or_without_the_last_layer_has_no_states() -> None:
    for runner in (FirstRunner(0), SecondRunner(0)):
        assert reader_for(runner)[1](runner, None) is None
    second = SecondRunner(0)
    second.execute_model_state = SimpleNamespace(hidden_states=None)
    assert reader_for(second)[1](second, None) is None


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
        reader_for(runner)
    with pytest.raises(ValueError, match="unknown model runner"):
        reader_for(SimpleNamespace(is_pooling_model=False, device=torch.device("cpu")))
