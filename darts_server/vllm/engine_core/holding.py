"""Hold the outputs of requests in the engine's process until they are read, so that the API process pays per request.

vLLM sends every token of every request to the API process as soon as it is sampled. Each token costs the API process 25
to 40 us, although most tokens are not read before their request finishes. So a request whose caller reads only its
final output is *held*. Its first token is sent at once, with the log-probs of its prompt and vLLM's times. Its other
tokens are sent in one output when it finishes or is aborted, or in parts of some hundred tokens: then no turn of the
event loop has much work with one output, and no more tokens than these are lost with an engine. In between, the engine
reports how many tokens each request has.

The code of this file runs in the thread of the engine's process that sends outputs. The counterpart in the API process
is `darts_server.vllm.requests.held`. The engine answers an abort of a held request with all tokens that it has
generated, because no other process has them. If somebody starts to read a held request, as a stream of its tokens, the
request is released: from then on its tokens are sent as they are sampled.
"""

import os
import queue
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.outputs import LogprobsLists

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

Step = tuple[int, float, int]


class Report(EngineCoreOutputs, array_like=True, omit_defaults=True, gc=False):
    """vLLM's message with what the engine holds; vLLM's decoder reads it as its own.

    ``numbers``: int64 of each request, ``counts``: int32, its tokens so far; both empty while none are due. ``steps``:
    since the last ones, see `StepListener`. ``kept``: by how many more tokens are kept than at the last message.
    """

    numbers: bytes = b""
    counts: bytes = b""
    steps: tuple[Step, ...] = ()
    kept: int = 0


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
