"""The API process numbers requests, counts their tokens, and leaves their aborts and their metrics in order."""

import asyncio
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.serial_utils import MsgpackDecoder

from darts_server.engine.port import TokenSlice
from darts_server.vllm.engine_core.holding import NOT_HELD, NUMBER, RELEASE, Report
from darts_server.vllm.requests.adding import change_before_send
from darts_server.vllm.requests.held import HeldRequests, numbered_request_of
from darts_server.vllm.requests.outputs import DeferredOutput
from tests.vllm.engine_core.test_holding import new_holding_queue, new_request, step
from tests.vllm.requests.test_outputs import ID, encoded


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
    """The vLLM objects of the API process that number requests."""

    def __init__(self) -> None:
        self.core: Any = Core()
        self.processor = OutputProcessor(None, log_stats=True)
        self.held = HeldRequests(self.core, self.processor, self)
        self.logged: list[int | None] = []

    def record(self, *, iteration_stats: IterationStats | None = None, engine_idx: int = 0) -> None:
        """Stand in for vLLM's loggers."""
        self.logged.append(None if iteration_stats is None else iteration_stats.num_generation_tokens)

    async def add(self, request: EngineCoreRequest, before: Sequence[int] = ()) -> RequestOutputCollector:
        """Add a request. ``before``: tokens of a candidate that resumes."""
        collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, request.request_id)
        self.processor.add_request(request, None, None, 0, collector)
        with ExitStack() as candidate:
            if before:
                assert request.sampling_params is not None
                deferred = DeferredOutput(self.held.tokenizer, request.sampling_params, TokenSlice(before, None))
                candidate.enter_context(change_before_send(deferred.start_collecting))
            await self.core.add_request_async(request)
        return collector

    def receive(self, message: EngineCoreOutputs) -> Report:
        received: Report = self.core.decoder.decode(encoded(message))
        return received


def report(engine: int, **numbers: int) -> Report:
    keys = array("q", [int(name[1:]) for name in numbers])
    values = array("i", numbers.values())
    return Report(
        engine_index=engine, numbers=keys.tobytes(), counts=values.tobytes(), steps=((2, 0.5, 1),), drafts=(5, 1, 3, 0)
    )


@pytest.mark.anyio
async def test_a_count_is_the_engines_count_plus_the_tokens_that_the_request_was_sent_with() -> None:
    process = Process()
    steps: list[Any] = []
    process.held.on_step = lambda *step: steps.append(step)
    await process.add(new_request())
    assert process.held.count_tokens(ID) == 0
    process.receive(report(1, _1=5))
    process.receive(report(0, _2=9))
    assert process.held.count_tokens(ID) == 5
    assert process.held.count_tokens("ended") is None
    assert steps == [(2, 0.5, 1)] * 2
    assert (process.held.received_messages, process.held.decode_steps) == (2, 2)
    assert process.held.draft_totals == (10, 2, 6, 0)
    await process.add(new_request("resumed"), before=[1, 2, 3])
    assert process.held.count_tokens("resumed") == 3 + 9


@pytest.mark.anyio
async def test_only_the_first_request_that_is_added_in_a_block_is_its_candidate() -> None:
    process = Process()
    changed: list[str] = []
    await process.add(new_request("before"))
    with change_before_send(lambda request, state: changed.append(f"{request.request_id} {state.request_id}")):
        # Sent again, because its engine was lost.
        await process.core.add_request_async(process.core.added[0])
        for name in ("one", "another"):
            await process.add(new_request(name))
    states = process.processor.request_states
    numbered = {name: numbered_request_of(state) for name, state in states.items()}
    candidates = [name for name, found in numbered.items() if found is not None and found.is_candidate]
    assert (changed, candidates) == (["one one"], ["one"])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("params", "is_held"), [({}, True), ({"stop": ["a"]}, False), ({"extra_args": {NOT_HELD: True, "own": 1}}, False)]
)
async def test_a_request_that_is_read_while_it_runs_is_not_held(params: dict[str, Any], is_held: bool) -> None:
    process = Process()
    request = new_request(**params)
    before = request.sampling_params
    await process.add(request)
    assert (process.core.added[-1].sampling_params.extra_args[NUMBER] > 0) is is_held
    assert before is not None
    assert before.extra_args == params.get("extra_args"), "other requests may have the same object"


@pytest.mark.anyio
async def test_streams_and_streamed_inputs_have_no_number() -> None:
    process = Process()
    stream = new_request("stream")
    growing = new_request("growing")
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
async def test_an_aborted_request_ends_with_the_engines_answer(internal: bool) -> None:
    process = Process()
    collector = await process.add(new_request())
    assert process.processor.abort_requests([ID if internal else "cmpl-1"] * 2, internal) == [ID]
    assert collector.output is None
    process.processor.process_outputs([EngineCoreOutput(ID, [1, 2], finish_reason=FinishReason.ABORT)], 1.0, None)
    assert isinstance(collector.output, RequestOutput)
    (completion,) = collector.output.outputs
    assert (list(completion.token_ids), completion.finish_reason) == ([1, 2], "abort")


@pytest.mark.anyio
async def test_children_of_an_aborted_request_end_with_the_engines_answers() -> None:
    process = Process()
    parent = ParentRequest(new_request("parent", n=2))
    collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "parent")
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
    process = Process()
    holding = new_holding_queue("a")
    stats = IterationStats()
    last = EngineCoreOutputs(outputs=[EngineCoreOutput("a", [7], finish_reason=FinishReason.STOP)])
    waves = [EngineCoreOutputs(outputs=step(("a", 4)).outputs, wave_complete=1) for _ in range(2)]
    messages = [sent for message in (*waves, last) for sent in holding.process_message(message)]
    assert [message.buffered for message in messages if isinstance(message, Report)] == [4, 4, -8]
    for message in messages[:2]:
        process.receive(message)
        process.record()
    assert process.logged == [4, 4]
    process.receive(messages[2])
    # vLLM records an earlier message after the last one was decoded.
    process.record()
    stats.num_generation_tokens = 9
    process.record(iteration_stats=stats)
    process.record()
    assert process.logged == [4, 4, 0, 1, None]


@pytest.mark.anyio
async def test_latencies_are_means_and_a_request_without_tokens_has_none() -> None:
    process = Process()
    stats = IterationStats()
    await process.add(new_request())
    process.processor.process_outputs([EngineCoreOutput(ID, [1])], 1.0, stats)
    process.processor.process_outputs([EngineCoreOutput(ID, [1, 2, 3, 4])], 3.0, stats)
    assert stats.inter_token_latencies_iter == [0.5]
    process.processor.process_outputs([EngineCoreOutput(ID, [], finish_reason=FinishReason.ABORT)], 9.0, stats)
    assert stats.inter_token_latencies_iter == [0.5]
    assert stats.num_generation_tokens == 5
    assert process.held.count_tokens(ID) is None
    await process.add(new_request("another"))
    process.processor.process_outputs([EngineCoreOutput("another", [], finish_reason=FinishReason.ABORT)], 9.0, stats)
    ended = stats.finished_requests[-1]
    assert (ended.prefill_time, ended.inference_time, len(stats.time_to_first_tokens_iter)) == (0, 0, 1)


@pytest.mark.anyio
async def test_after_new_weights_no_request_uses_older_cached_blocks() -> None:
    process = Process()
    for place, salt in enumerate((None, None, "user", "user")):
        if place % 2:
            process.held.change_cache_salt()
        request = new_request(f"request {place}")
        request.cache_salt = salt
        await process.add(request)
        if place == 3:
            # The request is sent again, because its engine was lost.
            await process.core.add_request_async(request)
    salts = [request.cache_salt for request in process.core.added]
    assert salts[0] is None
    assert len(set(salts)) == 4
    assert salts[3] == salts[4]
    assert all(salt.endswith("user") for salt in salts[2:])
