"""Hold the outputs of requests in the engine's process until they are read, so that the API process pays per request.

vLLM sends every token to the API process as soon as it is sampled, which costs that process 25 to 40 us. So a request
whose caller reads only its final output is *held*. Its first token is sent at once, with the log-probs of its prompt
and vLLM's times. Its other tokens stay in a buffer until the request ends, or some hundred have gathered: they are
little work for a turn of the event loop, and a lost engine loses no more. In between, the engine reports token counts.

This code runs in the engine's thread that sends outputs. In the API process, `darts_server.vllm.requests.held` numbers
the requests. The engine answers an abort of a numbered request with all of its tokens. When a caller starts to read a
held request as a stream, it is released: its tokens are sent as they are sampled.
"""

import os
import queue
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from math import inf
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.outputs import LogprobsLists

NUMBER = "darts_number"
"""Key in ``extra_args`` of a request's number: positive if the request is held, and negative if not."""
NOT_HELD = "darts_not_held"
"""Key in ``extra_args`` of requests whose tokens are read while they are generated."""
RELEASE = "darts_release"
"""Name of the engine's method that releases requests."""
DRAFTS = "darts_drafts"
"""Attribute of the output of a step of our drafter: vLLM's message with the drafts, and `DraftTotals`."""
RANK = "DARTS_ENGINE_RANK"
"""Environment variable with the rank of an engine in a fleet, which its vLLM does not know."""

# The API process looks at counts at twice this interval. While a count is late, tokens are generated for nothing.
REPORT_SECONDS = 0.01
# vLLM's API process spends .1 ms on each message with statistics, so reports of counts alone have them this seldom.
STATS_SECONDS = 0.1
MIN_BUFFER_TOKENS = 256

# Fields of vLLM's ``SchedulerStats`` that no later message repeats.
STEP_STATS = (
    "kv_cache_eviction_events",
    "iteration_details",
    "spec_decoding_stats",
    "kv_connector_stats",
    "ec_connector_stats",
    "cudagraph_stats",
    "perf_stats",
)
# Fields of an output that `Buffer.flush_into` cannot join.
UNJOINABLE_FIELDS = (
    "routed_experts",
    "new_sampling_mask",
    "pooling_output",
    "kv_transfer_params",
    "ec_transfer_params",
)

Step = tuple[int, float, int]
"""Number of sequences that got a token, seconds, and number of first tokens of a decode step."""
DraftTotals = tuple[int, ...]
"""Drafted tokens by the counts of the prompt and by the counts of all prompts, then accepted tokens."""
NO_DRAFTS: DraftTotals = (0, 0, 0, 0)


# With `array_like` as in the base class, vLLM's decoder of `EngineCoreOutputs` ignores the fields at the end.
class Report(EngineCoreOutputs, array_like=True, omit_defaults=True, gc=False):
    """vLLM's message, with additional fields about held requests.

    ``numbers``: int64 array of requests' numbers. ``counts``: int32 array of their tokens so far. ``steps``: decode
    steps since the previous counts. ``buffered``: change of the number of buffered tokens since the previous message.
    ``drafts``: drafts since the previous counts.
    """

    numbers: bytes = b""
    counts: bytes = b""
    steps: tuple[Step, ...] = ()
    buffered: int = 0
    drafts: DraftTotals = NO_DRAFTS


class Begin(NamedTuple):
    """A request, announced in the queue before its outputs."""

    request_id: str
    number: int
    is_held: bool


class Release(NamedTuple):
    request_ids: Sequence[str]


class Buffer:
    """The unsent tokens of one numbered request. ``generated_tokens``: number of all of its tokens, sent or not."""

    __slots__ = ("_events", "_logprobs", "_nans", "generated_tokens", "is_held", "limit", "number", "unsent_tokens")

    def __init__(self, number: int, is_held: bool) -> None:
        self.number = number
        self.is_held = is_held
        self.generated_tokens = 0
        self.limit = buffer_limit(number)
        self._clear()

    def _clear(self) -> None:
        self.unsent_tokens: list[int] = []
        self._logprobs: list[LogprobsLists] = []
        self._events: list[Any] = []
        self._nans = 0

    def add(self, output: EngineCoreOutput) -> None:
        self.unsent_tokens += output.new_token_ids
        logprobs = output.new_logprobs
        if logprobs is not None:
            # Copy: these may be views of a whole step's arrays, in memory that later steps reuse.
            self._logprobs.append(
                LogprobsLists(
                    logprobs.logprob_token_ids.copy(),
                    logprobs.logprobs.copy(),
                    logprobs.sampled_token_ranks.copy(),
                )
            )
        if output.events:
            self._events += output.events
        self._nans += output.num_nans_in_logits

    def flush_into(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Move all buffered tokens into ``output``, before its own tokens, and return it."""
        self.add(output)
        output.new_token_ids = self.unsent_tokens
        output.new_logprobs = None
        steps = self._logprobs
        if steps:
            # vLLM's arrays are as wide as the request of the step that wants most log-probs.
            width = min(step.logprobs.shape[1] for step in steps)
            output.new_logprobs = LogprobsLists(
                np.concatenate([step.logprob_token_ids[:, :width] for step in steps]),
                np.concatenate([step.logprobs[:, :width] for step in steps]),
                np.concatenate([step.sampled_token_ranks for step in steps]),
            )
        output.events = self._events or None
        output.num_nans_in_logits = self._nans
        self._clear()
        return output


def buffer_limit(number: int) -> int:
    """Return the number of tokens at which the buffer of a request is sent: from 256 to 511."""
    # Requests that begin together have successive numbers. With different limits they are not sent in the same step.
    return MIN_BUFFER_TOKENS + (7 * number) % MIN_BUFFER_TOKENS


class HoldingQueue:
    """vLLM's queue of messages to its clients, without held outputs. ``clock``: monotonic seconds."""

    def __init__(self, messages: "queue.Queue[Any]", clock: Callable[[], float] = time.monotonic) -> None:
        self._messages = messages
        self._clock = clock
        self._outbox: deque[tuple[int, EngineCoreOutputs]] = deque()
        self._buffers: dict[str, Buffer] = {}
        self._unreported_steps: list[Step] = []
        # Below 0 after a flush.
        self._buffered_change = 0
        self._reported_drafts = NO_DRAFTS
        self.draft_totals = NO_DRAFTS
        """Totals since the start. The engine's main thread sets them."""
        self._last_step_at = -inf
        self._counts_sent_at = -inf
        self._stats_sent_at = -inf

    def get(self) -> Any:
        while not self._outbox:
            item = self._messages.get()
            # vLLM queues a byte string when the engine dies, and the client index -1 for messages to its coordinator.
            if isinstance(item, bytes) or item[0] < 0:
                return item
            client, message = item
            self._outbox.extend((client, report) for report in self.process_message(message))
        return self._outbox.popleft()

    def __getattr__(self, name: str) -> Any:
        # vLLM calls other methods of its queue, too.
        return getattr(self._messages, name)

    def process_message(self, message: Any) -> list[EngineCoreOutputs]:
        """Apply a message of the engine, and return the messages that are sent now."""
        if isinstance(message, Begin):
            self._buffers[message.request_id] = Buffer(message.number, message.is_held)
            return []
        if isinstance(message, Release):
            return self._release(message.request_ids)
        if message.utility_output is not None:
            if not self._buffers:
                return [message]
            # The answer to a call, such as a pause, must follow the counts of all tokens that were generated before it.
            return [self._make_report(EngineCoreOutputs(), with_counts=True), message]

        must_be_sent = has_more_than_outputs(message)
        message.outputs = self._hold_outputs(message)
        now = self._clock()
        # The end of a candidate often decides which of its siblings are stopped, by their counts.
        has_end = any(output.finish_reason is not None for output in message.outputs)
        counts_are_due = has_end or now >= self._counts_sent_at + REPORT_SECONDS
        if not (counts_are_due or message.outputs or must_be_sent):
            return []
        if message.outputs or must_be_sent or now >= self._stats_sent_at + STATS_SECONDS:
            self._stats_sent_at = now
        else:
            # The statistics are only gauges, which the next message replaces.
            message.scheduler_stats = None
        return [self._make_report(message, with_counts=counts_are_due)]

    def _hold_outputs(self, message: EngineCoreOutputs) -> list[EngineCoreOutput]:
        """Buffer outputs of held requests, and return the outputs that are sent now."""
        decoded_sequences = 0
        first_tokens = 0
        step_tokens = 0
        sent = []
        for output in message.outputs:
            new_tokens = len(output.new_token_ids)
            if new_tokens:
                decoded_sequences += 1
                step_tokens += new_tokens
            # vLLM sends these statistics with the first token.
            if output.prefill_stats is not None:
                first_tokens += 1
            buffer = self._buffers.get(output.request_id)
            if buffer is None:
                # With drafts too, vLLM must search for stop strings after each token.
                sent += split_tokens(output)
                continue

            is_first = buffer.generated_tokens == 0
            buffer.generated_tokens += new_tokens
            # A request that has such a field before its end has it in its first output.
            if is_first and any(getattr(output, name) is not None for name in UNJOINABLE_FIELDS):
                buffer.is_held = False

            # The first and the last tokens of a request are sent, and all tokens of a request that is not held.
            if output.finish_reason is not None:
                del self._buffers[output.request_id]
            elif not buffer.is_held:
                sent += split_tokens(output)
                continue
            elif is_first:
                sent.append(output)
                continue
            elif len(buffer.unsent_tokens) < buffer.limit:
                buffer.add(output)
                self._buffered_change += new_tokens
                continue
            # The request has ended, or its buffer is full.
            self._buffered_change -= len(buffer.unsent_tokens)
            joined = buffer.flush_into(output)
            if buffer.is_held:
                sent.append(joined)
            else:
                sent += split_tokens(joined)

        if decoded_sequences:
            seconds = message.timestamp - self._last_step_at
            self._last_step_at = message.timestamp
            # A step of first tokens only is a prefill, which has no decode time.
            if first_tokens < decoded_sequences and 0 < seconds < inf:
                # With drafts a step has several tokens of a sequence. Its time counts for each token of a sequence.
                token_seconds = seconds * decoded_sequences / step_tokens
                self._unreported_steps.append((decoded_sequences, token_seconds, first_tokens))
        return sent

    def _release(self, request_ids: Iterable[str]) -> list[EngineCoreOutputs]:
        outputs = []
        for request_id in request_ids:
            buffer = self._buffers.get(request_id)
            # The request has ended, or another engine runs it.
            if buffer is None:
                continue
            buffer.is_held = False
            if buffer.unsent_tokens:
                self._buffered_change -= len(buffer.unsent_tokens)
                outputs.append(buffer.flush_into(EngineCoreOutput(request_id, [])))
        return [self._make_report(EngineCoreOutputs(outputs=outputs), with_counts=False)]

    def _make_report(self, message: EngineCoreOutputs, with_counts: bool) -> Report:
        report = Report(**structs.asdict(message), buffered=self._buffered_change)
        self._buffered_change = 0
        if with_counts:
            self._counts_sent_at = self._clock()
            held = [buffer for buffer in self._buffers.values() if buffer.is_held]
            report.numbers = array("q", [buffer.number for buffer in held]).tobytes()
            report.counts = array("i", [buffer.generated_tokens for buffer in held]).tobytes()
            report.steps = tuple(self._unreported_steps)
            self._unreported_steps = []
            # Read once, because another thread replaces the totals.
            totals = self.draft_totals
            report.drafts = tuple(now - before for now, before in zip(totals, self._reported_drafts, strict=True))
            self._reported_drafts = totals
        return report


def split_tokens(output: EngineCoreOutput) -> list[EngineCoreOutput]:
    """Split an output of several tokens, as drafts make them, into an output for each token."""
    # vLLM searches for stop strings after each output, and would return later tokens of the same output.
    # These arrays have rows for several tokens, and are not split.
    has_token_rows = output.routed_experts is not None or output.new_sampling_mask is not None
    if len(output.new_token_ids) < 2 or has_token_rows:
        return [output]
    parts = []
    for place, token in enumerate(output.new_token_ids):
        part = EngineCoreOutput(output.request_id, [token])
        if output.new_logprobs is not None:
            part.new_logprobs = output.new_logprobs.slice_request(place, 1)
        parts.append(part)

    first = parts[0]
    first.new_prompt_logprobs_tensors = output.new_prompt_logprobs_tensors
    first.prefill_stats = output.prefill_stats
    first.events = output.events
    # The last output has everything that belongs to the end of a step.
    last = copy(output)
    last.new_token_ids = parts[-1].new_token_ids
    last.new_logprobs = parts[-1].new_logprobs
    last.new_prompt_logprobs_tensors = None
    last.prefill_stats = None
    last.events = None
    return [*parts[:-1], last]


def has_more_than_outputs(message: EngineCoreOutputs) -> bool:
    """Return whether a message has more than outputs, and more than gauges that the next message replaces."""
    # Without outputs, all requests were aborted: this may be the last message for a long time.
    if not message.outputs:
        return True
    if message.finished_requests or message.wave_complete is not None or message.start_wave is not None:
        return True
    stats = message.scheduler_stats
    if stats is None:
        return False
    # Counts of the prefix cache since the previous message.
    if stats.prefix_cache_stats.requests:
        return True
    connector_stats = stats.connector_prefix_cache_stats
    if connector_stats is not None and connector_stats.requests:
        return True
    return any(getattr(stats, name) for name in STEP_STATS)


def hold_outputs(engine_class: Any) -> None:
    """Change vLLM's class ``EngineCoreProc``, once: it holds outputs, answers aborts, and has the method `RELEASE`."""
    if hasattr(engine_class, RELEASE):
        return
    vllms_add = engine_class.preprocess_add_request
    vllms_abort = engine_class.abort_requests
    vllms_send = engine_class.process_output_sockets

    def preprocess_add_request(self: Any, request: EngineCoreRequest) -> Any:
        number = request_number(request.sampling_params)
        if number:
            # The input thread runs this before the scheduler sees the request, so this precedes all outputs.
            begin = Begin(request.request_id, abs(number), is_held=number > 0)
            self.output_queue.put_nowait((request.client_index, begin))
        return vllms_add(self, request)

    def abort_requests(self: Any, request_ids: list[str]) -> None:
        running = [self.scheduler.requests.get(request_id) for request_id in request_ids]
        vllms_abort(self, request_ids)
        # vLLM does not answer aborts by clients.
        self._send_abort_outputs(
            [request for request in running if request is not None and request_number(request.sampling_params)]
        )

    def process_output_sockets(self: Any, clients: Any, coordinator: Any, engine_index: int) -> None:
        holding_queue = HoldingQueue(self.output_queue)
        _take_drafts_from_outputs(self.scheduler, self.model_executor, holding_queue)
        self.output_queue = holding_queue
        vllms_send(self, clients, coordinator, int(os.environ.get(RANK, engine_index)))

    def release(self: Any, client: int, request_ids: list[str]) -> None:
        self.output_queue.put_nowait((client, Release(request_ids)))

    engine_class.preprocess_add_request = preprocess_add_request
    engine_class.abort_requests = abort_requests
    engine_class.process_output_sockets = process_output_sockets
    setattr(engine_class, RELEASE, release)


def _take_drafts_from_outputs(scheduler: Any, executor: Any, holding_queue: HoldingQueue) -> None:
    vllms_update = scheduler.update_from_output
    take_from_worker = executor.take_draft_token_ids
    # The drafts of the latest step, until the engine takes them.
    untaken_drafts: list[Any] = []

    def update_from_output(scheduler_output: Any, output: Any) -> Any:
        step_drafts = getattr(output, DRAFTS, None)
        if step_drafts is not None:
            drafts, holding_queue.draft_totals = step_drafts
            untaken_drafts[:] = [drafts]
        return vllms_update(scheduler_output, output)

    def take_draft_token_ids() -> Any:
        # A call of a worker in another process took a fifth of a small step.
        return untaken_drafts.pop() if untaken_drafts else take_from_worker()

    scheduler.update_from_output = update_from_output
    executor.take_draft_token_ids = take_draft_token_ids


def request_number(params: Any) -> int:
    if params is None or not params.extra_args:
        return 0
    number: int = params.extra_args.get(NUMBER, 0)
    return number
