"""Keep what a request generates in the engine's process until it ends: the API process pays by the request.

vLLM sends every token of every request to the API process as it comes, where each takes 25 to 40 us, though most are
not read before the request ends. So a request whose caller wants its final output alone is *held*: its first token is
sent as ever, with the prompt's log-probs and vLLM's times, and all others at its end, or its abort, in one output, or
some hundreds at a time: so no turn of the event loop has much to do with one, and not more than these are lost with an
engine. In between the engine reports how many tokens each has.

The first half runs in the engine's process, in the thread that sends its outputs. Its second runs in the API process.
An abort of such a request is answered by the engine, with all that was generated: nothing else has it. What is read
while it is generated, as by a stream of tokens, is released: sent as it comes from then on.
"""

import asyncio
import logging
import os
import queue
import time
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import partial
from itertools import count
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from msgspec import structs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder

logger = logging.getLogger(__name__)

ARGUMENT = "darts_held"
"""Name in ``extra_args``, by which the engine knows a request that is held: its number; negative: not to be held."""
PASSED_ON = "darts_passed_on"  # name in ``extra_args`` of a request whose tokens are read while they are generated
RELEASE = "darts_release"  # name of the engine's method that releases requests
RANK = "DARTS_ENGINE_RANK"
"""Environment variable of an engine that is one of several, each of which vLLM takes to be the only one."""
REPORT_SECONDS = 0.01
"""How often counts are reported. Half of the interval at which they are looked at: late counts are tokens too many."""
MOST_KEPT = 256
"""Tokens of a request that are kept at most; twice that for some: requests that began together are sent one by one."""

SAID_ONCE = (
    *("kv_cache_eviction_events", "iteration_details", "spec_decoding_stats", "kv_connector_stats"),
    *("ec_connector_stats", "cudagraph_stats", "perf_stats"),
)
"""Of vLLM's ``SchedulerStats``, those of one step that no later message repeats."""

T = TypeVar("T")
Step = tuple[int, float, int]
StepListener = Callable[[int, float, int], None]
"""Gets how many sequences got a token in a step, its seconds, and for how many of them the token was the first."""


class Report(EngineCoreOutputs, array_like=True, omit_defaults=True, gc=False):
    """vLLM's message with what the engine holds; vLLM's decoder reads it as its own.

    ``numbers``: int64 of each request, ``counts``: int32, its tokens so far; both empty while none are due. ``steps``:
    since the last ones, see `StepListener`. ``kept``: by how many more tokens are kept than at the last message.
    """

    numbers: bytes = b""
    counts: bytes = b""
    steps: tuple[Step, ...] = ()
    kept: int = 0


# --- in the engine's process ---------------------------------------------------


class Begin(NamedTuple):
    """The outputs of a request are coming. ``held``: they are held back."""

    request_id: str
    number: int
    held: bool


class Release(NamedTuple):
    """The outputs of these requests are not held back any more."""

    request_ids: Sequence[str]


class Request:
    """What is kept of one request, at ``most``. ``count``: of the tokens that it has generated, sent or kept."""

    __slots__ = ("_events", "_logprobs", "_nans", "_tokens", "count", "held", "most", "number")

    def __init__(self, number: int, held: bool) -> None:
        self.number, self.held, self.count = number, held, 0
        self.most = MOST_KEPT + 7 * number % MOST_KEPT
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[LogprobsLists] = []
        self._events: list[Any] = []
        self._nans = 0

    def keep(self, output: EngineCoreOutput) -> None:
        self._tokens += output.new_token_ids
        if (logprobs := output.new_logprobs) is not None:
            # Copies: they may be parts of arrays of a whole step, in memory that later steps use again.
            copies = logprobs.logprob_token_ids.copy(), logprobs.logprobs.copy(), logprobs.sampled_token_ranks.copy()
            self._logprobs.append(LogprobsLists(*copies))
        if output.events:
            self._events += output.events
        self._nans += output.num_nans_in_logits

    def join(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Put what was kept before what an output has."""
        self.keep(output)
        output.new_token_ids = self._tokens
        output.new_logprobs = None
        if parts := self._logprobs:
            # Those of a step are as wide as its request that wants most, so some may be wider than others.
            width = min(part.logprobs.shape[1] for part in parts)
            output.new_logprobs = LogprobsLists(
                np.concatenate([part.logprob_token_ids[:, :width] for part in parts]),
                np.concatenate([part.logprobs[:, :width] for part in parts]),
                np.concatenate([part.sampled_token_ranks for part in parts]),
            )
        output.events = self._events or None
        output.num_nans_in_logits = self._nans
        self._clear()
        return output

    @property
    def kept(self) -> int:
        return len(self._tokens)


class HoldingQueue:
    """vLLM's queue of messages for its clients, of which the thread that sends them gets what is not held back.

    ``clock``: monotonic, in seconds.
    """

    def __init__(self, messages: "queue.Queue[Any]", clock: Callable[[], float] = time.monotonic) -> None:
        self._messages, self._clock = messages, clock
        self._next: list[tuple[int, EngineCoreOutputs]] = []
        self._requests: dict[str, Request] = {}
        self._steps: list[Step] = []
        self._kept = 0
        self._last_step = self._reported = -inf

    def get(self) -> Any:
        while not self._next:
            item = self._messages.get()
            if isinstance(item, bytes) or item[0] < 0:  # the engine's death; what is for vLLM's coordinator
                return item
            client, message = item
            self._next = [(client, each) for each in reversed(self.pass_on(message))]
        return self._next.pop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._messages, name)

    def pass_on(self, message: Any) -> list[EngineCoreOutputs]:
        """Return what is sent now of a message of the engine, or for a `Begin` or `Release`."""
        if isinstance(message, Begin):
            self._requests[message.request_id] = Request(message.number, message.held)
            return []
        if isinstance(message, Release):
            return self._release(message.request_ids)
        if message.utility_output is not None:
            # What a call has done, as a pause, comes after everything that was generated before it.
            return [self._report(EngineCoreOutputs(), due=True), message] if self._requests else [message]
        is_needed = says_more(message)
        message.outputs = self._hold(message)
        due = self._clock() >= self._reported + REPORT_SECONDS
        return [self._report(message, due)] if due or message.outputs or is_needed else []

    def _hold(self, message: EngineCoreOutputs) -> list[EngineCoreOutput]:
        """Keep what is to be held of a step's outputs, and return the others."""
        decoded = started = most = 0
        passed = []
        for output in message.outputs:
            tokens = len(output.new_token_ids)
            decoded += tokens > 0
            started += output.prefill_stats is not None
            most = max(most, tokens)
            request = self._requests.get(output.request_id)
            if request is None:
                passed.append(output)
                continue
            is_first, request.count = not request.count, request.count + tokens
            if is_first and not is_plain(output):
                request.held = False
            if output.finish_reason is not None:
                del self._requests[output.request_id]
                self._kept -= request.kept
                passed.append(request.join(output))
            elif is_first or not request.held:
                passed.append(output)
            elif request.kept >= request.most:
                self._kept -= request.kept
                passed.append(request.join(output))
            else:
                request.keep(output)
                self._kept += tokens
        if decoded:
            seconds, self._last_step = message.timestamp - self._last_step, message.timestamp
            # A step in which all tokens are the first has no time of its own, and several tokens have none each.
            if started < decoded and most == 1 and 0 < seconds < inf:
                self._steps.append((decoded, seconds, started))
        return passed

    def _release(self, request_ids: Iterable[str]) -> list[EngineCoreOutputs]:
        requests = {each: self._requests[each] for each in request_ids if each in self._requests}
        for request in requests.values():
            request.held = False
            self._kept -= request.kept
        outputs = [request.join(EngineCoreOutput(name, [])) for name, request in requests.items()]
        return [self._report(EngineCoreOutputs(outputs=[each for each in outputs if each.new_token_ids]), due=False)]

    def _report(self, message: EngineCoreOutputs, due: bool) -> Report:
        kept, self._kept = self._kept, 0
        report = Report(**structs.asdict(message), kept=kept)
        if due:
            self._reported = self._clock()
            requests = [request for request in self._requests.values() if request.held]
            report.numbers = array("q", [request.number for request in requests]).tobytes()
            report.counts = array("i", [request.count for request in requests]).tobytes()
            report.steps, self._steps = tuple(self._steps), []
        return report


def is_plain(output: EngineCoreOutput) -> bool:
    """Whether a request has only what can be joined, by its first output."""
    others = ("routed_experts", "new_sampling_mask", "pooling_output", "kv_transfer_params", "ec_transfer_params")
    return all(getattr(output, name) is None for name in others)


def says_more(message: EngineCoreOutputs) -> bool:
    """Whether a message has more than outputs, and gauges which those of the next one replace."""
    if not message.outputs:  # maybe the last one for long: all requests were aborted
        return True
    if message.finished_requests or message.wave_complete is not None or message.start_wave is not None:
        return True
    if (stats := message.scheduler_stats) is None:
        return False
    connector = stats.connector_prefix_cache_stats
    has_queries = stats.prefix_cache_stats.requests or (connector is not None and connector.requests)
    return bool(has_queries) or any(getattr(stats, name) for name in SAID_ONCE)


def hold_outputs(engine: Any) -> None:
    """Let vLLM's class of engines, ``EngineCoreProc``, hold outputs, answer aborts, and have the method `RELEASE`."""
    if hasattr(engine, RELEASE):
        return
    add, abort, send = engine.preprocess_add_request, engine.abort_requests, engine.process_output_sockets

    def preprocess_add_request(self: Any, request: EngineCoreRequest) -> Any:
        if number := number_of(request.sampling_params):
            begin = Begin(request.request_id, abs(number), held=number > 0)
            self.output_queue.put_nowait((request.client_index, begin))
        return add(self, request)

    def abort_requests(self: Any, request_ids: list[str]) -> None:
        running = [self.scheduler.requests.get(each) for each in request_ids]
        abort(self, request_ids)
        self._send_abort_outputs([each for each in running if each is not None and number_of(each.sampling_params)])

    def process_output_sockets(self: Any, clients: Any, coordinator: Any, engine_index: int) -> None:
        self.output_queue = HoldingQueue(self.output_queue)
        send(self, clients, coordinator, int(os.environ.get(RANK, engine_index)))

    def release(self: Any, client: int, request_ids: list[str]) -> None:
        self.output_queue.put_nowait((client, Release(request_ids)))

    engine.preprocess_add_request, engine.abort_requests = preprocess_add_request, abort_requests
    engine.process_output_sockets = process_output_sockets
    setattr(engine, RELEASE, release)


def number_of(params: Any) -> int:
    """Return the number of a request with these sampling parameters, 0 if it has none."""
    return 0 if params is None or not params.extra_args else params.extra_args.get(ARGUMENT, 0)


# --- in the API process -----------------------------------------------------------


StateChange = Callable[[EngineCoreRequest, RequestState], None]
_changes: ContextVar[list[StateChange] | None] = ContextVar("changes", default=None)


@contextmanager
def changing_state(change: StateChange) -> Iterator[None]:
    """Call ``change`` with the candidate that this task adds in the block, and its new state.

    In the call that sends it, because its first output may come before `AsyncLLM.add_request` returns.

    Raises:
        RuntimeError: it was not called: this version of vLLM sends requests in another way.
    """
    changes = [change]  # emptied by the call: tasks of vLLM's that begin in the block keep this context
    token = _changes.set(changes)
    try:
        yield
    finally:
        _changes.reset(token)
    if changes:
        raise RuntimeError("vLLM has sent a candidate without EngineCoreClient.add_request_async")


class HeldRequest(NamedTuple):
    """``before``: tokens that it had when it was sent, as it goes on from these. The engine does not count them.

    ``is_candidate``: of a group.
    """

    number: int
    before: int
    is_candidate: bool


class HeldRequests:
    """The requests of this process that engines hold: changes vLLM's objects so that they leave these to the engines.

    Args:
        engine_core: vLLM's client of the engines.
        processor: vLLM's, of their outputs.
        loggers: vLLM's, of statistics; ``None`` if there are none.
    """

    def __init__(self, engine_core: Any, processor: OutputProcessor, loggers: Any) -> None:
        self.on_step: StepListener | None = None
        self.messages = self.steps = 0  # that engines have sent, and the decode steps in them
        self._core, self.states, self._names = engine_core, processor.request_states, processor.external_req_ids
        self._numbers = count(1)
        self._counts: dict[int, int] = {}  # of running requests, by number
        self._kept = Counter[int]()  # tokens of each engine that vLLM's loggers do not know of
        self._releases = OncePerTurn(self._send_released)
        # Methods of these objects, not of their classes; vLLM's task has the decoder already.
        vllms: Any = engine_core.decoder
        self._decode_report = MsgpackDecoder(Report, oob_tensor_provider=vllms.oob_tensor_provider).decode
        vllms.decode = self._decode
        self._add, engine_core.add_request_async = engine_core.add_request_async, self._add_numbered
        changed: Any = processor
        self._forget, changed.abort_requests = processor.abort_requests, self._abort
        self._update, changed._update_stats_from_output = processor._update_stats_from_output, self._update_stats
        if loggers is not None:
            self._record, loggers.record = loggers.record, self._record_kept

    def tokens(self, request_id: str) -> int | None:
        """Return how many tokens a request has generated; ``None`` once it has its final output."""
        state = self.states.get(request_id)
        if state is None or state.detokenizer is None:
            return None
        received = int(state.detokenizer.num_output_tokens())
        if (held := held_of(state)) is None:
            return received
        return max(received, held.before + self._counts.get(held.number, 0))

    def release(self, request_id: str) -> None:
        """Let the tokens of a request come as they are generated."""
        self._releases.add(request_id)

    async def _send_released(self, names: list[str]) -> None:
        call = partial(self._core._call_utility_async, RELEASE, self._core.client_index, names)
        calls = (call(engine=engine) for engine in self._core.core_engines)
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, Exception):  # of a dead engine, which ends all requests anyway
                logger.error("an engine did not release requests: %s", answer)

    def _decode(self, frames: Any) -> Report:
        report: Report = self._decode_report(frames)
        self.messages += 1
        self.steps += len(report.steps)
        self._kept[report.engine_index] += report.kept
        self._counts.update(zip(array("q", report.numbers), array("i", report.counts), strict=True))
        if self.on_step is not None:
            for step in report.steps:
                self.on_step(*step)
        return report

    async def _add_numbered(self, request: EngineCoreRequest) -> None:
        params, state = request.sampling_params, self.states.get(request.request_id)
        is_final_only = params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY
        if params is None or state is None or not is_final_only or request.resumable:
            await self._add(request)
            return
        is_candidate = False
        if (moved := held_of(state)) is not None:
            self._counts.pop(moved.number, None)
        elif changes := _changes.get():
            changes.pop()(request, state)
            is_candidate = True
        extra = params.extra_args or {}
        number = next(self._numbers)
        before = 0 if state.detokenizer is None else state.detokenizer.num_output_tokens()
        setattr(state, ARGUMENT, HeldRequest(number, before, is_candidate))
        # Stop strings are searched for in this process.
        is_read = bool(params.stop) or PASSED_ON in extra
        request.sampling_params = copy(params)  # other requests may have the same
        request.sampling_params.extra_args = {**extra, ARGUMENT: -number if is_read else number}
        try:
            await self._add(request)
        except BaseException:
            setattr(state, ARGUMENT, None)  # no engine answers its abort
            raise

    def _abort(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """Let vLLM not end an aborted request that has a number: the engine does, with everything it has generated."""
        names = list(request_ids)
        ids = names if internal else [each for name in names for each in self._names.get(name, ())]
        ids = list(dict.fromkeys(ids))  # at the second mention of one vLLM raises, when it has forgotten some
        ours = [each for each in ids if held_of(self.states.get(each))]
        return [*ours, *self._forget([each for each in ids if each not in ours], True)]  # it calls this for children

    def _update_stats(self, state: RequestState, output: EngineCoreOutput, timestamp: Any, stats: Any) -> None:
        """Forget the counts of requests that have ended, and let vLLM's metrics have times that say something."""
        if (held := held_of(state)) is None:
            self._update(state, output, timestamp, stats)
            return
        if output.finish_reason is not None:
            self._counts.pop(held.number, None)
        if output.finish_reason == FinishReason.ABORT and state.is_prefilling:
            return  # it has no first token, and so no times
        before = 0 if stats is None else len(stats.inter_token_latencies_iter)
        self._update(state, output, timestamp, stats)
        if stats is not None and len(stats.inter_token_latencies_iter) > before:
            # The mean time between tokens that come together, in place of their sum.
            latency, tokens = stats.inter_token_latencies_iter.pop(), len(output.new_token_ids)
            if tokens:
                stats.inter_token_latencies_iter.append(latency / tokens)

    def _record_kept(self, *, iteration_stats: IterationStats | None = None, engine_idx: int = 0, **more: Any) -> None:
        """Let vLLM's loggers count tokens when they are generated, though they come later."""
        if kept := self._kept[engine_idx]:
            iteration_stats = iteration_stats or IterationStats()
            tokens = iteration_stats.num_generation_tokens + kept
            # Negative: some of a later message, which has come but was not processed yet.
            iteration_stats.num_generation_tokens, self._kept[engine_idx] = max(0, tokens), min(0, tokens)
        self._record(iteration_stats=iteration_stats, engine_idx=engine_idx, **more)


def held_of(state: RequestState | None) -> HeldRequest | None:
    """Return what is noted of a request that has a number; ``None``: it has none."""
    return getattr(state, ARGUMENT, None)


class OncePerTurn(Generic[T]):
    """Calls ``send`` once with all that is added in one turn of the event loop: for the engine that is one message."""

    def __init__(self, send: Callable[[list[T]], Coroutine[Any, Any, None]]) -> None:
        self._send = send
        self._added: dict[T, None] = {}
        self._sending: set[asyncio.Task[None]] = set()  # the event loop itself keeps weak references only

    def add(self, one: T) -> None:
        if not self._added:
            asyncio.get_running_loop().call_soon(self._begin)
        self._added[one] = None

    def _begin(self) -> None:
        added, self._added = [*self._added], {}
        task = asyncio.get_running_loop().create_task(self._send(added))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
