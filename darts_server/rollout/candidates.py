"""The candidates of one group on the engine: start, stop, cut and abort them, and report what happens to them."""

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

from darts_server.engine.port import NOTHING, CandidateResult, OutputT, RequestT, RunningCandidate, TokenSlice
from darts_server.exceptions import CandidateFailed, EngineError
from darts_server.group.candidate import Candidate
from darts_server.group.events import Event, Failed, Finished, Lost, Progress, Scored, Started
from darts_server.group.group import Group
from darts_server.records import CandidateRecord, VersionSpans, extend_spans
from darts_server.rollout.pruning.group_scorer import GroupScorer
from darts_server.rollout.spec import GroupContext, GroupSpec, OnAbort
from darts_server.rollout.start_queue import StartingOrder
from darts_server.serving.admission import Ticket
from darts_server.types import GONE, FinishReason


@dataclass(frozen=True, slots=True)
class SavedEnd:
    """How a candidate has finished, as it is saved: without the engine's own output."""

    finish_reason: FinishReason
    text: str


@dataclass(frozen=True, slots=True)
class CarriedCandidate(Generic[OutputT]):
    """A candidate of a stopped group.

    ``prefix``: what it had generated. ``version_spans``: of these tokens. ``result``: ``None`` unless it has finished
    on this engine; ``saved_end``: unless it has on an earlier one.
    """

    prefix: TokenSlice = field(default=NOTHING)
    version_spans: VersionSpans = ()
    result: CandidateResult[OutputT] | None = None
    saved_end: SavedEnd | None = None

    @property
    def tokens(self) -> int:
        return len(self.prefix.token_ids)

    @property
    def last_version(self) -> int | None:
        """The weights that sampled its last token; ``None`` without any."""
        return self.version_spans[-1][0] if self.version_spans else None


NEW: CarriedCandidate[Any] = CarriedCandidate()
"""One that goes on from nothing."""


def compact(tokens: TokenSlice) -> TokenSlice:
    """Copy tokens to arrays: lists take several times the memory."""
    logprobs = None if tokens.logprobs is None else array("d", tokens.logprobs)
    return TokenSlice(array("i", tokens.token_ids), logprobs)


MAX_TRIES = 100
"""Candidates that are generated in place of one that was lost after it was cut."""


@dataclass(slots=True, eq=False)
class CandidateRun(Generic[RequestT, OutputT]):
    """One candidate from its request on, with what its record says of it.

    ``state``: in the group's state machine. ``has_own_request``: whether it does not share ``request`` with others.
    ``number``: among the candidates of its request. ``carried``: what it goes on from.
    """

    state: Candidate
    request: RequestT
    has_own_request: bool
    number: int
    carried: CarriedCandidate[OutputT]
    output: asyncio.Future[OutputT]
    result: CandidateResult[OutputT] | None = None
    """``None`` until it has ended, and in groups that are not carried over."""
    aborted: bool = False
    """Whether its caller gets it as it was when the group was aborted."""
    aborting: list[asyncio.Future[OutputT]] = field(default_factory=list)
    """Callers that have aborted its request alone: they get what it has generated."""
    engine_stop: int | None = None
    """Tokens when it was stopped on the engine, or has ended there; ``None`` before."""
    started_at: float | None = None
    ended_at: float | None = None
    stopped_tokens: int = 0
    """Tokens when the group, or its caller, stopped it."""
    version_start: int | None = None
    version_end: int | None = None
    earlier_spans: VersionSpans = ()
    """Of its tokens from before the weights changed last."""
    resumed: int = 0

    def mark_started(self, now: float, weight_version: int, origin: CarriedCandidate[OutputT]) -> None:
        """``origin``: what it goes on from. Not ``carried``, which a restart while it started has emptied."""
        spans = self.earlier_spans = origin.version_spans
        self.started_at, self.version_start = now, spans[0][0] if spans else weight_version
        self.resumed = len(origin.prefix.token_ids)

    def version_spans(self, tokens: int) -> VersionSpans:
        """Return which weights sampled its first ``tokens`` tokens; none before it has started."""
        version = self.version_start if self.version_end is None else self.version_end
        return () if version is None else extend_spans(self.earlier_spans, version, tokens)


class CandidateRunner(Generic[RequestT, OutputT]):
    """Run the candidates of one group, by index.

    Each has a task that starts it and waits for its result. What happens to one that the group has discarded is
    recorded, and is no event any more.

    ``owner``, ``ticket``, ``carried``, ``order``: see `GroupRun`. ``group``: decides; here it is only read.
    ``on_events``: called with what happened. ``on_bug``: called with an error that is none of the engine's.
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
        order: StartingOrder,
    ) -> None:
        self.candidates: list[CandidateRun[RequestT, OutputT]] = []
        self.running: dict[int, RunningCandidate[OutputT]] = {}
        """Candidates that the engine runs or queues, stopped ones until it has answered."""
        self.finish_times: list[float] = []
        """Of those that were neither stopped nor aborted, since the group's last restart."""
        self.scorer: GroupScorer | None = None
        if (pruning := spec.plan.shaping.pruning) is not None:
            assert context.scorer is not None
            self.scorer = GroupScorer(context.scorer, (owner, spec.group_id), pruning, self.running, on_events)
        self._engine, self._starts, self._clock = context.engine, context.starts, context.clock
        self._group, self._ticket, self._order = group, ticket, order
        self._on_events, self._on_bug = on_events, on_bug
        self._request = spec.request
        self.own_requests: deque[RequestT] = deque()
        """Of the candidates that start next, instead of the shared one."""
        self.carried = list(reversed(carried))
        """What the next candidates go on from, the last one first: what its first ones do, and what lost ones did."""
        self._keeps_results = spec.on_abort is OnAbort.CARRY
        self._cuts: dict[int, int] = {}  # tokens that are kept of those that were cut before they had an output
        self._tasks: set[asyncio.Task[None]] = set()

    # --- all candidates -----------------------------------------------------

    def start(self, indices: Iterable[int]) -> None:
        """Start candidates, each in its turn."""
        loop = asyncio.get_running_loop()
        for index in indices:
            carried = self.carried.pop() if self.carried else NEW
            assert index == len(self.candidates), "decisions to start are carried out in their order"
            has_own = bool(self.own_requests)
            request = self.own_requests.popleft() if has_own else self._request
            number, state = 0 if has_own else index, self._group.candidates[index]
            candidate = CandidateRun(state, request, has_own, number, carried, loop.create_future())
            self.candidates.append(candidate)
            task = loop.create_task(self._run(candidate))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def poll(self) -> list[Progress | Scored]:
        """Return the progress of candidates that reached a count at which it matters, and scores of others."""
        events: list[Progress | Scored] = []
        for index, tokens_due in self._group.check_at.items():
            if (running := self.running.get(index)) is not None:
                tokens = running.tokens()
                if tokens is not None and tokens >= tokens_due:
                    events.append(Progress(index, tokens))
        if self.scorer is not None:
            events += self.scorer.poll()
        for index, kept in self._cuts.items():  # one that is generated again
            if (running := self.running.get(index)) is not None and (running.tokens() or 0) >= kept:
                self._stop_on_engine(self.candidates[index])
        return events

    def suspend(self) -> None:
        """Keep the requests of the candidates for others, before the group is restarted without these."""
        self.own_requests.extend(c.request for c in self.candidates if c.state.alive and c.has_own_request)
        self.finish_times.clear()
        # Also if none has started yet: what it goes on from may be too old for the new weights.
        self.carried.clear()
        for candidate in self.candidates:
            candidate.carried = NEW

    def weights_change(self) -> None:
        """Record which tokens the present weights have sampled, before the paused engine gets others."""
        for index, running in self.running.items():
            if (tokens := running.tokens()) is not None:
                candidate = self.candidates[index]
                candidate.earlier_spans = extend_spans(candidate.earlier_spans, self._engine.weight_version, tokens)

    # --- outputs and tokens -------------------------------------------------

    def count_tokens(self, index: int) -> int:
        """Return how many tokens a candidate has generated so far; of a cut one, those that are kept."""
        candidate = self.candidates[index]
        running = self.running.get(index) if candidate.state.running else None
        tokens = None if running is None else running.tokens()
        if tokens is None:
            tokens = max(candidate.state.tokens, candidate.stopped_tokens)
        return tokens if candidate.state.cut else max(tokens, candidate.resumed)

    def record(self, index: int, weight: float | None = None) -> CandidateRecord:
        """Return the present state of a candidate. ``weight``: see `CandidateRecord`."""
        candidate, state, tokens = self.candidates[index], self.candidates[index].state, self.count_tokens(index)
        return CandidateRecord(
            index=index,
            tokens=tokens,
            finish_reason=state.finish_reason,
            selected_as=state.selected_as,
            reason=state.reason,
            cut=state.cut,
            started_at=candidate.started_at,
            ended_at=candidate.ended_at,
            weight_version_start=candidate.version_start,
            weight_version_end=candidate.version_end,
            quality=state.quality,
            survival=state.survival,
            weight=weight,
            version_spans=candidate.version_spans(tokens),
            resumed=candidate.resumed,
        )

    def read_tokens(self, index: int, start: int) -> TokenSlice | None:
        """Return the tokens of a candidate from ``start`` on; ``None`` while none are certain. Never blocks."""
        candidate = self.candidates[index]
        if candidate.output.done():
            failed = candidate.output.exception() is not None
            return None if failed else self._engine.tokens_from(candidate.output.result(), start)
        running = self.running.get(index) if candidate.state.running else None
        generated = None if running is None else running.tokens_from(start)
        return generated if generated is None or generated.logprobs_requested else replace(generated, logprobs=None)

    async def collect_carried(self) -> list[CarriedCandidate[OutputT]]:
        """Return what the candidates of a group have generated that was stopped to be carried over.

        Without those that failed, and those from before a restart.
        """
        if self._tasks:  # the engine returns tokens up to where they were stopped
            await asyncio.wait(self._tasks)
        found: list[CarriedCandidate[OutputT]] = []
        for candidate in self.candidates[self._group.restarted_from :]:
            if candidate.state.reason in GONE:
                continue
            carried, result = candidate.carried, candidate.result
            if result is not None:  # it has reached the engine
                tokens, spans = self._engine.tokens_from(result.output, 0), candidate.version_spans(result.tokens)
                carried = CarriedCandidate(compact(tokens), spans, None if result.finish_reason is None else result)
            found.append(carried)
        return found

    # --- stopping one candidate ---------------------------------------------

    def stop(self, index: int) -> None:
        """Stop a candidate that the group has discarded."""
        if self.scorer is not None:
            self.scorer.drop(index)
        if index in self.running:
            candidate = self.candidates[index]
            candidate.stopped_tokens, candidate.ended_at = self._stop_on_engine(candidate), self._clock()

    def cut(self, index: int, tokens: int) -> None:
        """Stop a candidate if it runs, and keep the first ``tokens`` tokens of its output."""
        candidate = self.candidates[index]
        if not candidate.output.done():
            if index not in self._cuts:
                self._stop_on_engine(candidate)
                candidate.ended_at = candidate.ended_at or self._clock()
                candidate.version_end = self._engine.weight_version
            self._cuts[index] = tokens
        elif candidate.output.exception() is None:
            output = self._engine.truncate(candidate.request, candidate.output.result(), tokens)
            candidate.output = asyncio.get_running_loop().create_future()
            candidate.output.set_result(output)

    def abort_request(self, request: RequestT, caller: asyncio.Future[OutputT]) -> None:
        """Stop the candidate that runs for one of the group's requests, and give its caller what it has generated.

        The group goes on without it. If it does not run any more, or ends otherwise, its caller gets an output without
        tokens: those that it has may be another caller's.
        """
        candidate = next((c for c in reversed(self.candidates) if c.state.running and c.request is request), None)
        if candidate is None:
            caller.set_result(self._engine.aborted_output(request))
            return
        candidate.aborting.append(caller)
        if candidate.state.index in self.running:
            self._stop_on_engine(candidate)
        else:  # it waits for its turn to start
            self._on_events(Lost(candidate.state.index, by_caller=True))
            self._answer_aborting(candidate)

    def _answer_aborting(
        self, candidate: CandidateRun[RequestT, OutputT], result: CandidateResult[OutputT] | None = None
    ) -> None:
        for caller in candidate.aborting:
            if not caller.done():
                output = self._engine.aborted_output(candidate.request) if result is None else result.output
                caller.set_result(output)

    def _stop_on_engine(self, candidate: CandidateRun[RequestT, OutputT]) -> int:
        """Stop a running candidate on the engine, and return its tokens.

        The group, its caller and a limit that a carried candidate has reached already can each decide so, even in the
        same turn of the loop: the engine gets one stop.
        """
        if candidate.engine_stop is None:
            candidate.engine_stop = self.running[candidate.state.index].stop()
        return candidate.engine_stop

    # --- running one candidate ----------------------------------------------

    async def _run(self, candidate: CandidateRun[RequestT, OutputT]) -> None:
        """Start a candidate in its turn, wait for its result, and report both."""
        index, state, carried = candidate.state.index, candidate.state, candidate.carried
        resumed = len(carried.prefix.token_ids)
        try:
            if carried.result is not None or carried.saved_end is not None:
                self._finish_carried(candidate)
                return
            try:
                await self._starts.wait(carried_tokens=resumed)
                if not state.running:  # it was stopped while it waited
                    self._ticket.mark_started(1)
                    self._return_unstarted(candidate)
                    return
                request, number, order = candidate.request, candidate.number, self._order(resumed)
                try:
                    if resumed:
                        running = await self._engine.resume(request, number, carried.prefix, order)
                    else:
                        probe = None if self.scorer is None else self.scorer.probe_for(index)
                        running = await self._engine.start(request, number, probe, order)
                finally:
                    self._ticket.mark_started(1)
                self.running[index] = running
                candidate.mark_started(self._clock(), self._engine.weight_version, carried)
                if state.running:
                    events: list[Event] = [Started(index)]
                    if resumed:
                        events.append(Progress(index, resumed))
                    if self.scorer is not None:
                        events += self.scorer.mark_started(index)
                    self._on_events(*events)
                if not state.running:  # since before the engine had started it
                    self._stop_on_engine(candidate)
                result = await running.result()
                if result.tokens < self._cuts.get(index, 0):
                    result = await self._generate_again(candidate, order)
            except EngineError as error:
                if index in self._cuts:
                    self._fail_output(candidate, error)
                elif candidate.aborted:
                    self._return_unstarted(candidate)
                elif state.running:
                    self._on_events(Failed(index, error, retryable=isinstance(error, CandidateFailed)))
            else:
                self._handle_result(candidate, result, self._engine.weight_version)
            finally:
                self.running.pop(index, None)
        except Exception as error:  # a bug: nothing awaits this task
            self._fail_output(candidate, error)
            self._on_bug(error)
        finally:
            if candidate.aborting:  # it failed, or was stopped before it reached the engine
                self._answer_aborting(candidate)

    async def _generate_again(
        self, candidate: CandidateRun[RequestT, OutputT], order: float
    ) -> CandidateResult[OutputT]:
        """Replace a candidate that was lost with its engine when it had been cut, before the engine sent its tokens.

        It had as many as are kept: one that ends before is not of its distribution.
        """
        index = candidate.state.index
        for _ in range(MAX_TRIES):
            self.running[index] = running = await self._engine.start(candidate.request, candidate.number, None, order)
            candidate.engine_stop = None  # `poll` stops it when it has enough
            result = await running.result()
            if result.tokens >= self._cuts[index]:
                return result
        raise CandidateFailed(f"candidate {index} was cut and then lost, and none as long came in its place")

    def _finish_carried(self, candidate: CandidateRun[RequestT, OutputT]) -> None:
        """Report a candidate that had finished before its group was carried over."""
        carried, state = candidate.carried, candidate.state
        result = carried.result
        if (end := carried.saved_end) is not None:
            output = self._engine.finished_output(candidate.request, carried.prefix, end.finish_reason, end.text)
            result = CandidateResult(carried.tokens, end.finish_reason, output)
        assert result is not None
        self._ticket.mark_started(1)
        version = self._engine.weight_version if carried.last_version is None else carried.last_version
        candidate.mark_started(self._clock(), version, carried)
        if state.running:
            self._on_events(Started(state.index))
        self._handle_result(candidate, result, version)

    def _handle_result(
        self, candidate: CandidateRun[RequestT, OutputT], result: CandidateResult[OutputT], weight_version: int
    ) -> None:
        """Record a candidate's end and pass its output on. ``weight_version``: of its last token."""
        state, index = candidate.state, candidate.state.index
        has_finished = result.finish_reason is not None
        candidate.ended_at, candidate.version_end = candidate.ended_at or self._clock(), weight_version
        if candidate.engine_stop is None:
            # Its group may be stopped on the events below. The engine does not know its tokens any more.
            candidate.engine_stop = result.tokens
        if has_finished and state.running:
            self.finish_times.append(candidate.ended_at)
        if self._keeps_results:
            candidate.result = result
        if index in self._cuts:
            candidate.output.set_result(self._engine.truncate(candidate.request, result.output, self._cuts[index]))
        elif candidate.aborted:
            candidate.output.set_result(result.output)
        elif state.running:
            if result.finish_reason is not None:
                candidate.output.set_result(result.output)
                self._on_events(Finished(index, result.tokens, result.finish_reason))
            elif candidate.aborting:
                candidate.stopped_tokens, candidate.ended_at = result.tokens, self._clock()
                self._on_events(Lost(index, by_caller=True))
            else:
                if candidate.carried is not NEW:
                    self.carried.append(candidate.carried)
                self._on_events(Lost(index))
        if candidate.aborting:
            self._answer_aborting(candidate, None if has_finished or index in self._cuts else result)

    def _return_unstarted(self, candidate: CandidateRun[RequestT, OutputT]) -> None:
        """Return an aborted candidate that has generated nothing, but for what it had before."""
        if candidate.aborted:
            if candidate.carried.last_version is not None:
                candidate.mark_started(self._clock(), candidate.carried.last_version, candidate.carried)
            candidate.output.set_result(self._engine.aborted_output(candidate.request, candidate.carried.prefix))

    def _fail_output(self, candidate: CandidateRun[RequestT, OutputT], error: Exception) -> None:
        """Fail the output that a caller may be waiting for; harmless if there is one already."""
        if not candidate.output.done():
            candidate.output.set_exception(error)
            candidate.output.exception()  # marks it as retrieved: the caller may be gone
