"""Outputs of held requests equal vLLM's own, field by field. Counts, steps, calls and aborts are reported in order."""

import queue
from array import array
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, UtilityOutput
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder

from darts_server.vllm.engine_core.holding import (
    DRAFTS,
    MIN_BUFFER_TOKENS,
    NUMBER,
    RELEASE,
    REPORT_SECONDS,
    STATS_SECONDS,
    Begin,
    HoldingQueue,
    Release,
    Report,
    hold_outputs,
)
from tests.vllm.requests.test_outputs import (
    ID,
    PROMPT,
    Case,
    DeferringFrontend,
    Frontend,
    assert_same,
    draw_case,
    encoded,
    run,
)


def as_received(message: EngineCoreOutputs) -> Report:
    """Return a message as the API process receives it."""
    received: Report = MsgpackDecoder(Report).decode(encoded(message))
    return received


class HeldFrontend(DeferringFrontend):
    """A candidate whose engine holds its outputs.

    ``release_after``: number of messages after which the candidate is released, or None to release it never.
    """

    def __init__(self, case: Case, release_after: int | None) -> None:
        super().__init__(case)
        self.holding = HoldingQueue(queue.Queue())
        self.release_after = release_after
        self.received = 0

    def add(self, prompt: Sequence[int] = PROMPT) -> EngineCoreRequest:
        self.holding.process_message(Begin(ID, 1, is_held=not self.case.params.stop))
        return super().add(prompt)

    def run(self) -> RequestOutput:
        for number, message in enumerate(self.case.messages):
            if number == self.release_after:
                self.process_message(Release([ID]))
            self.process_message(self.decoder.decode(message))
        if self.case.aborted:
            self.process_message(
                EngineCoreOutputs(outputs=[EngineCoreOutput(ID, [], finish_reason=FinishReason.ABORT)])
            )
        return self.end()

    def process_message(self, message: Any) -> None:
        for report in self.holding.process_message(message):
            outputs = [output for output in as_received(report).outputs if output.request_id == ID]
            self.received += len(outputs)
            self.processor.process_outputs(outputs, 1.0, None)


@given(st.randoms(use_true_random=False))
def test_outputs_of_held_requests_equal_vllms_own(random: Random) -> None:
    case = draw_case(random)
    frontend = HeldFrontend(case, random.choice([None, None, random.randint(0, len(case.messages))]))
    assert_same(run(frontend), run(Frontend(case)))
    if frontend.release_after is None and not case.params.stop:
        assert frontend.received <= 2, "the first token, and all others"


ANSWER = EngineCoreOutputs(utility_output=UtilityOutput(1))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(*tokens: tuple[str, int], at: float = 1.0, first: bool = False, more: Any = None) -> EngineCoreOutputs:
    prefill = PrefillStats() if first else None
    outputs = [EngineCoreOutput(name, [0] * count, prefill_stats=prefill) for name, count in tokens]
    return EngineCoreOutputs(outputs=outputs, timestamp=at, scheduler_stats=more)


def new_holding_queue(*names: str, clock: Clock | None = None) -> HoldingQueue:
    """Return a queue with requests of these names, numbered from 1. Each has its first token."""
    holding = HoldingQueue(queue.Queue(), clock or Clock())
    for number, name in enumerate(names, 1):
        assert holding.process_message(Begin(name, number, is_held=True)) == []
    (first,) = holding.process_message(step(*((name, 1) for name in names), first=True))
    assert [output.request_id for output in first.outputs] == list(names)
    return holding


def counts(report: EngineCoreOutputs) -> dict[int, int]:
    assert isinstance(report, Report)
    return dict(zip(array("q", report.numbers), array("i", report.counts), strict=True))


def test_counts_are_reported_at_intervals_and_nothing_else_is_sent() -> None:
    clock = Clock()
    holding = new_holding_queue("a", "b", clock=clock)
    assert holding.process_message(step(("a", 1), ("b", 1), more=SchedulerStats())) == []
    clock.now = REPORT_SECONDS
    (report,) = holding.process_message(step(("a", 3), more=SchedulerStats()))
    assert (report.outputs, counts(report)) == ([], {1: 5, 2: 2})
    assert holding.process_message(step(("b", 1))) == []


def test_a_message_with_the_end_of_a_request_has_the_counts_of_all_others() -> None:
    holding = new_holding_queue("a", "b")
    end = step(("a", 2), ("b", 4))
    end.outputs[0].finish_reason = FinishReason.STOP
    (report,) = holding.process_message(end)
    assert [output.request_id for output in report.outputs] == ["a"]
    assert counts(report) == {2: 5}


def test_reports_of_counts_alone_seldom_have_statistics() -> None:
    clock = Clock()
    holding = new_holding_queue("a", clock=clock)
    has_statistics = []
    for _ in range(100):
        # Some steps are not reported at all.
        clock.now += 0.4 * REPORT_SECONDS
        for report in holding.process_message(step(("a", 1), more=SchedulerStats())):
            has_statistics.append(report.scheduler_stats is not None)
    assert 2 <= has_statistics.count(True) <= clock.now / STATS_SECONDS + 1 < len(has_statistics) / 4
    end = step(("a", 1), more=SchedulerStats())
    end.outputs[0].finish_reason = FinishReason.STOP
    (report,) = holding.process_message(end)
    assert report.scheduler_stats is not None


def test_the_answer_of_a_call_follows_all_counts() -> None:
    holding = new_holding_queue("a")
    holding.process_message(step(("a", 4)))
    report, call = holding.process_message(ANSWER)
    assert counts(report) == {1: 5}
    assert call is ANSWER
    assert HoldingQueue(queue.Queue()).process_message(ANSWER) == [ANSWER]


@pytest.mark.parametrize(
    "more",
    [
        {"outputs": []},
        {"finished_requests": {"z"}},
        {"wave_complete": 1},
        {"start_wave": 1},
        {"scheduler_stats": SchedulerStats(prefix_cache_stats=PrefixCacheStats(requests=1))},
        {"scheduler_stats": SchedulerStats(perf_stats=SimpleNamespace())},  # type: ignore[arg-type]  # any will do
    ],
)
def test_a_message_that_has_more_than_gauges_is_sent(more: dict[str, Any]) -> None:
    message = structs.replace(step(("a", 1)), **more)
    (sent_on,) = new_holding_queue("a").process_message(message)
    assert sent_on.outputs == []
    for field in message.__struct_fields__:
        assert getattr(sent_on, field) == getattr(message, field)


def test_a_request_whose_outputs_cannot_be_joined_is_not_held() -> None:
    holding = HoldingQueue(queue.Queue(), Clock())
    holding.process_message(Begin("a", 1, is_held=True))
    holding.process_message(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1], kv_transfer_params={"block": 1})]))
    (message,) = holding.process_message(step(("a", 1)))
    assert len(message.outputs) == 1


def test_each_request_has_a_buffer_limit_of_its_own() -> None:
    holding = new_holding_queue("a", "b")
    sent_at: dict[str, int] = {}
    for number in range(2 * MIN_BUFFER_TOKENS + 2):
        for message in holding.process_message(step(("a", 1), ("b", 1))):
            for output in message.outputs:
                sent_at.setdefault(output.request_id, number)
                assert MIN_BUFFER_TOKENS < len(output.new_token_ids) <= 2 * MIN_BUFFER_TOKENS
    assert len(set(sent_at.values())) == 2


def test_tokens_of_a_released_request_are_sent_as_they_are_generated() -> None:
    holding = new_holding_queue("a", "b")
    holding.process_message(step(("a", 2), ("b", 1)))
    (released,) = holding.process_message(Release(["a", "gone"]))
    assert [(output.request_id, len(output.new_token_ids)) for output in released.outputs] == [("a", 2)]
    (message,) = holding.process_message(step(("a", 1), ("b", 1)))
    assert [output.request_id for output in message.outputs] == ["a"]


@pytest.mark.parametrize(
    ("message", "steps"),
    [
        (step(("a", 1), ("b", 1), at=1.25), ((2, 0.25, 0),)),
        (step(("a", 1), ("unknown", 1), at=1.25), ((2, 0.25, 0),)),
        # With drafts, the time of a step counts for each token of a sequence.
        (step(("a", 1), ("b", 3), at=1.25), ((2, 0.125, 0),)),
        (step(("z", 1), at=1.25, first=True), ()),  # a prefill
        (step(at=1.25), ()),
        (step(("a", 1), at=1.0), ()),
    ],
)
def test_decode_steps_are_reported(message: EngineCoreOutputs, steps: tuple[Any, ...]) -> None:
    clock = Clock()
    holding = new_holding_queue("a", "b", clock=clock)
    holding.process_message(message)
    clock.now = 1.0
    (report,) = holding.process_message(step(at=2.0))
    assert isinstance(report, Report)
    assert report.steps == steps


class Engine:
    """The methods of vLLM's ``EngineCoreProc`` that are replaced, and the methods that the replacements call."""

    def __init__(self) -> None:
        self.output_queue: Any = queue.Queue()
        self.scheduler = SimpleNamespace(requests={}, update_from_output=lambda scheduled, output: output)
        self.model_executor = SimpleNamespace(take_draft_token_ids=lambda: "of the worker")
        self.answered: list[str] = []

    def preprocess_add_request(self, request: Any) -> Any:
        self.scheduler.requests[request.request_id] = request
        return request, 0

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.scheduler.requests.pop(request_id, None)

    def process_output_sockets(self, *_: Any) -> None:
        self.sent = [*iter(self.output_queue.get, b"dead")]

    def _send_abort_outputs(self, requests: list[Any]) -> None:
        self.answered += [request.request_id for request in requests]


def new_request(name: str = ID, **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **params)
    return EngineCoreRequest(name, [4, 5, 6], None, sampling, None, 0.0, None, None, None, external_req_id="cmpl-1")


def test_an_engine_holds_releases_and_answers_aborts_of_running_requests() -> None:
    # Twice, as in a process that was forked.
    hold_outputs(Engine)
    hold_outputs(Engine)
    engine: Any = Engine()
    engine.preprocess_add_request(new_request("numbered", extra_args={NUMBER: 4}))
    engine.preprocess_add_request(new_request("without number"))
    getattr(engine, RELEASE)(0, ["numbered"])
    for item in ((0, ANSWER), (-1, "wave"), b"dead"):
        engine.output_queue.put_nowait(item)
    engine.process_output_sockets(None, None, 0)
    released, report, *others = engine.sent
    assert [(client, message.outputs) for client, message in (released, report)] == [(0, [])] * 2
    assert others == [(0, ANSWER), (-1, "wave")]
    engine.abort_requests(["numbered", "without number", "ended"])
    engine.abort_requests(["numbered"])
    assert engine.answered == ["numbered"]


def test_drafts_are_taken_from_the_output_of_their_step_and_counted() -> None:
    engine: Any = Engine()
    hold_outputs(Engine)
    engine.output_queue.put_nowait(b"dead")
    engine.process_output_sockets(None, None, 0)

    def run_step(output: Any) -> tuple[Any, Report]:
        assert engine.scheduler.update_from_output("scheduled", output) is output
        drafts = engine.model_executor.take_draft_token_ids()
        engine.output_queue._counts_sent_at = -1.0
        (report,) = engine.output_queue.process_message(step(at=2.0))
        return drafts, as_received(report)

    drafts, report = run_step(SimpleNamespace(**{DRAFTS: ("of this step", (7, 2, 5, 1))}))
    assert (drafts, report.drafts) == ("of this step", (7, 2, 5, 1))
    drafts, report = run_step(SimpleNamespace(**{DRAFTS: ("of the next", (9, 2, 6, 1))}))
    assert (drafts, report.drafts) == ("of the next", (2, 0, 1, 0))
    # An output of another drafter has none.
    drafts, report = run_step(SimpleNamespace())
    assert (drafts, report.drafts) == ("of the worker", (0, 0, 0, 0))


@pytest.mark.parametrize("is_numbered", [False, True])
def test_an_output_of_several_tokens_that_is_not_held_is_sent_token_by_token(is_numbered: bool) -> None:
    logprobs = LogprobsLists(np.arange(3)[:, None], -np.arange(3.0)[:, None], np.zeros(3, np.int64))
    output = EngineCoreOutput("a", [7, 8, 9], new_logprobs=logprobs, finish_reason=FinishReason.LENGTH)
    holding = HoldingQueue(queue.Queue(), Clock())
    if is_numbered:
        holding.process_message(Begin("a", 1, is_held=False))
    (message,) = holding.process_message(EngineCoreOutputs(outputs=[output]))
    assert [part.new_token_ids for part in message.outputs] == [[7], [8], [9]]
    rows = [part.new_logprobs.logprobs.tolist() for part in message.outputs if part.new_logprobs is not None]
    assert rows == [[[0.0]], [[-1.0]], [[-2.0]]]
    assert [part.finish_reason for part in message.outputs] == [None, None, FinishReason.LENGTH]
