"""What was held is, field by field, what vLLM makes as the tokens come; and counts, steps and calls are in order."""

import asyncio
import queue
from array import array
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, UtilityOutput
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats, PrefillStats, PrefixCacheStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder

from darts_server.vllm.engine_core.holding import (
    ARGUMENT,
    MOST_KEPT,
    PASSED_ON,
    RELEASE,
    REPORT_SECONDS,
    Begin,
    HoldingQueue,
    Release,
    Report,
    hold_outputs,
)
from darts_server.vllm.requests.held import HeldRequests, changing_state, held_of
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


def sent(message: EngineCoreOutputs) -> Report:
    """Send a message as vLLM does."""
    received: Report = MsgpackDecoder(Report).decode(encoded(message))
    return received


class HeldFrontend(DeferringFrontend):
    """A candidate whose engine holds its outputs. ``released``: after so many messages."""

    def __init__(self, case: Case, released: int | None) -> None:
        super().__init__(case)
        self.holding = HoldingQueue(queue.Queue())
        self.released = released
        self.received = 0

    def add(self, prompt: Sequence[int] = PROMPT) -> EngineCoreRequest:
        self.holding.pass_on(Begin(ID, 1, held=not self.case.params.stop))
        return super().add(prompt)

    def run(self) -> RequestOutput:
        for number, message in enumerate(self.case.messages):
            if number == self.released:
                self.hand_on(Release([ID]))
            self.hand_on(self.decoder.decode(message))
        if self.case.aborted:
            self.hand_on(EngineCoreOutputs(outputs=[EngineCoreOutput(ID, [], finish_reason=FinishReason.ABORT)]))
        return self.end()

    def hand_on(self, message: Any) -> None:
        for each in self.holding.pass_on(message):
            outputs = [output for output in sent(each).outputs if output.request_id == ID]
            self.received += len(outputs)
            self.processor.process_outputs(outputs, 1.0, None)


@given(st.randoms(use_true_random=False))
def test_what_was_held_is_vllms_own(random: Random) -> None:
    case = draw_case(random)
    frontend = HeldFrontend(case, random.choice([None, None, random.randint(0, len(case.messages))]))
    assert_same(run(frontend), run(Frontend(case)))
    if frontend.released is None and not case.params.stop:
        assert frontend.received <= 2, "the first token, and the rest"


# --- the engine's process ---------------------------------------------------------


ANSWER = EngineCoreOutputs(utility_output=UtilityOutput(1))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(*tokens: tuple[str, int], at: float = 1.0, first: bool = False, more: Any = None) -> EngineCoreOutputs:
    prefill = PrefillStats() if first else None
    outputs = [EngineCoreOutput(name, [0] * count, prefill_stats=prefill) for name, count in tokens]
    return EngineCoreOutputs(outputs=outputs, timestamp=at, scheduler_stats=more)


def holding(*names: str, clock: Clock | None = None) -> HoldingQueue:
    """Return one with these requests, numbered from 1, each of which has its first token."""
    made = HoldingQueue(queue.Queue(), clock or Clock())
    for number, name in enumerate(names, 1):
        assert made.pass_on(Begin(name, number, held=True)) == []
    (first,) = made.pass_on(step(*((name, 1) for name in names), first=True))
    assert [output.request_id for output in first.outputs] == list(names)
    return made


def counts(report: EngineCoreOutputs) -> dict[int, int]:
    assert isinstance(report, Report)
    return dict(zip(array("q", report.numbers), array("i", report.counts), strict=True))


def test_counts_are_reported_at_intervals_and_nothing_else_is_sent() -> None:
    clock = Clock()
    one = holding("a", "b", clock=clock)
    assert one.pass_on(step(("a", 1), ("b", 1), more=SchedulerStats())) == []
    clock.now = REPORT_SECONDS
    (report,) = one.pass_on(step(("a", 3), more=SchedulerStats()))
    assert (report.outputs, counts(report)) == ([], {1: 5, 2: 2})
    assert one.pass_on(step(("b", 1))) == []


def test_the_answer_of_a_call_comes_after_all_counts() -> None:
    one = holding("a")
    one.pass_on(step(("a", 4)))
    report, call = one.pass_on(ANSWER)
    assert counts(report) == {1: 5}
    assert call is ANSWER
    assert HoldingQueue(queue.Queue()).pass_on(ANSWER) == [ANSWER]


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
    (sent_on,) = holding("a").pass_on(message)
    assert sent_on.outputs == []
    for field in message.__struct_fields__:
        assert getattr(sent_on, field) == getattr(message, field)


def test_what_cannot_be_joined_is_passed_on() -> None:
    made = HoldingQueue(queue.Queue(), Clock())
    made.pass_on(Begin("a", 1, held=True))
    made.pass_on(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1], kv_transfer_params={"block": 1})]))
    (message,) = made.pass_on(step(("a", 1)))
    assert len(message.outputs) == 1


def test_some_hundreds_of_tokens_are_kept_at_most_of_each_request_as_many_of_its_own() -> None:
    one, sent_at = holding("a", "b"), dict[str, int]()
    for number in range(2 * MOST_KEPT + 2):
        for message in one.pass_on(step(("a", 1), ("b", 1))):
            for output in message.outputs:
                sent_at.setdefault(output.request_id, number)
                assert MOST_KEPT < len(output.new_token_ids) <= 2 * MOST_KEPT
    assert len(set(sent_at.values())) == 2


def test_what_was_released_comes_as_it_is_generated() -> None:
    one = holding("a", "b")
    one.pass_on(step(("a", 2), ("b", 1)))
    (released,) = one.pass_on(Release(["a", "gone"]))
    assert [(output.request_id, len(output.new_token_ids)) for output in released.outputs] == [("a", 2)]
    (message,) = one.pass_on(step(("a", 1), ("b", 1)))
    assert [output.request_id for output in message.outputs] == ["a"]


@pytest.mark.parametrize(
    ("message", "steps"),
    [
        (step(("a", 1), ("b", 1), at=1.25), ((2, 0.25, 0),)),
        (step(("a", 1), ("unknown", 1), at=1.25), ((2, 0.25, 0),)),
        (step(("a", 1), ("b", 2), at=1.25), ()),  # several tokens have no time each
        (step(("z", 1), at=1.25, first=True), ()),  # nothing says when it began
        (step(at=1.25), ()),
        (step(("a", 1), at=1.0), ()),
    ],
)
def test_steps_that_decode_are_reported(message: EngineCoreOutputs, steps: tuple[Any, ...]) -> None:
    clock = Clock()
    one = holding("a", "b", clock=clock)
    one.pass_on(message)
    clock.now = 1.0
    (report,) = one.pass_on(step(at=2.0))
    assert isinstance(report, Report)
    assert report.steps == steps


class Engine:
    """What is changed of vLLM's ``EngineCoreProc``."""

    def __init__(self) -> None:
        self.output_queue: Any = queue.Queue()
        self.scheduler = SimpleNamespace(requests={})
        self.answered: list[str] = []

    def preprocess_add_request(self, request: Any) -> Any:
        self.scheduler.requests[request.request_id] = request
        return request, 0

    def abort_requests(self, request_ids: list[str]) -> None:
        for each in request_ids:
            self.scheduler.requests.pop(each, None)

    def process_output_sockets(self, *_: Any) -> None:
        self.sent = [*iter(self.output_queue.get, b"dead")]

    def _send_abort_outputs(self, requests: list[Any]) -> None:
        self.answered += [request.request_id for request in requests]


def new_request(name: str = ID, **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **params)
    return EngineCoreRequest(name, [4, 5, 6], None, sampling, None, 0.0, None, None, None, external_req_id="cmpl-1")


def test_an_engine_holds_and_releases_and_answers_aborts_of_what_it_runs() -> None:
    hold_outputs(Engine)
    hold_outputs(Engine)  # in a process that was forked
    engine: Any = Engine()
    engine.preprocess_add_request(new_request("numbered", extra_args={ARGUMENT: 4}))
    engine.preprocess_add_request(new_request("vllms"))
    getattr(engine, RELEASE)(0, ["numbered"])
    for item in ((0, ANSWER), (-1, "wave"), b"dead"):
        engine.output_queue.put_nowait(item)
    engine.process_output_sockets(None, None, 0)
    released, report, *others = engine.sent
    assert [(client, message.outputs) for client, message in (released, report)] == [(0, [])] * 2
    assert others == [(0, ANSWER), (-1, "wave")]
    engine.abort_requests(["numbered", "vllms", "ended"])
    engine.abort_requests(["numbered"])
    assert engine.answered == ["numbered"]


# --- the API process --------------------------------------------------------------


class Core:
    """vLLM's client of two engines."""

    client_index = 0
    core_engines = (b"0", b"1")

    def __init__(self) -> None:
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.added: list[EngineCoreRequest] = []
        self.calls: list[Any] = []
        self.error: Exception | None = None

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if self.error is not None:
            raise self.error
        self.added.append(request)

    async def _call_utility_async(self, *args: Any, engine: bytes) -> None:
        self.calls.append((*args, engine))
        if self.error is not None:
            raise self.error


class Process:
    """The API process's half."""

    def __init__(self) -> None:
        self.core: Any = Core()
        self.processor = OutputProcessor(None, log_stats=True)
        self.held = HeldRequests(self.core, self.processor, self)
        self.logged: list[int | None] = []

    def record(self, *, iteration_stats: IterationStats | None = None, engine_idx: int = 0) -> None:
        """vLLM's loggers."""
        self.logged.append(None if iteration_stats is None else iteration_stats.num_generation_tokens)

    async def add(self, request: EngineCoreRequest, before: Sequence[int] = ()) -> RequestOutputCollector:
        """``before``: tokens that it goes on from."""
        collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, request.request_id)
        self.processor.add_request(request, None, None, 0, collector)
        detokenizer = self.processor.request_states[request.request_id].detokenizer
        assert detokenizer is not None
        detokenizer.update([*before], False)
        await self.core.add_request_async(request)
        return collector

    def receive(self, message: EngineCoreOutputs) -> Report:
        received: Report = self.core.decoder.decode(encoded(message))
        return received


def report(engine: int, **numbers: int) -> Report:
    keys, values = array("q", [int(name[1:]) for name in numbers]), array("i", numbers.values())
    return Report(engine_index=engine, numbers=keys.tobytes(), counts=values.tobytes(), steps=((2, 0.5, 1),))


@pytest.mark.anyio
async def test_counts_are_those_of_the_engine_beyond_what_it_was_sent_with() -> None:
    process, steps = Process(), list[Any]()
    process.held.on_step = lambda *each: steps.append(each)
    await process.add(new_request())
    assert process.held.tokens(ID) == 0
    process.receive(report(1, _1=5))
    process.receive(report(0, _2=9))
    assert process.held.tokens(ID) == 5
    assert process.held.tokens("ended") is None
    assert steps == [(2, 0.5, 1)] * 2
    assert (process.held.messages, process.held.steps) == (2, 2)
    await process.add(new_request("resumed"), before=[1, 2, 3])
    assert process.held.tokens("resumed") == 3 + 9


@pytest.mark.anyio
async def test_only_the_first_request_that_is_added_in_a_block_is_its_candidate() -> None:
    process, changed = Process(), list[str]()
    await process.add(new_request("before"))
    with changing_state(lambda request, state: changed.append(f"{request.request_id} {state.request_id}")):
        await process.core.add_request_async(process.core.added[0])  # its engine was lost
        for name in ("one", "another"):
            await process.add(new_request(name))
    states = process.processor.request_states
    candidates = [name for name, state in states.items() if (held := held_of(state)) and held.is_candidate]
    assert (changed, candidates) == (["one one"], ["one"])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("params", "held"), [({}, True), ({"stop": ["a"]}, False), ({"extra_args": {PASSED_ON: True, "own": 1}}, False)]
)
async def test_what_is_read_on_the_way_is_not_held(params: dict[str, Any], held: bool) -> None:
    process, request = Process(), new_request(**params)
    before = request.sampling_params
    await process.add(request)
    assert (process.core.added[-1].sampling_params.extra_args[ARGUMENT] > 0) is held
    assert before is not None
    assert before.extra_args == params.get("extra_args"), "other requests may have the same"


@pytest.mark.anyio
async def test_streams_and_inputs_that_stream_are_vllms() -> None:
    process, stream, growing = Process(), new_request("stream"), new_request("growing")
    assert stream.sampling_params is not None
    stream.sampling_params.output_kind = RequestOutputKind.DELTA
    growing.resumable = True
    for request in (stream, growing):
        await process.add(request)
        assert request.sampling_params is not None
        assert request.sampling_params.extra_args is None
    assert process.processor.abort_requests(["stream"] * 2, internal=True) == ["stream"]
    assert "stream" not in process.processor.request_states


@pytest.mark.anyio
@pytest.mark.parametrize("internal", [True, False])
async def test_an_aborted_request_ends_by_the_engines_answer(internal: bool) -> None:
    process = Process()
    collector = await process.add(new_request())
    assert process.processor.abort_requests([ID if internal else "cmpl-1"] * 2, internal) == [ID]
    assert collector.output is None
    process.processor.process_outputs([EngineCoreOutput(ID, [1, 2], finish_reason=FinishReason.ABORT)], 1.0, None)
    assert isinstance(collector.output, RequestOutput)
    (completion,) = collector.output.outputs
    assert (list(completion.token_ids), completion.finish_reason) == ([1, 2], "abort")


@pytest.mark.anyio
async def test_children_of_an_aborted_request_end_by_the_engines_answers() -> None:
    process, request = Process(), new_request("parent", n=2)
    parent, collector = ParentRequest(request), RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "parent")
    children = []
    for index in range(2):
        name, params = parent.get_child_info(index)
        child = new_request(name)
        child.sampling_params = params
        process.processor.add_request(child, None, parent, index, collector)
        await process.core.add_request_async(child)
        children.append(name)
    assert set(process.processor.abort_requests(["parent"], internal=True)) == set(children)
    outputs = [EngineCoreOutput(name, [1], finish_reason=FinishReason.ABORT) for name in children]
    process.processor.process_outputs(outputs, 1.0, None)
    assert isinstance(collector.output, RequestOutput)
    assert [list(each.token_ids) for each in collector.output.outputs] == [[1], [1]]


@pytest.mark.anyio
async def test_a_request_that_was_not_sent_is_forgotten_at_its_abort() -> None:
    process = Process()
    process.core.error = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        await process.add(new_request())
    process.processor.abort_requests([ID], internal=True)
    assert not process.processor.request_states


@pytest.mark.anyio
async def test_requests_are_released_in_one_call_to_each_engine(caplog: pytest.LogCaptureFixture) -> None:
    process = Process()
    process.held.release("a")
    process.held.release("b")
    await asyncio.sleep(0.01)
    assert process.core.calls == [(RELEASE, 0, ["a", "b"], engine) for engine in Core.core_engines]
    process.core.error = RuntimeError("dead")
    process.held.release("c")
    await asyncio.sleep(0.01)
    assert "did not release" in caplog.text


def test_tokens_are_counted_when_they_are_generated() -> None:
    process, one, stats = Process(), holding("a"), IterationStats()
    last = EngineCoreOutputs(outputs=[EngineCoreOutput("a", [7], finish_reason=FinishReason.STOP)])
    waves = [EngineCoreOutputs(outputs=step(("a", 4)).outputs, wave_complete=1) for _ in range(2)]
    messages = [sent for message in (*waves, last) for sent in one.pass_on(message)]
    assert [message.kept for message in messages if isinstance(message, Report)] == [4, 4, -8]
    for message in messages[:2]:
        process.receive(message)
        process.record()
    assert process.logged == [4, 4]
    process.receive(messages[2])
    process.record()  # of an earlier message
    stats.num_generation_tokens = 9
    process.record(iteration_stats=stats)
    process.record()
    assert process.logged == [4, 4, 0, 1, None]


@pytest.mark.anyio
async def test_latencies_are_means_of_a_request_and_one_without_a_token_has_no_times() -> None:
    process, stats = Process(), IterationStats()
    await process.add(new_request())
    process.processor.process_outputs([EngineCoreOutput(ID, [1])], 1.0, stats)
    process.processor.process_outputs([EngineCoreOutput(ID, [1, 2, 3, 4])], 3.0, stats)
    assert stats.inter_token_latencies_iter == [0.5]
    process.processor.process_outputs([EngineCoreOutput(ID, [], finish_reason=FinishReason.ABORT)], 9.0, stats)
    assert stats.inter_token_latencies_iter == [0.5]
    assert stats.num_generation_tokens == 5
    assert process.held.tokens(ID) is None
    await process.add(new_request("another"))
    process.processor.process_outputs([EngineCoreOutput("another", [], finish_reason=FinishReason.ABORT)], 9.0, stats)
    ended = stats.finished_requests[-1]
    assert (ended.prefill_time, ended.inference_time, len(stats.time_to_first_tokens_iter)) == (0, 0, 1)
