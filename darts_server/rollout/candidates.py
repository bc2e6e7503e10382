import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

from darts_server.engine.port import NO_TOKENS, CandidateResult, OutputT, RequestT, RunningCandidate, TokenSlice
from darts_server.exceptions import CandidateFailed, EngineError, InvalidRequest
from darts_server.group.candidate import Candidate
from darts_server.group.events import Event, Failed, Finished, Lost, Progress, Scored, Started
from darts_server.group.group import Group
from darts_server.records import VersionSpans, extend_spans
from darts_server.rollout.pruning.group_scorer import GroupScorer
from darts_server.rollout.spec import GroupContext, GroupSpec, OnAbort
from darts_server.rollout.start_queue import StartingOrder
from darts_server.serving.admission import Ticket
from darts_server.types import GONE, FinishReason


@dataclass(frozen=True, slots=True)
class SavedEnd:
    """The end of a candidate, for the disk. The engine's own output is not saved."""

    finish_reason: FinishReason
    text: str


@dataclass(frozen=True, slots=True)
class CarriedCandidate(Generic[OutputT]):
    """A candidate of a stopped group, which another group resumes."""

    prefix: TokenSlice = NO_TOKENS
    version_spans: VersionSpans = ()
    result: CandidateResult[OutputT] | None = None
    """Set if the candidate has finished on this engine."""
    saved_end: SavedEnd | None = None
    """Set if the candidate has finished on an earlier engine."""

    @property
    def tokens(self) -> int:
        return len(self.prefix.token_ids)

    @property
    def last_version(self) -> int | None:
        return self.version_spans[-1][0] if self.version_spans else None


NEW: CarriedCandidate[Any] = CarriedCandidate()
"""A candidate without carried tokens."""

NOTHING_DUE = 1 << 60
"""`CandidateRunner.tokens_until_check` if no candidate has to report its progress."""
MAX_TRIES = 100
"""Replacements of a cut candidate whose engine died before it sent the tokens."""
REPLACEMENT_POLL_SECONDS = 0.02
"""About one step of an engine: a replacement generates one or two tokens beyond the cut."""


def copy_to_arrays(tokens: TokenSlice) -> TokenSlice:
    # Lists take several times the memory.
    logprobs = None if tokens.logprobs is None else array("d", tokens.logprobs)
    return TokenSlice(array("i", tokens.token_ids), logprobs)


@dataclass(slots=True)
class CandidateHistory:
    started_at: float | None = None
    ended_at: float | None = None
    stopped_tokens: int = 0
    version_start: int | None = None
    version_end: int | None = None
    earlier_spans: VersionSpans = ()
    """Versions of tokens before the last change of weights."""
    resumed: int = 0

    def mark_started(self, now: float, weight_version: int, carried: CarriedCandidate[OutputT]) -> None:
        self.started_at = now
        self.earlier_spans = carried.version_spans
        self.version_start = carried.version_spans[0][0] if carried.version_spans else weight_version
        self.resumed = carried.tokens

    def version_spans(self, tokens: int, weight_version: int) -> VersionSpans:
        """``weight_version``: present version, for a candidate that still runs."""
        if self.version_start is None:
            return ()
        version = weight_version if self.version_end is None else self.version_end
        return extend_spans(self.earlier_spans, version, tokens)


@dataclass(slots=True, eq=False)
class CandidateRun(Generic[RequestT, OutputT]):
    state: Candidate
    request: RequestT
    has_own_request: bool
    number: int
    """Index among candidates of the same request."""
    carried: CarriedCandidate[OutputT]
    output: asyncio.Future[OutputT]
    result: CandidateResult[OutputT] | None = None
    """Set in groups that may be carried over."""
    aborted: bool = False
    """Whether the aborted group returns the partial output."""
    aborting_callers: list[asyncio.Future[OutputT]] = field(default_factory=list)
    """Callers that have aborted this request alone, and wait for the partial output."""
    is_streamed: bool = False
    """Whether tokens were read before the end."""
    tokens_at_stop: int | None = None
    """Number of tokens at the stop or end on the engine."""
    history: CandidateHistory = field(default_factory=CandidateHistory)


class CandidateRunner(Generic[RequestT, OutputT]):
    """Runs the candidates of a group on the engine, each in a task of its own.

    After a discard, changes are recorded, but are no events.

    Args:
        ticket, carried: see `GroupRun`.
        group: only read here.
        on_bug: called with an error that does not come from the engine.
    """

    def __init__(
        self,
        context: GroupContext[RequestT, OutputT],
        spec: GroupSpec[RequestT],
        owner: str | None,
        group: Group,
        ticket: Ticket,
        on_events: Callable[..., None],
        on_bug: Callable[[Exception], None],
        carried: Sequence[CarriedCandidate[OutputT]],
        starting_order: StartingOrder,
    ) -> None:
        self.candidates: list[CandidateRun[RequestT, OutputT]] = []
        self.running: dict[int, RunningCandidate[OutputT]] = {}
        """Candidates by index. Stopped candidates stay until the engine has answered."""
        self.finish_times: list[float] = []
        """Times since the last restart."""
        self.own_requests: deque[RequestT] = deque()
        """Requests of the next candidates, in place of the group's request."""
        self.carried = list(reversed(carried))
        """Tokens that the next candidates resume from, in reverse order."""
        self.tokens_until_check = NOTHING_DUE
        """Fewest tokens that a candidate needed at the last `poll` to reach its `Group.check_at`."""
        self.scorer: GroupScorer | None = None
        pruning = spec.plan.shaping.pruning
        if pruning is not None:
            assert context.scorer is not None
            self.scorer = GroupScorer(context.scorer, (owner, spec.group_id), pruning, self.running, on_events)
        self._engine = context.engine
        self._start_queue = context.start_queue
        self._first_round = spec.first_round
        self._group_id = spec.group_id
        self._clock = context.clock
        self._request = spec.request
        self._keeps_results = spec.on_abort is OnAbort.CARRY
        self._group = group
        self._ticket = ticket
        self._starting_order = starting_order
        self._on_events = on_events
        self._on_bug = on_bug
        # Kept tokens of candidates that were cut before they had an output, by index.
        self._cut_lengths: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- all candidates -----------------------------------------------------

    def start(self, indices: Iterable[int]) -> None:
        loop = asyncio.get_running_loop()
        for index in indices:
            assert index == len(self.candidates), "decisions to start are carried out in their order"
            carried = self.carried.pop() if self.carried else NEW
            has_own_request = bool(self.own_requests)
            candidate = CandidateRun(
                state=self._group.candidates[index],
                request=self.own_requests.popleft() if has_own_request else self._request,
                has_own_request=has_own_request,
                # The engine derives the candidate's seed from this number.
                number=0 if has_own_request else index,
                carried=carried,
                output=loop.create_future(),
            )
            self.candidates.append(candidate)
            task = loop.create_task(self._run(candidate))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def poll(self) -> list[Progress | Scored]:
        """Return new scores, and the progress of candidates that have reached their `Group.check_at`."""
        events: list[Progress | Scored] = []
        self.tokens_until_check = NOTHING_DUE
        for index, check_at in self._group.check_at.items():
            tokens = None
            if index in self.running:
                tokens = self.running[index].count_tokens()
            if tokens is not None and tokens >= check_at:
                events.append(Progress(index, tokens))
            self.tokens_until_check = min(self.tokens_until_check, check_at - (tokens or 0))
        if self.scorer is not None:
            events += self.scorer.poll()
        return events

    def prepare_restart(self) -> None:
        """Keep requests for the next candidates, and drop carried tokens."""
        self.own_requests.extend(c.request for c in self.candidates if c.state.is_alive and c.has_own_request)
        self.finish_times.clear()
        # Carried tokens may be too old for the new weights.
        self.carried.clear()
        for candidate in self.candidates:
            candidate.carried = NEW

    def record_weight_version(self) -> None:
        for index, running in self.running.items():
            tokens = running.count_tokens()
            if tokens is not None:
                history = self.candidates[index].history
                history.earlier_spans = extend_spans(history.earlier_spans, self._engine.weight_version, tokens)

    # --- outputs and tokens -------------------------------------------------

    def count_tokens(self, index: int) -> int:
        """Return the number of generated tokens, or of kept tokens after a cut."""
        candidate = self.candidates[index]
        running = self.running.get(index)
        tokens = None
        if running is not None and candidate.state.is_running:
            tokens = running.count_tokens()
        if tokens is None:
            # The candidate does not run, or the engine no longer knows its tokens.
            tokens = max(candidate.state.tokens, candidate.history.stopped_tokens)
        if candidate.state.cut:
            return tokens
        # The engine may not have reported the carried tokens yet.
        return max(tokens, candidate.history.resumed)

    def read_tokens(self, index: int, start: int) -> TokenSlice | None:
        """Return the tokens from ``start`` on.

        None if the candidate failed or was stopped, or while it has not started or its output is being read.
        """
        candidate = self.candidates[index]
        if candidate.output.done():
            if candidate.output.exception() is not None:
                return None
            return self._engine.tokens_from(candidate.output.result(), start)
        running = self.running.get(index)
        if running is None or not candidate.state.is_running:
            return None
        generated = running.tokens_from(start)
        if generated is None:
            return None
        candidate.is_streamed = True
        if generated.logprobs_requested:
            return generated
        # The log-probs were computed for a score only.
        return replace(generated, logprobs=None)

    async def collect_carried(self) -> list[CarriedCandidate[OutputT]]:
        # The engine still returns the tokens up to the stop.
        if self._tasks:
            await asyncio.wait(self._tasks)
        carried_candidates: list[CarriedCandidate[OutputT]] = []
        for candidate in self.candidates[self._group.restarted_from :]:
            # Failed and aborted candidates cannot be resumed.
            if candidate.state.reason in GONE:
                continue
            carried = candidate.carried
            result = candidate.result
            # A candidate that never reached the engine keeps its carried tokens.
            if result is not None:
                carried = CarriedCandidate(
                    prefix=copy_to_arrays(self._engine.tokens_from(result.output, 0)),
                    version_spans=candidate.history.version_spans(result.tokens, self._engine.weight_version),
                    result=None if result.finish_reason is None else result,
                )
            carried_candidates.append(carried)
        return carried_candidates

    # --- stopping a candidate -----------------------------------------------

    def stop(self, index: int) -> None:
        if self.scorer is not None:
            self.scorer.drop(index)
        if index in self.running:
            candidate = self.candidates[index]
            candidate.history.stopped_tokens = self._stop_on_engine(candidate)
            candidate.history.ended_at = self._clock()
            candidate.history.version_end = self._engine.weight_version

    def cut(self, index: int, tokens: int) -> None:
        """Keep the first ``tokens`` tokens of a candidate, and stop it if it runs."""
        candidate = self.candidates[index]
        if not candidate.output.done():
            # `_handle_result` truncates the output of a running candidate.
            if index not in self._cut_lengths:
                self._stop_on_engine(candidate)
                candidate.history.ended_at = candidate.history.ended_at or self._clock()
                candidate.history.version_end = self._engine.weight_version
            self._cut_lengths[index] = tokens
        elif candidate.output.exception() is None:
            output = self._engine.truncate(candidate.request, candidate.output.result(), tokens)
            candidate.output = asyncio.get_running_loop().create_future()
            candidate.output.set_result(output)

    def abort_request(self, request: RequestT, caller: asyncio.Future[OutputT]) -> None:
        """Stop a request's candidate, and give the caller the partial output.

        If the candidate no longer runs, its tokens may belong to another caller, so this caller gets no tokens.
        """
        candidate = next((c for c in reversed(self.candidates) if c.state.is_running and c.request is request), None)
        if candidate is None:
            caller.set_result(self._engine.aborted_output(request))
            return
        candidate.aborting_callers.append(caller)
        if candidate.state.index in self.running:
            self._stop_on_engine(candidate)
        else:
            # The candidate waits for its start.
            self._on_events(Lost(candidate.state.index, by_caller=True))
            self._answer_without_tokens(candidate)

    def _answer_without_tokens(self, candidate: CandidateRun[RequestT, OutputT]) -> None:
        for caller in candidate.aborting_callers:
            if not caller.done():
                caller.set_result(self._engine.aborted_output(candidate.request))

    def _stop_on_engine(self, candidate: CandidateRun[RequestT, OutputT]) -> int:
        # The engine takes one stop. The group, a caller and a limit that a carried candidate has passed may all stop
        # the candidate in the same turn of the event loop.
        if candidate.tokens_at_stop is None:
            candidate.tokens_at_stop = self.running[candidate.state.index].stop()
        return candidate.tokens_at_stop

    # --- running a candidate ------------------------------------------------

    async def _run(self, candidate: CandidateRun[RequestT, OutputT]) -> None:
        state = candidate.state
        index = state.index
        # A restart during the start replaces `candidate.carried`.
        carried = candidate.carried
        try:
            if carried.result is not None or carried.saved_end is not None:
                self._finish_carried(candidate)
                return
            try:
                if self._first_round is not None and index > 0:
                    await self._first_round.wait()
                await self._start_queue.wait_for_candidate(carried.tokens)
                # The candidate may have been stopped while it waited.
                if not state.is_running:
                    self._leave_queue(index)
                    self._return_carried_tokens(candidate)
                    return

                order = self._starting_order(carried.tokens)
                probe = None
                # A score needs all tokens, and vLLM gets carried tokens as a part of the prompt.
                if self.scorer is not None and not carried.tokens:
                    probe = self.scorer.create_probe(index)
                try:
                    running = await self._engine.start(
                        candidate.request,
                        candidate.number,
                        probe,
                        order,
                        carried.prefix,
                    )
                finally:
                    self._leave_queue(index)
                self.running[index] = running
                candidate.history.mark_started(self._clock(), self._engine.weight_version, carried)
                if state.is_running:
                    events: list[Event] = [Started(index)]
                    if carried.tokens:
                        events.append(Progress(index, carried.tokens))
                    if self.scorer is not None:
                        events += self.scorer.begin_reporting(index)
                    self._on_events(*events)
                # The candidate may have been stopped during the start, or on these events.
                if not state.is_running:
                    self._stop_on_engine(candidate)

                result = await running.result()
                # Fewer tokens than are kept: the engine was lost before it sent them.
                is_lost_after_cut = result.tokens < self._cut_lengths.get(index, 0)
                if is_lost_after_cut:
                    received = self._carry_received(candidate, result)
                    result = await self._replace_cut_candidate(candidate, received, order)
            except EngineError as error:
                # A cut candidate is in the group, and its caller waits for the output.
                if index in self._cut_lengths:
                    self._fail_output(candidate, error)
                elif candidate.aborted:
                    self._return_carried_tokens(candidate)
                elif state.is_running:
                    self._on_events(Failed(index, error, retryable=isinstance(error, CandidateFailed)))
            else:
                self._handle_result(candidate, result, self._engine.weight_version)
            finally:
                self.running.pop(index, None)
        except Exception as error:
            # A bug of ours. Nothing awaits this task.
            self._fail_output(candidate, error)
            self._on_bug(error)
        finally:
            # Callers have no answer if the candidate failed, or never reached the engine.
            self._answer_without_tokens(candidate)

    def _leave_queue(self, index: int) -> None:
        self._ticket.mark_started(candidates=1)
        if self._first_round is not None and index == 0:
            self._first_round.mark_group_started(self._group_id)

    def _carry_received(
        self,
        candidate: CandidateRun[RequestT, OutputT],
        result: CandidateResult[OutputT],
    ) -> CarriedCandidate[OutputT]:
        """Return the received tokens of a lost candidate, which its replacement continues.

        Raises:
            CandidateFailed: no other run can continue the tokens, and the caller has some of them.
        """
        try:
            self._engine.check_resumable(candidate.request)
        except InvalidRequest as error:
            if candidate.is_streamed:
                raise CandidateFailed(
                    f"the engine lost candidate {candidate.state.index} after a part of it was sent, and no other "
                    f"engine can continue it: {error}"
                ) from None
            # The replacement generates all tokens again.
            return candidate.carried
        received = copy_to_arrays(self._engine.tokens_from(result.output, 0))
        spans = candidate.history.version_spans(len(received.token_ids), self._engine.weight_version)
        return CarriedCandidate(received, spans)

    async def _replace_cut_candidate(
        self,
        candidate: CandidateRun[RequestT, OutputT],
        carried: CarriedCandidate[OutputT],
        order: float,
    ) -> CandidateResult[OutputT]:
        # A candidate that ends before the cut cannot replace the lost candidate.
        index = candidate.state.index
        for _ in range(MAX_TRIES):
            running = await self._engine.start(
                candidate.request,
                candidate.number,
                probe=None,
                order=order,
                prefix=carried.prefix,
            )
            self.running[index] = running
            candidate.tokens_at_stop = None
            candidate.history.earlier_spans = carried.version_spans
            stopping = asyncio.create_task(self._stop_at_cut(candidate, running))
            try:
                result = await running.result()
            finally:
                stopping.cancel()
            if result.tokens >= self._cut_lengths[index]:
                return result
        raise CandidateFailed(
            f"the engine lost candidate {index} after it was cut, and {MAX_TRIES} new candidates were all shorter; "
            f"send the request again"
        )

    async def _stop_at_cut(
        self,
        candidate: CandidateRun[RequestT, OutputT],
        running: RunningCandidate[OutputT],
    ) -> None:
        # `poll` does not do this, because the cut has mostly completed the group.
        while (running.count_tokens() or 0) < self._cut_lengths[candidate.state.index]:
            await asyncio.sleep(REPLACEMENT_POLL_SECONDS)
        self._stop_on_engine(candidate)

    def _finish_carried(self, candidate: CandidateRun[RequestT, OutputT]) -> None:
        """Report a candidate that had finished before its group was carried over."""
        carried = candidate.carried
        # After a restart of the server, only the saved end is known.
        result = carried.result
        end = carried.saved_end
        if end is not None:
            output = self._engine.finished_output(candidate.request, carried.prefix, end.finish_reason, end.text)
            result = CandidateResult(carried.tokens, end.finish_reason, output)
        assert result is not None

        version = self._engine.weight_version if carried.last_version is None else carried.last_version
        self._leave_queue(candidate.state.index)
        candidate.history.mark_started(self._clock(), version, carried)
        if candidate.state.is_running:
            self._on_events(Started(candidate.state.index))
        self._handle_result(candidate, result, version)

    def _handle_result(
        self,
        candidate: CandidateRun[RequestT, OutputT],
        result: CandidateResult[OutputT],
        last_token_version: int,
    ) -> None:
        state = candidate.state
        index = state.index
        history = candidate.history
        history.ended_at = history.ended_at or self._clock()
        history.version_end = last_token_version
        if candidate.tokens_at_stop is None:
            # The events below may stop the candidate, whose tokens the engine no longer knows.
            candidate.tokens_at_stop = result.tokens
        if self._keeps_results:
            candidate.result = result

        if index in self._cut_lengths:
            candidate.output.set_result(
                self._engine.truncate(candidate.request, result.output, self._cut_lengths[index])
            )
        elif candidate.aborted:
            candidate.output.set_result(result.output)
        elif state.is_running:
            if result.finish_reason is not None:
                self.finish_times.append(history.ended_at)
                candidate.output.set_result(result.output)
                self._on_events(Finished(index, result.tokens, result.finish_reason))
            elif candidate.aborting_callers:
                # `count_tokens` needs the number after the end.
                history.stopped_tokens = result.tokens
                self._on_events(Lost(index, by_caller=True))
            else:
                # The engine was lost. The replacement resumes from the same carried tokens.
                if candidate.carried is not NEW:
                    self.carried.append(candidate.carried)
                self._on_events(Lost(index))
        # A finished or cut output may belong to another caller, so `_run` answers without tokens.
        if result.finish_reason is None and index not in self._cut_lengths:
            for caller in candidate.aborting_callers:
                if not caller.done():
                    caller.set_result(result.output)

    def _return_carried_tokens(self, candidate: CandidateRun[RequestT, OutputT]) -> None:
        """Answer with the carried tokens if the candidate was aborted before its start."""
        if not candidate.aborted:
            return
        carried = candidate.carried
        if carried.last_version is not None:
            # The record shows the carried tokens, as if the candidate had started.
            candidate.history.mark_started(self._clock(), carried.last_version, carried)
        candidate.output.set_result(self._engine.aborted_output(candidate.request, carried.prefix))

    def _fail_output(self, candidate: CandidateRun[RequestT, OutputT], error: Exception) -> None:
        if not candidate.output.done():
            candidate.output.set_exception(error)
            # Mark the error as retrieved: the caller may have left.
            candidate.output.exception()
