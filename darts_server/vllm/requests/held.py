"""The requests that engines hold, from the API process: their token counts, aborts, releases and metrics.

A numbered request is held unless its tokens are read while it runs. See `darts_server.vllm.engine_core.holding`.
"""

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from copy import copy
from functools import partial
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.serial_utils import MsgpackDecoder

from darts_server.vllm.engine_core.holding import NO_DRAFTS, NOT_HELD, NUMBER, RELEASE, Report
from darts_server.vllm.requests.adding import added_candidate
from darts_server.vllm.requests.outputs import CachingTokenizer, DeferredOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")
StepListener = Callable[[int, float, int], None]
"""Called with each decode step: number of sequences that got a token, seconds, and number of first tokens."""


class NumberedRequest(NamedTuple):
    """The number of a request. ``prior_tokens``: generated before it was sent, so its engine does not count them."""

    number: int
    prior_tokens: int
    is_candidate: bool


class HeldRequests:
    """Changes vLLM's client, output processor and loggers."""

    def __init__(self, engine_core: Any, processor: OutputProcessor, loggers: Any) -> None:
        self.on_step: StepListener | None = None
        self.received_messages = 0
        self.decode_steps = 0
        self.draft_totals = NO_DRAFTS
        self.states = processor.request_states
        self.tokenizer = CachingTokenizer(processor.tokenizer)
        self._core = engine_core
        self._internal_ids = processor.external_req_ids
        self._numbers = count(1)
        # Tokens that engines have generated for each numbered request since it was sent.
        self._generated: dict[int, int] = {}
        # Buffered tokens of each engine that vLLM's loggers have not counted yet.
        self._unlogged_tokens = Counter[int]()
        self._releases = OncePerTurn(self._send_releases)
        # vLLM shares cached blocks among requests of the same salt.
        self._salt_prefix = ""
        self._salt_numbers = count(1)

        # Replace methods of objects, not of classes. vLLM's task that receives outputs refers to the decoder already.
        decoder: Any = engine_core.decoder
        self._decode_report = MsgpackDecoder(Report, oob_tensor_provider=decoder.oob_tensor_provider).decode
        decoder.decode = self._decode
        self._vllm_add_request = engine_core.add_request_async
        engine_core.add_request_async = self._add_numbered

        changed: Any = processor
        self._vllm_abort_requests = processor.abort_requests
        changed.abort_requests = self._abort
        self._vllm_update_stats = processor._update_stats_from_output
        changed._update_stats_from_output = self._update_stats
        if loggers is not None:
            self._vllm_record = loggers.record
            loggers.record = self._record_with_buffered

    def count_tokens(self, request_id: str) -> int | None:
        """Return a request's number of generated tokens, or None once its final output has arrived."""
        state = self.states.get(request_id)
        if state is None or state.detokenizer is None:
            return None
        received = state.detokenizer.num_output_tokens()
        numbered = numbered_request_of(state)
        if numbered is None:
            return received
        # Engines report the number of held tokens before they send them.
        return max(received, numbered.prior_tokens + self._generated.get(numbered.number, 0))

    def release(self, request_id: str) -> None:
        """Let the engine send tokens as they are generated."""
        self._releases.add(request_id)

    def change_cache_salt(self) -> None:
        self._salt_prefix = f"darts-caches-{next(self._salt_numbers)}/"

    async def _send_releases(self, request_ids: list[str]) -> None:
        # Each engine ignores the requests of the others.
        call = partial(self._core._call_utility_async, RELEASE, self._core.client_index, request_ids)
        calls = [call(engine=engine) for engine in self._core.core_engines]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            # A dead engine ends all of its requests anyway.
            if isinstance(answer, Exception):
                logger.error("an engine did not release requests: %s", answer)

    def _decode(self, frames: Any) -> Report:
        """Stand in for vLLM's decoder."""
        report: Report = self._decode_report(frames)
        self.received_messages += 1
        self.decode_steps += len(report.steps)
        self.draft_totals = tuple(total + new for total, new in zip(self.draft_totals, report.drafts, strict=True))
        self._unlogged_tokens[report.engine_index] += report.buffered
        self._generated.update(zip(array("q", report.numbers), array("i", report.counts), strict=True))
        if self.on_step is not None:
            for step in report.steps:
                self.on_step(*step)
        return report

    async def _add_numbered(self, request: EngineCoreRequest) -> None:
        """Stand in for vLLM's ``add_request_async``."""
        salt = request.cache_salt or ""
        # A request that is sent again has the prefix already.
        if not salt.startswith(self._salt_prefix):
            request.cache_salt = self._salt_prefix + salt
        params = request.sampling_params
        state = self.states.get(request.request_id)
        is_final_only = params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY
        if params is None or state is None or not is_final_only or request.resumable:
            await self._vllm_add_request(request)
            return

        is_candidate = False
        numbered = numbered_request_of(state)
        candidate = added_candidate.get()
        if numbered is not None:
            # The request is sent again, because its engine was lost.
            self._generated.pop(numbered.number, None)
        elif candidate is not None and candidate.change is not None:
            # The first output may arrive before `AsyncLLM.add_request` returns.
            candidate.change(request, state)
            # Tasks of vLLM that start meanwhile keep this context, and their requests are no candidates.
            candidate.change = None
            is_candidate = True
        else:
            DeferredOutput(self.tokenizer, params).start_collecting(request, state)

        number = next(self._numbers)
        prior_tokens = 0 if state.detokenizer is None else state.detokenizer.num_output_tokens()
        setattr(state, NUMBER, NumberedRequest(number, prior_tokens, is_candidate))
        extra_args = params.extra_args or {}
        if params.stop or NOT_HELD in extra_args:
            # A negative number: the engine does not hold the tokens, because this process reads them as they arrive.
            number = -number
        # Other requests may have the same object.
        request.sampling_params = copy(params)
        request.sampling_params.extra_args = {**extra_args, NUMBER: number}
        try:
            await self._vllm_add_request(request)
        except BaseException:
            # No engine has the request, so no engine answers its abort.
            setattr(state, NUMBER, None)
            raise

    def _abort(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """Stand in for vLLM's ``abort_requests``, and return the ids that engines must abort."""
        ids = list(request_ids)
        if not internal:
            ids = [internal_id for name in ids for internal_id in self._internal_ids.get(name, ())]
        numbered = []
        others = []
        # vLLM raises if an id comes twice.
        for request_id in dict.fromkeys(ids):
            if numbered_request_of(self.states.get(request_id)) is None:
                others.append(request_id)
            else:
                numbered.append(request_id)
        # vLLM ends requests in its method, but the engine answers the abort of a numbered request with its tokens. vLLM
        # calls this method again for the children of a request.
        return numbered + self._vllm_abort_requests(others, True)

    def _update_stats(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        timestamp: Any,
        stats: Any,
    ) -> None:
        """Stand in for vLLM's ``_update_stats_from_output``, which assumes one token in each output."""
        numbered = numbered_request_of(state)
        if numbered is None:
            self._vllm_update_stats(state, output, timestamp, stats)
            return
        if output.finish_reason is not None:
            self._generated.pop(numbered.number, None)
        if output.finish_reason == FinishReason.ABORT and state.is_prefilling:
            # The request has no first token, and so no times.
            return

        recorded_before = 0 if stats is None else len(stats.inter_token_latencies_iter)
        self._vllm_update_stats(state, output, timestamp, stats)
        if stats is not None and len(stats.inter_token_latencies_iter) > recorded_before:
            # vLLM has recorded the time since the previous output as one token's.
            seconds_since_output = stats.inter_token_latencies_iter.pop()
            tokens = len(output.new_token_ids)
            if tokens:
                stats.inter_token_latencies_iter.append(seconds_since_output / tokens)

    def _record_with_buffered(
        self,
        *,
        iteration_stats: IterationStats | None = None,
        engine_idx: int = 0,
        **options: Any,
    ) -> None:
        """Stand in for vLLM's ``record``."""
        # Count tokens when they enter the engine's buffer. When they arrive, vLLM counts them, so they are subtracted.
        unlogged = self._unlogged_tokens[engine_idx]
        if unlogged:
            if iteration_stats is None:
                iteration_stats = IterationStats()
            tokens = iteration_stats.num_generation_tokens + unlogged
            iteration_stats.num_generation_tokens = max(0, tokens)
            # Below zero if a message that empties a buffer was decoded, and its outputs were not processed yet.
            self._unlogged_tokens[engine_idx] = min(0, tokens)
        self._vllm_record(
            iteration_stats=iteration_stats,
            engine_idx=engine_idx,
            **options,
        )


def numbered_request_of(state: RequestState | None) -> NumberedRequest | None:
    return getattr(state, NUMBER, None)


class OncePerTurn(Generic[T]):
    """Sends everything that is added in one turn of the event loop at once."""

    def __init__(self, send: Callable[[list[T]], Coroutine[Any, Any, None]]) -> None:
        self._send = send
        # A dictionary as a set in the order of addition.
        self._added: dict[T, None] = {}
        # The event loop itself keeps only weak references to tasks.
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, item: T) -> None:
        # The call runs in the loop's next turn, and everything that this turn adds comes with it.
        if not self._added:
            asyncio.get_running_loop().call_soon(self._start_sending)
        self._added[item] = None

    def _start_sending(self) -> None:
        added = list(self._added)
        self._added = {}
        task = asyncio.get_running_loop().create_task(self._send(added))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
