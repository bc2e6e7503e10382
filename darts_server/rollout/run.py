"""One group on an engine: starts its candidates, feeds the state machine, does what it decides."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic

from darts_server.engine.port import Ended, Engine, Generated, OutputT, RequestT, Running
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
from darts_server.policy.group import Group
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.selection.rules import SelectionRule
from darts_server.rollout.allocation.cohort import Allocation, Cohort
from darts_server.rollout.candidate_requests import CandidateRequests
from darts_server.rollout.ledger import Ledger
from darts_server.rollout.observers.base import GroupObserver
from darts_server.rollout.pruning.group_scorer import GroupScorer
from darts_server.rollout.pruning.scorer import CandidateScorer
from darts_server.types import CandidateRecord, GroupRecord, Returned

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trajectory(Generic[OutputT]):
    """A trajectory that belongs to the group. ``last``: the group is complete with it."""

    index: int
    output: OutputT
    last: bool


class GroupRun(Generic[RequestT, OutputT]):
    """Drives one group from its first candidate to its end.

    Each candidate has a task that starts it and waits for its end. Everything else happens synchronously in whichever
    task or timer brings the news, so a stop reaches the engine in the same turn of the loop.
    """

    def __init__(
        self,
        engine: Engine[RequestT, OutputT],
        request: RequestT,
        group: Group,
        ledger: Ledger,
        observer: GroupObserver,
        on_end: Callable[[], None],
        on_return: Callable[[Returned], None] = lambda _: None,
        scorer: CandidateScorer | None = None,
        pruning: Pruning | None = None,
    ) -> None:
        """With both a ``scorer`` and ``pruning`` its candidates are scored."""
        self._engine = engine
        self._requests = CandidateRequests(request)
        self._group = group
        self._batch: Cohort | None = None
        self._place = 1
        self._needed: int | None = None
        self._returned: int | None = None
        self._ledger = ledger
        self._observer = observer
        self._on_end = on_end
        self._on_return = on_return
        self._running: dict[int, Running[OutputT]] = {}
        self._group_scorer: GroupScorer | None = None
        if scorer is not None and pruning is not None:
            self._group_scorer = GroupScorer(scorer, ledger.group_id, pruning, self._running, self._feed)
        self._outputs: dict[int, asyncio.Future[OutputT]] = {}
        self._cuts: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._news: asyncio.Queue[int | BaseException] = asyncio.Queue()
        self._told: set[int] = set()
        self.record: GroupRecord | None = None
        """What became of it; ``None`` before it has ended."""

    # --- for the caller -----------------------------------------------------

    def answers(self, name: str) -> None:
        """Note one more request, or name for the group, in its record."""
        self._ledger.members += (name,)

    def gather(self, request: RequestT) -> None:
        """Start a candidate with a request of its own, before the group's size is known."""
        self._requests.own(len(self._group.candidates), request)
        self._act(self._group.add_candidate())

    def halt(self) -> bool:
        """Stop all candidates, for as many that `go_on` starts; whether nothing of it is to be waited for."""
        if self._group.can_restart:
            self._requests.halt(c.index for c in self._group.candidates if c.alive)
            self._ledger.restarted()
            self._act(self._group.restart())
        return self._group.is_paused or self.ended

    def go_on(self) -> None:
        """Start candidates anew, after `halt`. Harmless if there was none."""
        self._requests.go_on(len(self._group.candidates))
        self._act(self._group.resume())

    @property
    def ended(self) -> bool:
        """Whether it has its outcome, though its trajectories may still be on their way to the caller."""
        return self._group.outcome is not None

    @property
    def waiting(self) -> bool:
        """Whether there is news that its caller has not taken yet."""
        return not self._news.empty()

    def open(self, rule: SelectionRule, grant: Allocation, most: int = 0) -> None:
        """Start what is missing of the candidates that were granted; ``rule`` chooses among them.

        ``most``: candidates up to which pruned ones are replaced.
        """
        if self.ended:  # it failed while it gathered
            if grant.batch is not None:
                grant.batch.dropped()
            return
        self._batch = grant.batch
        if self._batch is not None:
            self._place = self._batch.terms.place(rule.size, grant.candidates)
            self._batch.join(self)
        decisions = self._group.open(rule, grant.candidates, most)
        self._tell_batch()
        self._act(decisions)

    async def trajectories(self) -> AsyncGenerator[Trajectory[OutputT], None]:
        """Each trajectory of an open group once it is known to belong: as many as its rule returns.

        Leaving early, by cancellation or by closing the iterator, stops all candidates.

        Raises:
            EngineError: of the last candidate that failed, if too few could finish.
            GroupFailed, GroupAborted
        """
        given = 0
        try:
            while True:
                index = await self._news.get()
                if isinstance(index, BaseException):
                    raise index
                given += 1
                output = await asyncio.shield(self._outputs[index])  # one who leaves must not cancel what is to come
                self._on_return(self._ledger.returned(index, *self._engine.token_ids(self._asked(index)[0], output)))
                returned = self._group.size if self._returned is None else self._returned
                yield Trajectory(index, output, last=given == returned)
                if given == returned:
                    return
        finally:
            self.leave()

    def leave(self) -> None:
        """The caller is gone or has all it asked for: stop what still runs, unless it runs to be watched."""
        if not self._group.all_delivered:
            self.close()

    def enough(self) -> None:
        """The caller needs no more than what it was given: stop the rest."""
        self._act(self._group.end_decided())
        self._end()

    def limit(self, tokens: int) -> None:
        """The batch's deadline is known."""
        self._feed(DeadlineSet(tokens))

    def close(self) -> None:
        """Stop whatever still runs. Synchronous, so that it also works while the caller is being cancelled."""
        self._act(self._group.cancel())
        self._end()

    def abort(self, why: str = "the request was aborted while its group was running") -> None:
        """End the group from outside; the caller gets :class:`GroupAborted`."""
        self.fail(GroupAborted(why))

    def fail(self, error: DartsError) -> None:
        """End the group from outside, with that error for its caller."""
        self.close()
        self._news.put_nowait(error)

    def peek(self) -> None:
        """Report the progress of candidates that reached the count at which it matters, and have others scored."""
        events = [
            Progress(index, tokens)
            for index, tokens_due in self._group.check_at.items()
            if (running := self._running.get(index)) is not None
            and (tokens := running.tokens()) is not None
            and tokens >= tokens_due
        ]
        scores = [] if self._group_scorer is None else self._group_scorer.poll()
        if events or scores:
            self._feed(*events, *scores)

    # --- for who follows its tokens -----------------------------------------

    @property
    def candidates(self) -> Sequence[Candidate]:
        """All that were started so far, by index, as they stand now."""
        return self._group.candidates

    @property
    def ledger(self) -> Ledger:
        """What is written down about it."""
        return self._ledger

    @property
    def size(self) -> int | None:
        """Trajectories that it returns; ``None`` while it gathers candidates."""
        return self._group.size if self._group.is_open else None

    def candidate(self, index: int) -> CandidateRecord:
        """A candidate as it stands now."""
        return self._ledger.record(self._group.candidates[index], self.tokens(index))

    def tokens(self, index: int) -> int:
        """Tokens that a candidate is known to have generated; of one that was cut, those that are kept."""
        running = self._running.get(index) if self._in_play(index) else None
        now = None if running is None else running.tokens()
        return self._ledger.tokens(self._group.candidates[index]) if now is None else now

    def generated(self, index: int, start: int) -> Generated | None:
        """Tokens of a candidate from ``start`` on; ``None`` while nothing certain is at hand. Never blocks."""
        output = self._outputs[index]
        if output.done():
            return None if output.exception() else self._engine.generated(output.result(), start)
        running = self._running.get(index) if self._in_play(index) else None
        generated = None if running is None else running.generated(start)
        return generated if generated is None or generated.asked else replace(generated, logprobs=None)

    # --- one candidate ------------------------------------------------------

    async def _drive(self, index: int) -> None:
        try:
            probe = None if self._group_scorer is None else self._group_scorer.probe_for(index)
            running = await self._engine.start(*self._asked(index), probe)
            self._running[index] = running
            self._ledger.started(index, self._engine.weight_version)
            if self._in_play(index):
                self._feed(
                    Started(index), *([] if self._group_scorer is None else self._group_scorer.mark_started(index))
                )
            else:
                running.stop()
            ended = await running.ended()
        except EngineError as error:
            self._fail(index, error)
        else:
            self._take(index, ended)
        finally:
            self._running.pop(index, None)

    def _take(self, index: int, ended: Ended[OutputT]) -> None:
        by_itself = ended.reason is not None and self._in_play(index)
        self._ledger.ended(index, self._engine.weight_version, by_itself=by_itself)
        if index in self._cuts:
            self._outputs[index].set_result(self._engine.cut(self._asked(index)[0], ended.output, self._cuts[index]))
        elif self._in_play(index):
            if ended.reason is None:
                self._feed(Lost(index))
            else:
                self._outputs[index].set_result(ended.output)
                self._feed(Finished(index, ended.tokens, ended.reason))

    def _fail(self, index: int, error: EngineError) -> None:
        if index in self._cuts:
            self._spoil(index, error)
        elif self._in_play(index):
            self._feed(Failed(index, error, retryable=isinstance(error, CandidateFailed)))

    def _spoil(self, index: int, error: BaseException) -> None:
        """What the caller was told to wait for will not come."""
        if not self._outputs[index].done():
            self._outputs[index].set_exception(error)
            self._outputs[index].exception()  # the caller may be gone

    def _reap(self, index: int, task: asyncio.Task[None]) -> None:
        """Nobody waits for a candidate's task, so what it did not expect is told to the caller here."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("group %s failed", self._ledger.group_id, exc_info=error)
            self._spoil(index, error)
            self.close()
            self._news.put_nowait(error)

    def _in_play(self, index: int) -> bool:
        return self._group.candidates[index].running

    def _asked(self, index: int) -> tuple[RequestT, int]:
        """The request behind a candidate, and which of that request's candidates it is."""
        return self._requests.of(index)

    # --- the group ----------------------------------------------------------

    def _feed(self, *events: Event) -> None:
        """Let the group hear, and act on it."""
        try:
            decisions = self._group.handle(*events)
            self._tell_batch()
            self._act(decisions)
        except Exception as error:
            # A fault of ours. It ends this group, told to its caller, and no other.
            logger.exception("group %s failed on %s", self._ledger.group_id, events)
            self.close()
            self._news.put_nowait(error)

    def _tell_batch(self) -> None:
        if self._batch is not None and self._needed is None and self._group.is_open:
            self._needed = self._group.nth_shortest(self._place)
            if self._needed is not None:
                self._batch.needs(self, self._needed)

    def _act(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Start(indices=indices):
                    self._start(indices)
                case Stop(index=index):
                    self._stop(index)
                case Keep(index=index, survival=survival) if self._group_scorer is not None:
                    self._group_scorer.record_kept(index, survival)
                case Cut(index=index, tokens=tokens):
                    self._cut(index, tokens)
                case Deliver(index=index):
                    self._tell(index)
                case Complete(selection=selection):
                    self._returned = len(selection)
                    self._end()
                    for index in selection:
                        self._tell(index)
                case GiveUp(error=error):
                    self._end(error)
                    self._news.put_nowait(error)

    def _start(self, indices: tuple[int, ...]) -> None:
        loop = asyncio.get_running_loop()
        for index in indices:
            self._outputs[index] = loop.create_future()
            task = loop.create_task(self._drive(index))
            self._tasks.add(task)
            task.add_done_callback(partial(self._reap, index))
        self._ledger.requested(len(indices))
        self._observer.candidates_started(len(indices))

    def _stop(self, index: int) -> None:
        if self._group_scorer is not None:
            self._group_scorer.drop(index)
        if running := self._running.get(index):
            self._ledger.stopped(index, running.stop())

    def _cut(self, index: int, tokens: int) -> None:
        output = self._outputs[index]
        if output.done():
            self._outputs[index] = asyncio.get_running_loop().create_future()
            self._outputs[index].set_result(self._engine.cut(self._asked(index)[0], output.result(), tokens))
        else:
            self._cuts[index] = tokens
            self._running[index].stop()
            self._ledger.ended(index, self._engine.weight_version, by_itself=False)

    def _tell(self, index: int) -> None:
        if index not in self._told:
            self._told.add(index)
            self._news.put_nowait(index)

    def _end(self, error: Exception | None = None) -> None:
        if not self.ended or self._ledger.closed:
            return
        try:
            explored = self._batch if self._batch is not None and self._batch.terms.explored else None
            deadline = self._group.deadline if explored is None else explored.tokens
            self.record = self._ledger.close(self._group, error, deadline, explored is not None, self._needed)
            self._observer.group_ended(self.record)
        finally:  # a fault in what hears of it is no reason for others to wait
            if self._group_scorer is not None:
                self._group_scorer.close(self._group.candidates)
            self._on_end()
            if self._batch is not None:
                self._batch.ended(self, self.record)
