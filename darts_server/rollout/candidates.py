"""The candidates of one group on the engine: start, stop, cut and abort them, and report what happens to them."""

import asyncio
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic

from darts_server.engine.port import (
    NOTHING,
    CandidateResult,
    OutputT,
    RequestT,
    RunningCandidate,
    TokenSlice,
)
from darts_server.exceptions import CandidateFailed, EngineError
from darts_server.policy.events import Event, Failed, Finished, Lost, Progress, Scored, Started
from darts_server.policy.group import Group
from darts_server.records import VersionSpans
from darts_server.rollout.allocation.cohort import Cohort
from darts_server.rollout.pruning.group_scorer import GroupScorer
from darts_server.rollout.recorder import GroupRecorder
from darts_server.rollout.spec import GroupContext, GroupSpec, OnAbort
from darts_server.rollout.start_queue import NO_ORDER, StartingOrder
from darts_server.types import FinishReason


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


def compact(tokens: TokenSlice) -> TokenSlice:
    """Copy tokens to arrays: lists take several times the memory."""
    logprobs = None if tokens.logprobs is None else array("d", tokens.logprobs)
    return TokenSlice(array("i", tokens.token_ids), logprobs)


MAX_TRIES = 100
"""Candidates that are generated in place of one that was lost after it was cut."""


class CandidateRunner(Generic[RequestT, OutputT]):
    """Run the candidates of one group, by index.

    Each has a task that starts it and waits for its result. What happens to one that the group has discarded is
    recorded, and is no event any more.

    Args:
        context: the engine, and where candidates wait for their turn to start.
        spec: what they are started with, and what is kept of them.
        group: the group's state machine, which decides; here it is only read.
        recorder: of the group.
        on_start: called for each candidate that has reached the engine or could not be started.
        on_events: called with what happened.
        on_error: called with an error that is none of the engine's, so a bug of ours.
        carried: what the first candidates have generated already.
        order: of its candidates among those of others that wait.
    """

    def __init__(
        self,
        context: GroupContext[RequestT, OutputT],
        spec: GroupSpec[RequestT],
        group: Group,
        recorder: GroupRecorder,
        on_start: Callable[[], None],
        on_events: Callable[..., None],
        on_error: Callable[[BaseException], None],
        carried: Sequence[CarriedCandidate[OutputT]] = (),
        order: StartingOrder = NO_ORDER,
    ) -> None:
        self.running: dict[int, RunningCandidate[OutputT]] = {}
        """Candidates that the engine runs or queues, stopped ones until it has answered."""
        self.aborted: frozenset[int] = frozenset()
        """Candidates that go to a caller as they were when it was aborted."""
        self.scorer: GroupScorer | None = None
        if spec.pruning is not None:
            assert context.scorer is not None
            self.scorer = GroupScorer(context.scorer, recorder.key, spec.pruning, self.running, on_events)
        self._engine = context.engine
        self._starts = context.starts
        self._order = order
        self._request = spec.request
        self._own_requests: dict[int, RequestT] = {}  # of candidates that do not share it
        self._suspended_requests: list[RequestT] | None = None  # for the next candidates, while the group is suspended
        self._outputs: dict[int, asyncio.Future[OutputT]] = {}  # of all that were started
        self._cuts: dict[int, int] = {}  # tokens that are kept of those that were cut before they had an output
        self._keeps_results = spec.on_abort is OnAbort.CARRY
        self._group = group
        self._recorder = recorder
        self._on_start, self._on_events, self._on_error = on_start, on_events, on_error
        self._cohort: Cohort | None = None
        self._carried = dict(enumerate(carried))
        self._left_behind: list[CarriedCandidate[OutputT]] = []  # what lost candidates went on from, for others
        self._results: dict[int, CandidateResult[OutputT]] = {}  # of all that ended, if they can be carried over
        self._aborts: dict[int, asyncio.Future[OutputT | None]] = {}  # of those that `abort_request` has stopped
        self._stopped: dict[int, int] = {}  # tokens of those that were stopped on the engine
        self._tasks: set[asyncio.Task[None]] = set()

    # --- all candidates -----------------------------------------------------

    def start(self, indices: Iterable[int]) -> None:
        """Start candidates, each in its turn."""
        for index in indices:
            if self._left_behind:
                self._carried[index] = self._left_behind.pop()
            self._outputs[index] = asyncio.get_running_loop().create_future()
            task = asyncio.get_running_loop().create_task(self._run(index))
            self._tasks.add(task)
            task.add_done_callback(partial(self._finish_task, index))

    def count_in(self, cohort: Cohort) -> None:
        """Count the running candidates as the cohort's from now on."""
        self._cohort = cohort
        cohort.running += len(self.running)

    def poll(self) -> list[Progress | Scored]:
        """Return the progress of candidates that reached a count at which it matters, and scores of others."""
        events: list[Progress | Scored] = [
            Progress(index, tokens)
            for index, tokens_due in self._group.check_at.items()
            if (running := self.running.get(index)) is not None
            and (tokens := running.tokens()) is not None
            and tokens >= tokens_due
        ]
        events += [] if self.scorer is None else self.scorer.poll()
        for index, kept in self._cuts.items():  # one that is generated again
            running = None if index in self._stopped else self.running.get(index)
            if running is not None and (running.tokens() or 0) >= kept:
                self._stop_running(index)
        return events

    def suspend(self) -> None:
        """Keep the requests of the candidates for others, before the group is restarted without these."""
        alive = (c.index for c in self._group.candidates if c.alive)
        self._suspended_requests = [self._own_requests[index] for index in alive if index in self._own_requests]
        self._left_behind.clear()
        self._carried.clear()  # also if none has started yet: it may be too old for the new weights

    def resume(self) -> None:
        """Give the kept requests to the candidates that are started next."""
        kept, self._suspended_requests = self._suspended_requests or [], None
        self._own_requests |= dict(enumerate(kept, len(self._group.candidates)))

    def weights_change(self) -> None:
        """Record which tokens the present weights have sampled, before the paused engine gets others."""
        for index, running in self.running.items():
            if (tokens := running.tokens()) is not None:
                self._recorder.weights_change(index, self._engine.weight_version, tokens)

    def return_aborted(self, indices: Iterable[int]) -> None:
        """Return these candidates as they are, once their group has stopped them."""
        self.aborted |= set(indices)

    # --- requests and outputs -----------------------------------------------

    def assign_request(self, index: int, request: RequestT) -> None:
        """Give candidate ``index`` a request of its own; while suspended, the next candidate to be started."""
        if self._suspended_requests is None:
            self._own_requests[index] = request
        else:
            self._suspended_requests.append(request)

    def request_of(self, index: int) -> tuple[RequestT, int]:
        """Return the request of a candidate, and the candidate's number within that request."""
        own = self._own_requests.get(index)
        return (self._request, index) if own is None else (own, 0)

    async def output(self, index: int) -> OutputT:
        """Wait for the output of a candidate.

        Raises:
            EngineError: of a candidate that failed.
        """
        # A caller that is cancelled here must not cancel the future, which the candidate's task still sets.
        return await asyncio.shield(self._outputs[index])

    def _set_output(self, index: int, output: OutputT) -> None:
        """Set the output of a candidate that has none yet; of a cut one, its first tokens."""
        if index in self._cuts:
            output = self._truncate(index, output, self._cuts[index])
        self._outputs[index].set_result(output)

    def _fail_output(self, index: int, error: BaseException) -> None:
        """Fail the output that a caller may be waiting for; harmless if there is one already."""
        if not self._outputs[index].done():
            self._outputs[index].set_exception(error)
            self._outputs[index].exception()  # marks it as retrieved: the caller may be gone

    def _truncate(self, index: int, output: OutputT, tokens: int) -> OutputT:
        return self._engine.truncate(self.request_of(index)[0], output, tokens)

    # --- tokens -------------------------------------------------------------

    def count_tokens(self, index: int) -> int:
        """Return how many tokens a candidate has generated so far; of a cut one, those that are kept."""
        running = self._running_at(index)
        tokens = None if running is None else running.tokens()
        return self._recorder.tokens(self._group.candidates[index]) if tokens is None else tokens

    def read_tokens(self, index: int, start: int) -> TokenSlice | None:
        """Return the tokens of a candidate from ``start`` on; ``None`` while none are certain. Never blocks."""
        output = self._outputs[index]
        if output.done():
            return None if output.exception() else self._engine.tokens_from(output.result(), start)
        running = self._running_at(index)
        generated = None if running is None else running.tokens_from(start)
        return generated if generated is None or generated.logprobs_requested else replace(generated, logprobs=None)

    def _running_at(self, index: int) -> RunningCandidate[OutputT] | None:
        return self.running.get(index) if self._group.candidates[index].running else None

    # --- what is carried over -----------------------------------------------

    @property
    def goes_on(self) -> bool:
        """Whether the first candidates go on from what they had generated in a stopped group."""
        return bool(self._carried)

    async def wait_for_results(self) -> None:
        """Wait until the engine has returned all outputs, which have the tokens up to where they were stopped."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def carry(self, indices: Iterable[int]) -> list[CarriedCandidate[OutputT]]:
        """Return what stopped candidates have generated."""
        return [self._carry_candidate(index) for index in indices]

    def _carry_candidate(self, index: int) -> CarriedCandidate[OutputT]:
        result = self._results.get(index)
        if result is None:  # it has not reached the engine
            return self._carried_at(index)
        return CarriedCandidate(
            compact(self._engine.tokens_from(result.output, 0)),
            self._recorder.version_spans(index, result.tokens),
            None if result.finish_reason is None else result,
        )

    # --- stopping one candidate ---------------------------------------------

    def stop(self, index: int) -> None:
        """Stop a candidate that the group has discarded."""
        if self.scorer is not None:
            self.scorer.drop(index)
        if index in self.running:
            self._recorder.candidate_stopped(index, self._stop_running(index))

    def cut(self, index: int, tokens: int) -> None:
        """Stop a candidate if it runs, and keep the first ``tokens`` tokens of its output."""
        output = self._outputs[index]
        if not output.done():
            if index not in self._cuts:
                self._stop_running(index)
                self._recorder.candidate_ended(index, self._engine.weight_version, finished=False)
            self._cuts[index] = tokens
        elif output.exception() is None:
            self._outputs[index] = asyncio.get_running_loop().create_future()
            self._outputs[index].set_result(self._truncate(index, output.result(), tokens))

    def abort_request(self, request: RequestT) -> asyncio.Future[OutputT | None]:
        """Stop the candidate that runs for one of the group's requests, and return what it has generated.

        The group goes on without it. ``None`` if it does not run any more, or ends otherwise: then it may be another
        caller's. All that abort the same candidate share the future: do not cancel it.
        """
        output: asyncio.Future[OutputT | None] = asyncio.get_running_loop().create_future()
        running = (c.index for c in reversed(self._group.candidates) if c.running)
        index = next((index for index in running if self.request_of(index)[0] is request), None)
        if index is None:
            output.set_result(None)
            return output
        if index in self._aborts:
            return self._aborts[index]
        self._aborts[index] = output
        if index in self.running:
            self._stop_running(index)
        else:  # it waits for its turn to start
            self._on_events(Lost(index, by_caller=True))
            self._answer_abort(index, self.aborted_output(request))
        return output

    def _answer_abort(self, index: int, output: OutputT | None) -> None:
        waiting = self._aborts.get(index)
        if waiting is not None and not waiting.done():
            waiting.set_result(output)

    def owns_aborted(self, request: RequestT) -> bool:
        """Whether a candidate that was started with this request was aborted, alone or with its group."""
        return any(self.request_of(index)[0] is request for index in (*self._aborts, *self.aborted))

    def aborted_output(self, request: RequestT) -> OutputT:
        """Return the output of a request that was aborted before anything was generated for it."""
        return self._engine.aborted_output(request)

    def _stop_running(self, index: int) -> int:
        """Stop a running candidate on the engine, and return its tokens.

        The group, its caller and a limit that a carried candidate has reached already can each decide so, even in the
        same turn of the loop: the engine gets one stop.
        """
        if index not in self._stopped:
            self._stopped[index] = self.running[index].stop()
        return self._stopped[index]

    def _carried_at(self, index: int) -> CarriedCandidate[OutputT]:
        return self._carried.get(index, CarriedCandidate())

    # --- running one candidate ----------------------------------------------

    async def _run(self, index: int) -> None:
        carried = self._carried_at(index)
        if (result := self._carried_result(index)) is not None:
            self._finish_carried(index, carried, result)
            return
        try:
            await self._starts.candidate(carried.tokens)
            if not self._is_running(index):  # it was stopped while it waited
                self._on_start()
                self._set_aborted(index)
                return
            request, order = self.request_of(index), self._order.of(carried.tokens)
            try:
                if carried.tokens:
                    running = await self._engine.resume(*request, carried.prefix, order)
                else:
                    probe = None if self.scorer is None else self.scorer.probe_for(index)
                    running = await self._engine.start(*request, probe, order)
            finally:
                self._on_start()
            self.running[index] = running
            if self._cohort is not None:
                self._cohort.running += 1
            self._recorder.candidate_started(index, self._engine.weight_version, carried.version_spans)
            if self._is_running(index):
                events: list[Event] = [Started(index)]
                if carried.tokens:
                    events.append(Progress(index, carried.tokens))
                if self.scorer is not None:
                    events += self.scorer.mark_started(index)
                self._on_events(*events)
            if not self._is_running(index):  # since before the engine had started it
                self._stop_running(index)
            result = await running.result()
            for _ in range(MAX_TRIES):
                if result.tokens >= self._cuts.get(index, 0):
                    break
                # It was lost with its engine when it had been cut, and before the engine had sent what is kept. It had
                # so many tokens: one that ends before is not of its distribution.
                self.running[index] = running = await self._engine.start(*request, None, order)
                self._stopped.pop(index, None)
                result = await running.result()
            else:
                raise CandidateFailed(f"candidate {index} was cut and then lost, and none as long came in its place")
        except EngineError as error:
            if index in self._cuts:
                self._fail_output(index, error)
            elif index in self.aborted:
                self._set_aborted(index)
            elif self._is_running(index):
                self._on_events(Failed(index, error, retryable=isinstance(error, CandidateFailed)))
        else:
            self._handle_result(index, result)
        finally:
            if self.running.pop(index, None) is not None and self._cohort is not None:
                self._cohort.running -= 1

    def _carried_result(self, index: int) -> CandidateResult[OutputT] | None:
        """Return the result of a candidate that had finished before its group was carried over."""
        carried = self._carried_at(index)
        if (end := carried.saved_end) is None:
            return carried.result
        request, _ = self.request_of(index)
        output = self._engine.finished_output(request, carried.prefix, end.finish_reason, end.text)
        return CandidateResult(carried.tokens, end.finish_reason, output)

    def _finish_carried(self, index: int, carried: CarriedCandidate[OutputT], result: CandidateResult[OutputT]) -> None:
        """Handle the result of a candidate that had finished before its group was carried over."""
        self._on_start()
        version = self._engine.weight_version if carried.last_version is None else carried.last_version
        self._recorder.candidate_started(index, version, carried.version_spans)
        if self._is_running(index):
            self._on_events(Started(index))
        self._handle_result(index, result, version)

    def _handle_result(self, index: int, result: CandidateResult[OutputT], weight_version: int | None = None) -> None:
        """``weight_version``: of its last token; ``None`` for that of the engine."""
        finished = result.finish_reason is not None and self._is_running(index)
        version = self._engine.weight_version if weight_version is None else weight_version
        self._recorder.candidate_ended(index, version, finished=finished)
        if self._keeps_results:
            self._results[index] = result
        if index in self._cuts or index in self.aborted:
            self._set_output(index, result.output)
        elif self._is_running(index):
            if result.finish_reason is not None:
                self._set_output(index, result.output)
                self._on_events(Finished(index, result.tokens, result.finish_reason))
            elif index in self._aborts:
                self._recorder.candidate_stopped(index, result.tokens)
                self._on_events(Lost(index, by_caller=True))
            else:
                if index in self._carried:
                    self._left_behind.append(self._carried[index])
                self._on_events(Lost(index))
        is_whole = result.finish_reason is not None or index in self._cuts
        self._answer_abort(index, None if is_whole else result.output)

    def _set_aborted(self, index: int) -> None:
        """Return an aborted candidate that has generated nothing, but for what it had before."""
        if index in self.aborted:
            carried, (request, _) = self._carried_at(index), self.request_of(index)
            if carried.last_version is not None:
                self._recorder.candidate_started(index, carried.last_version, carried.version_spans)
            self._set_output(index, self._engine.aborted_output(request, carried.prefix))

    def _finish_task(self, index: int, task: asyncio.Task[None]) -> None:
        """Report an unexpected error of a candidate's task, which nothing awaits."""
        self._tasks.discard(task)
        self._answer_abort(index, None)  # it failed, or was stopped before it reached the engine
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail_output(index, error)
            self._on_error(error)

    def _is_running(self, index: int) -> bool:
        return self._group.candidates[index].running
