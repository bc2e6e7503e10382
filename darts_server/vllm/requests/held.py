"""The requests that engines hold, as the API process sees them: how many tokens they have, their aborts, their metrics.

`darts_server.vllm.engine_core.holding` says what holding is, and runs in the engine's process.
"""

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import partial
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.serial_utils import MsgpackDecoder

from darts_server.vllm.engine_core.holding import ARGUMENT, PASSED_ON, RELEASE, Report

logger = logging.getLogger(__name__)

T = TypeVar("T")
StepListener = Callable[[int, float, int], None]
"""Gets how many sequences got a token in a step, its seconds, and for how many of them the token was the first."""


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
