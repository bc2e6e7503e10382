"""Run one group on an engine: start its candidates, feed its state machine, carry out its decisions."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic

from darts_server.engine.port import CandidateResult, OutputT, RequestT, RunningCandidate, TokenSlice
from darts_server.exceptions import CandidateFailed, DartsError, EngineError, GroupAborted
from darts_server.policy.candidate import Candidate
from darts_server.policy.events import (
    Complete,
    Cut,
    DeadlineSet,
    Decision,
    Deliver,
    Event,
    Failed,
    Finished,
    GiveUp,
    Keep,
    Lost,
    Progress,
    Start,
    Started,
    Stop,
)
from darts_server.policy.pruning.survival import SurvivalRule
from darts_server.policy.selection.rules import SelectionRule
from darts_server.rollout.allocation.cohort import Allocation, Cohort
from darts_server.rollout.allocation.extra import ExtraCandidates
from darts_server.rollout.candidate_requests import CandidateRequests
from darts_server.rollout.carried import CarriedCandidate, compact
from darts_server.rollout.pruning.checkpoints import Checkpoints
from darts_server.rollout.pruning.group_scorer import GroupScorer
from darts_server.rollout.recorder import GroupRecorder
from darts_server.rollout.spec import GroupContext, GroupSpec
from darts_server.types import GONE, CandidateRecord, DiscardReason, GroupRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trajectory(Generic[OutputT]):
    """A trajectory of the group. ``last``: it is the last one for the caller."""

    index: int
    output: OutputT
    last: bool


class GroupRun(Generic[RequestT, OutputT]):
    """Run one group from its first candidate to its end.

    Each candidate has a task that starts it and waits for its result. Everything else happens synchronously, in the
    task or timer that an event arrives in, so that a stop reaches the engine in the same turn of the event loop.

    ``on_end`` is called once when the group has ended, with any outcome, ``on_start`` for each candidate that has
    reached the engine or could not be started. ``survival``: with which probability candidates are kept; ``None`` to
    prune and to score none. ``carried``: what its first candidates have generated already, by index.
    """

    def __init__(
        self,
        context: GroupContext[RequestT, OutputT],
        spec: GroupSpec[RequestT],
        on_end: Callable[["GroupRun[RequestT, OutputT]"], None],
        on_start: Callable[[], None] = lambda: None,
        survival: SurvivalRule | None = None,
        carried: Sequence[CarriedCandidate[OutputT]] = (),
    ) -> None:
        self.spec = spec
        self._engine = context.engine
        self._starts = context.starts
        self._observer = context.observer
        self._on_end = on_end
        self._on_start = on_start
        self._requests = CandidateRequests(spec.request)
        self._group = spec.new_group()
        self.recorder = GroupRecorder(spec.group_id, spec.policy, context.clock, spec.prompt_key)
        self._cohort: Cohort | None = None
        self._place = 1
        self._extra: ExtraCandidates | None = None  # while some may be given up
        self._tokens_needed: int | None = None
        self._beyond: int | None = None  # the limit that it reported to be beyond, see `Cohort.waits_beyond`
        self._selected: int | None = None
        self._running: dict[int, RunningCandidate[OutputT]] = {}
        self._group_scorer: GroupScorer | None = None
        if survival is not None and context.can_score:
            assert context.scorer is not None
            self._group_scorer = GroupScorer(
                context.scorer, spec.group_id, survival, self._running, self._feed, wait_for_tokens=spec.keep_prefixes
            )
        self._checkpoints = None if survival is None else Checkpoints(survival, self._running)
        self._outputs: dict[int, asyncio.Future[OutputT]] = {}
        self._carried = dict(enumerate(carried))
        self._results: dict[int, CandidateResult[OutputT]] = {}  # of all that ended, if they can be carried over
        self._cuts: dict[int, int] = {}
        self._aborts: dict[int, asyncio.Future[OutputT | None]] = {}  # what they had generated, once that is known
        self._tasks: set[asyncio.Task[None]] = set()
        self._deliveries: asyncio.Queue[int | BaseException] = asyncio.Queue()
        self._delivered: set[int] = set()
        self.prefixes: dict[int, TokenSlice] = {}
        """Of each pruned candidate, if they are kept: its tokens up to where it was pruned."""
        self.aborted: frozenset[int] = frozenset()
        """Candidates that go to a caller as they were when it was aborted."""
        self.record: GroupRecord | None = None
        """The group's record; ``None`` until it has ended."""

    # --- driving the group --------------------------------------------------

    def add_request_id(self, request_id: str) -> None:
        """Record one more request, or name for the group, that this group answers."""
        self.recorder.request_ids += (request_id,)

    def add_candidate(self, request: RequestT) -> None:
        """Start a candidate with a request of its own, before the group's size is known."""
        self._requests.assign(len(self._group.candidates), request)
        self._act(self._group.add_candidate())

    def open(self, rule: SelectionRule, allocation: Allocation, max_candidates: int = 0) -> None:
        """Start the missing candidates of the allocation; ``rule`` selects among all of them.

        ``max_candidates``: pruned candidates are replaced until so many were started.
        """
        if self.has_ended:  # it failed while its requests were being collected
            allocation.drop()
            return
        self._cohort = allocation.cohort
        if self._cohort is not None:
            self._place = self._cohort.terms.place(rule.completion_place, allocation.candidates)
            self._cohort.running += len(self._running)
            self._cohort.join(self)
        if not self._carried:
            self._extra = ExtraCandidates.of(allocation, rule)
        decisions = self._group.open(rule, allocation.candidates, max_candidates)
        self._report_tokens_needed()
        self._act(decisions)

    async def trajectories(self) -> AsyncGenerator[Trajectory[OutputT], None]:
        """Yield each trajectory of an open group once it is known to belong: as many as its rule selects.

        Leaving early, by cancellation or by closing the iterator, stops all candidates.

        Raises:
            EngineError: of the last candidate that failed, if too few could finish.
            GroupFailed, GroupAborted
        """
        count = 0
        try:
            while count != self._selected:
                index = await self._deliveries.get()
                if isinstance(index, BaseException):
                    raise index
                count += 1
                # A caller that is cancelled here must not cancel the future, which the candidate's task still sets.
                output = await asyncio.shield(self._outputs[index])
                if index not in self.aborted:
                    self._report_returned(index, output)
                selected = self._group.size if self._selected is None else self._selected
                yield Trajectory(index, output, last=count == selected)
                if count == selected:
                    return
        finally:
            self.leave()

    def suspend(self) -> bool:
        """Stop all candidates, to start as many again in `resume`; whether nothing of the group still runs."""
        if self._group.can_restart:
            self._requests.suspend(c.index for c in self._group.candidates if c.alive)
            self.recorder.restart()
            self._carried.clear()  # also if none has started yet: it may be too old for the new weights
            self.prefixes.clear()  # weights stand for candidates since the restart only
            self._act(self._group.restart())
            self._reset_minimum()
        return self._group.is_paused or self.has_ended

    def resume(self) -> None:
        """Start new candidates after `suspend`. Harmless if the group was not suspended."""
        self._requests.resume(len(self._group.candidates))
        self._act(self._group.resume())

    def set_deadline(self, tokens: int, bound: int | None = None) -> None:
        """Apply the cohort's deadline, and the length at which every candidate is cut."""
        self._feed(DeadlineSet(tokens, bound))

    def poll(self) -> None:
        """Feed the progress of candidates that reached a count at which it matters, and scores of others."""
        with self._ended_by_errors():
            self._give_up_extra()
            self._report_minimum()
            events = [
                Progress(index, tokens)
                for index, tokens_due in self._group.check_at.items()
                if (running := self._running.get(index)) is not None
                and (tokens := running.tokens()) is not None
                and tokens >= tokens_due
            ]
            scores = [] if self._group_scorer is None else self._group_scorer.poll()
            scores += [] if self._checkpoints is None else self._checkpoints.poll()
            if events or scores:
                self._feed(*events, *scores)

    def leave(self) -> None:
        """Stop what still runs, as its caller is gone or complete, unless it runs on to be observed (shadow)."""
        if not self._group.all_delivered:
            self.cancel()

    def finish_early(self) -> None:
        """End the group with the trajectories delivered so far, and stop the rest."""
        self._act(self._group.end_decided())
        self._close()

    def cancel(self) -> None:
        """Stop whatever still runs. Synchronous, so that it works while the caller is being cancelled."""
        self._act(self._group.cancel())
        self._close()

    async def carry(self) -> list[CarriedCandidate[OutputT]]:
        """End the group, and return what its candidates have generated, for another run that goes on with it.

        Without those that failed or were aborted, and those from before a restart. The group must not have ended: it
        was counted.
        """
        assert not self.has_ended
        # Those whose stop the engine has not answered yet. One that has not reached the engine may still be carried.
        aborting = [index for index, waiting in self._aborts.items() if not waiting.done() and index in self._running]
        self._act(self._group.carry(aborting))
        self._close()
        if self._tasks:
            await asyncio.wait(self._tasks)  # for the engine's outputs, which have the tokens up to the abort
        candidates = self._group.candidates[self._group.restarted_from :]
        return [
            self._carry_candidate(c.index) for c in candidates if c.reason not in GONE and not self._was_taken(c.index)
        ]

    def weights_change(self) -> None:
        """Record which tokens the present weights have sampled, before the paused engine gets others."""
        for index, running in self._running.items():
            if (tokens := running.tokens()) is not None:
                self.recorder.weights_change(index, self._engine.weight_version, tokens)

    def abort(self, reason: str = "the request was aborted while its group was running") -> None:
        """End the group from outside.

        If its spec says so, its caller gets as many candidates as it waits for, those first that were started first,
        as they are: whole if they have finished, otherwise what they have generated. Nothing is chosen by length. A
        group that was stopped to be restarted has no candidates; its caller gets :class:`GroupAborted`, as all others.
        """
        if not self.spec.returns_aborted or self._group.is_paused or not self._group.candidates:
            self.fail(GroupAborted(reason))
            return
        if self.has_ended:
            return
        rest = [c.index for c in self._group.candidates if c.alive and c.index not in self._delivered]
        size = self._group.size if self._group.is_open else len(rest)
        chosen = rest[: size - len(self._delivered)]
        self.aborted |= set(chosen)
        self._selected = len(self._delivered) + len(chosen)
        self.cancel()
        for index in chosen:
            self._deliver(index)

    def abort_candidate(self, index: int) -> asyncio.Future[OutputT | None]:
        """Stop a candidate for its caller, and return what it has generated; ``None`` if it has ended otherwise.

        The group goes on without it. All that abort the same candidate share the future: do not cancel it.
        """
        waiting = self._aborts.get(index)
        if waiting is not None and not waiting.done():
            return waiting
        output: asyncio.Future[OutputT | None] = asyncio.get_running_loop().create_future()
        if not self._is_running(index):
            output.set_result(None)
            return output
        self._aborts[index] = output
        if (running := self._running.get(index)) is not None:
            running.stop()
        elif index not in self._carried:  # one that was carried over goes on first, so that its tokens have a text
            self._feed(Lost(index, by_caller=True))
            self._answer_abort(index, self.aborted_output(self.request_of(index)[0]))
        return output

    def abort_request(self, request: RequestT) -> asyncio.Future[OutputT | None]:
        """Abort the candidate that was started for one of the group's requests, see `abort_candidate`.

        ``None`` if it does not run any more: then it may be another caller's.
        """
        for index in reversed(self._outputs):
            if self.request_of(index)[0] is request and self._is_running(index):
                return self.abort_candidate(index)
        nothing: asyncio.Future[OutputT | None] = asyncio.get_running_loop().create_future()
        nothing.set_result(None)
        return nothing

    def owns_aborted(self, request: RequestT) -> bool:
        """Whether a candidate that was started with this request was aborted, alone or with its group."""
        return any(self.request_of(index)[0] is request for index in (*self._aborts, *self.aborted))

    def aborted_output(self, request: RequestT) -> OutputT:
        """The output of a request that was aborted before anything was generated for it."""
        return self._engine.aborted_output(request)

    def fail(self, error: DartsError) -> None:
        """End the group from outside; its caller gets the error."""
        self.cancel()
        self._deliveries.put_nowait(error)

    # --- observing the group ------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether it has its outcome, though its caller may not have taken all trajectories yet."""
        return self._group.outcome is not None

    @property
    def owner(self) -> str | None:
        """Name of the caller that started it; ``None`` for callers without a key."""
        return self.recorder.owner

    @property
    def first_version(self) -> int | None:
        """The oldest weight version of its candidates since the last restart; ``None`` if none has started."""
        return self.recorder.first_version(self._group.restarted_from)

    @property
    def has_deliveries(self) -> bool:
        """Whether its caller has not taken everything that was delivered."""
        return not self._deliveries.empty()

    @property
    def candidates(self) -> Sequence[Candidate]:
        """All candidates started so far, by index, in their present state."""
        return self._group.candidates

    @property
    def size(self) -> int | None:
        """Trajectories that it returns; ``None`` while its requests are being collected."""
        return self._group.size if self._group.is_open else None

    def request_of(self, index: int) -> tuple[RequestT, int]:
        """The request that a candidate was started with, and the candidate's number within that request."""
        return self._requests.of(index)

    def candidate_record(self, index: int) -> CandidateRecord:
        """The present state of a candidate."""
        return self.recorder.record(self._group.candidates[index], self.token_count(index))

    def token_count(self, index: int) -> int:
        """Tokens that a candidate has generated so far; of a cut one, those that are kept."""
        running = self._running.get(index) if self._is_running(index) else None
        tokens = None if running is None else running.tokens()
        return self.recorder.tokens(self._group.candidates[index]) if tokens is None else tokens

    @property
    def generated_tokens(self) -> int:
        """Tokens of all candidates so far, without those that were carried over."""
        if self.record is not None:
            return self.record.generated_tokens
        return sum(map(self.token_count, range(len(self.candidates))))

    def tokens_from(self, index: int, start: int) -> TokenSlice | None:
        """Tokens of a candidate from ``start`` on; ``None`` while none are certain. Never blocks."""
        output = self._outputs[index]
        if output.done():
            return None if output.exception() else self._engine.tokens_from(output.result(), start)
        running = self._running.get(index) if self._is_running(index) else None
        generated = None if running is None else running.tokens_from(start)
        return generated if generated is None or generated.logprobs_requested else replace(generated, logprobs=None)

    # --- one candidate ------------------------------------------------------

    async def _run_candidate(self, index: int) -> None:
        carried: CarriedCandidate[OutputT] = self._carried.get(index, CarriedCandidate())
        if carried.result is not None:
            self._finish_carried(index, carried, carried.result)
            return
        try:
            await self._starts.candidate(carried.tokens)
            if not self._is_running(index):  # it was stopped while it waited
                self._on_start()
                self._set_aborted(index)
                return
            probe = None if self._group_scorer is None else self._group_scorer.probe_for(index)
            try:
                running = await (
                    self._engine.resume(*self.request_of(index), carried.prefix)
                    if carried.tokens
                    else self._engine.start(*self.request_of(index), probe)
                )
            finally:
                self._on_start()
            self._running[index] = running
            if self._cohort is not None:
                self._cohort.running += 1
            self.recorder.candidate_started(index, self._engine.weight_version, carried.version_spans)
            if self._is_running(index):
                self._feed(
                    Started(index),
                    *([Progress(index, carried.tokens)] if carried.tokens else []),
                    *([] if self._group_scorer is None else self._group_scorer.mark_started(index)),
                )
            if index in self._aborts or not self._is_running(index):  # since before the engine had started it
                running.stop()
            result = await running.result()
        except EngineError as error:
            self._handle_failure(index, error)
        else:
            self._handle_result(index, result)
        finally:
            if self._running.pop(index, None) is not None and self._cohort is not None:
                self._cohort.running -= 1

    def _finish_carried(self, index: int, carried: CarriedCandidate[OutputT], result: CandidateResult[OutputT]) -> None:
        """Handle the result of a candidate that had finished before its group was carried over."""
        self._on_start()
        version = self._engine.weight_version if carried.last_version is None else carried.last_version
        self.recorder.candidate_started(index, version, carried.version_spans)
        if self._is_running(index):
            self._feed(Started(index))
        self._handle_result(index, result, version)

    def _handle_result(self, index: int, result: CandidateResult[OutputT], weight_version: int | None = None) -> None:
        """``weight_version``: of its last token; ``None`` for that of the engine."""
        finished = result.finish_reason is not None and self._is_running(index)
        version = self._engine.weight_version if weight_version is None else weight_version
        self.recorder.candidate_ended(index, version, finished=finished)
        if self.spec.can_carry:
            self._results[index] = result
        if index in self._cuts:
            request, _ = self.request_of(index)
            self._outputs[index].set_result(self._engine.truncate(request, result.output, self._cuts[index]))
        elif index in self.aborted:
            self._set_output(index, result.output)
        elif self._is_running(index):
            if result.finish_reason is not None:
                self._outputs[index].set_result(result.output)
                self._feed(Finished(index, result.tokens, result.finish_reason))
            elif index in self._aborts:
                self.recorder.candidate_stopped(index, result.tokens)
                self._feed(Lost(index, by_caller=True))
            else:
                self._feed(Lost(index))
        is_whole = result.finish_reason is not None or index in self._cuts
        is_aborted = self._group.candidates[index].reason is DiscardReason.ABORTED  # no one else gets it
        self._answer_abort(index, None if is_whole and not is_aborted else result.output)

    def _handle_failure(self, index: int, error: EngineError) -> None:
        if index in self._cuts:
            self._fail_output(index, error)
        elif index in self.aborted:
            self._set_aborted(index)
        elif self._is_running(index):
            self._feed(Failed(index, error, retryable=isinstance(error, CandidateFailed)))

    def _carry_candidate(self, index: int) -> CarriedCandidate[OutputT]:
        result = self._results.get(index)
        if result is None:  # it has not reached the engine
            return self._carried.get(index, CarriedCandidate())
        return CarriedCandidate(
            compact(self._engine.tokens_from(result.output, 0)),
            self.recorder.version_spans(index, result.tokens),
            None if result.finish_reason is None else result,
        )

    def _was_taken(self, index: int) -> bool:
        """Whether those that have aborted a candidate have got what it had generated."""
        waiting = self._aborts.get(index)
        return waiting is not None and waiting.done() and waiting.result() is not None

    def _answer_abort(self, index: int, output: OutputT | None) -> None:
        """Answer those that have aborted a candidate, if any. ``None``: it has ended otherwise."""
        if (waiting := self._aborts.get(index)) is not None and not waiting.done():
            waiting.set_result(output)

    def _set_aborted(self, index: int) -> None:
        """Return an aborted candidate that has generated nothing."""
        if index in self.aborted:
            self._set_output(index, self.aborted_output(self.request_of(index)[0]))

    def _set_output(self, index: int, output: OutputT) -> None:
        if not self._outputs[index].done():
            self._outputs[index].set_result(output)

    def _fail_output(self, index: int, error: BaseException) -> None:
        """Fail the output that a caller may be waiting for."""
        if not self._outputs[index].done():
            self._outputs[index].set_exception(error)
            self._outputs[index].exception()  # marks it as retrieved: the caller may be gone

    def _finish_task(self, index: int, task: asyncio.Task[None]) -> None:
        """Deliver an unexpected error of a candidate's task, which nothing awaits, to the group's caller."""
        self._tasks.discard(task)
        self._answer_abort(index, None)  # it failed, or was stopped before it reached the engine
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("group %s failed", self.spec.group_id, exc_info=error)
            self._fail_output(index, error)
            self.cancel()
            self._deliveries.put_nowait(error)

    def _is_running(self, index: int) -> bool:
        return self._group.candidates[index].running

    # --- the state machine --------------------------------------------------

    def _feed(self, *events: Event) -> None:
        """Pass events to the group and carry out its decisions."""
        with self._ended_by_errors(*events):
            decisions = self._group.handle(*events)
            self._report_tokens_needed()
            self._act(decisions)

    @contextmanager
    def _ended_by_errors(self, *events: Event) -> Iterator[None]:
        """End the group if a bug of ours raises here. Its caller gets the error, and no other group is touched."""
        try:
            yield
        except Exception as error:
            logger.exception("group %s failed on %s", self.spec.group_id, events)
            self.cancel()
            self._deliveries.put_nowait(error)

    def _give_up_extra(self) -> None:
        """Give up extra candidates that the engine has no room for, until the first token of the group."""
        if self._extra is None:
            return
        # One that was given up is not asked: it has no tokens any more.
        if any(running.tokens() != 0 for index, running in self._running.items() if self._is_running(index)):
            self._extra = None
            return
        kept = self._extra.kept()
        if decisions := self._group.reduce(kept):
            if self._cohort is not None:
                self._place = self._cohort.terms.place(self._group.rule.completion_place, kept)
            self._act(decisions)

    def _report_tokens_needed(self) -> None:
        if self._cohort is not None and self._tokens_needed is None and self._group.is_open:
            self._tokens_needed = self._group.nth_shortest(self._place)
            if self._tokens_needed is not None:
                self._cohort.report_need(self, self._tokens_needed)

    def _report_minimum(self) -> None:
        """Tell the cohort, once for each limit, if this group can only be complete beyond what the others allow it."""
        if self._cohort is None or self._tokens_needed is not None or self._group.is_paused:
            return
        if (limit := self._cohort.waits_beyond) not in (None, self._beyond):
            generated = {index: running.tokens() or 0 for index, running in self._running.items()}
            minimum = self._group.nth_shortest_minimum(self._place, generated)
            if minimum is None or minimum > limit:
                self._beyond = limit
                self._cohort.report_minimum(self, minimum)

    def _reset_minimum(self) -> None:
        """Take back the reported minimum: new candidates may be short."""
        if self._cohort is not None and self._beyond is not None and self._tokens_needed is None:
            self._beyond = None
            self._cohort.report_minimum(self, 0)

    def _report_returned(self, index: int, output: OutputT) -> None:
        request, _ = self.request_of(index)
        self._observer.trajectory_returned(self.recorder.returned(index, *self._engine.token_ids(request, output)))

    def _act(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Start(indices=indices):
                    self._start(indices)
                case Stop(index=index, reason=reason):
                    if reason is DiscardReason.PRUNED and self.spec.keep_prefixes:
                        self._keep_prefix(index)
                    self._stop(index)
                case Keep(index=index) if self._group_scorer is not None:
                    self._group_scorer.record_kept(index, self._group.candidates[index].survival)
                case Cut(index=index, tokens=tokens):
                    self._cut(index, tokens)
                case Deliver(index=index):
                    self._deliver(index)
                case Complete(selection=selection):
                    self._selected = len(selection)
                    self._close()
                    for index in selection:
                        self._deliver(index)
                case GiveUp(error=error):
                    self._close(error)
                    self._deliveries.put_nowait(error)

    def _start(self, indices: tuple[int, ...]) -> None:
        loop = asyncio.get_running_loop()
        for index in indices:
            self._outputs[index] = loop.create_future()
            task = loop.create_task(self._run_candidate(index))
            self._tasks.add(task)
            task.add_done_callback(partial(self._finish_task, index))
        self.recorder.candidates_requested(len(indices))
        self._observer.candidates_started(len(indices))
        self._reset_minimum()

    def _stop(self, index: int) -> None:
        if self._group_scorer is not None:
            self._group_scorer.drop(index)
        if running := self._running.get(index):
            self.recorder.candidate_stopped(index, running.stop())

    def _keep_prefix(self, index: int) -> None:
        # The decision comes in the turn of the loop in which its tokens were read, so the candidate still has them.
        generated = self._running[index].tokens_from(0)
        assert generated is not None
        end = self._group.candidates[index].checkpoints[-1].tokens
        has_logprobs = generated.logprobs is not None and generated.logprobs_requested
        logprobs = generated.logprobs[:end] if has_logprobs and generated.logprobs is not None else None
        self.prefixes[index] = TokenSlice(generated.token_ids[:end], logprobs)

    def _cut(self, index: int, tokens: int) -> None:
        output = self._outputs[index]
        if not output.done():
            if index not in self._cuts:
                self._running[index].stop()
                self.recorder.candidate_ended(index, self._engine.weight_version, finished=False)
            self._cuts[index] = tokens
        elif output.exception() is None:
            request, _ = self.request_of(index)
            self._outputs[index] = asyncio.get_running_loop().create_future()
            self._outputs[index].set_result(self._engine.truncate(request, output.result(), tokens))

    def _deliver(self, index: int) -> None:
        if index not in self._delivered:
            self._delivered.add(index)
            self._deliveries.put_nowait(index)

    def _close(self, error: Exception | None = None) -> None:
        """Record and report the group's end, once."""
        if not self.has_ended or self.recorder.closed:
            return
        try:
            self.record = self.recorder.close(self._group, error, self._cohort, self._tokens_needed)
            self._observer.group_ended(self.record)
        finally:  # an observer that fails must not make others wait
            if self._group_scorer is not None:
                self._group_scorer.close(self._group.candidates)
            self._on_end(self)
            if self._cohort is not None:
                self._cohort.end_group(self, self.record)
