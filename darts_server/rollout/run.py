"""Run one group on an engine: feed its state machine, carry out its decisions, deliver to its caller."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np

from darts_server.caller import caller
from darts_server.engine.port import OutputT, RequestT
from darts_server.exceptions import DartsError, GroupAborted
from darts_server.group.candidate import Candidate
from darts_server.group.events import Complete, Cut, DeadlineSet, Decision, Deliver, Event, GiveUp, Keep, Start, Stop
from darts_server.group.group import Group, sampled_from, selection_weights, tail_share
from darts_server.group.selection import SelectionRule
from darts_server.policy.deadline import place_of_need
from darts_server.records import GroupRecord, TrajectoryRecord
from darts_server.rollout.allocation.cohort import Allocation, Cohort
from darts_server.rollout.candidates import CandidateRunner, CarriedCandidate
from darts_server.rollout.spec import GroupContext, GroupSpec, OnAbort
from darts_server.rollout.start_queue import StartingOrder
from darts_server.serving.admission import Ticket
from darts_server.types import DiscardReason, Outcome

logger = logging.getLogger(__name__)

SURVIVAL_STREAM = (1,)
"""Keeps survival draws apart from tail draws, so that the tail is the same with and without pruning."""


@dataclass(frozen=True, slots=True)
class Trajectory(Generic[OutputT]):
    """A trajectory of the group. ``last``: it is the last one for the caller."""

    index: int
    output: OutputT
    last: bool


class GroupRun(Generic[RequestT, OutputT]):
    """Run one group from its first candidate to its end.

    Only `runner` waits for the engine, in a task for each candidate. Everything else happens synchronously, in the task
    or timer that an event arrives in, so that a stop reaches the engine in the same turn of the event loop.

    ``on_end`` is called once when the group has ended, with any outcome. ``ticket``: holds its candidates. ``carried``:
    what its first candidates have generated already, by index. ``order``: of its candidates among those of others that
    wait. ``earlier_pass_rate``: see `GroupRecord.earlier_pass_rate`.
    """

    def __init__(
        self,
        context: GroupContext[RequestT, OutputT],
        spec: GroupSpec[RequestT],
        ticket: Ticket,
        on_end: Callable[["GroupRun[RequestT, OutputT]"], None],
        carried: Sequence[CarriedCandidate[OutputT]] = (),
        order: StartingOrder = lambda _: 0.0,
        earlier_pass_rate: float | None = None,
    ) -> None:
        self.spec = spec
        self.started_at = context.clock()
        self.owner = caller.get().name  # the group may end in the context of another request
        self.request_ids: tuple[str, ...] = ()
        """Of the requests that it answers, and other names that it can be looked up by."""
        self.record: GroupRecord | None = None
        """The group's record; ``None`` until it has ended."""
        self.interrupted: DartsError | None = None
        """Why it was ended from outside; ``None`` if it was not, or if its caller had all of it by then."""
        self.is_surplus = False
        """Whether it was stopped to be carried over, as its batch had enough groups."""
        self.engine = context.engine
        self._observer, self._clock = context.observer, context.clock
        self._on_end = on_end
        self._is_closed = False
        survival = None
        if spec.plan.shaping.prunes:
            survival = np.random.default_rng(np.random.SeedSequence(spec.tail_seed, spawn_key=SURVIVAL_STREAM))
        rng = np.random.default_rng(spec.tail_seed)
        self._group = Group(rng=rng, deliver_early=spec.early, survival_rng=survival)
        self.candidates: Sequence[Candidate] = self._group.candidates
        """All that were started so far, by index, in their present state."""
        self.runner = CandidateRunner(
            context, spec, self.owner, self._group, ticket, self._feed, self._handle_bug, carried, order
        )
        self._cohort: Cohort | None = None  # one that was allocated alone has none
        self._need_place = 1  # see `place_of_need`
        self._tokens_needed: int | None = None  # as reported to the cohort
        self._reported_limit: int | None = None  # the `CohortDeadline.pending_bound` for which a minimum was reported
        self._earlier_pass_rate = earlier_pass_rate
        self._selected: int | None = None
        self.deliveries: asyncio.Queue[int | Exception] = asyncio.Queue()
        """What its caller has not taken yet: indices of candidates, and an error."""

    # --- driving the group --------------------------------------------------

    def add_candidate(self, request: RequestT) -> None:
        """Start a candidate with a request of its own, before the group's size is known."""
        self.runner.own_requests.append(request)
        self._act(self._group.add_candidate())

    def open(self, rule: SelectionRule, allocation: Allocation) -> None:
        """Start the missing candidates of the allocation; ``rule`` selects among all of them."""
        if self._group.outcome is not None:  # it failed while its requests were being collected
            allocation.drop()
            return
        if (cohort := allocation.cohort) is not None:
            self._cohort = cohort
            place, mean = rule.completion_place, cohort.record.mean_candidates
            self._need_place = place_of_need(place, allocation.candidates, mean)
            cohort.join(self, self.set_deadline)
        self._act(self._group.open(rule, allocation.candidates))

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
                index = await self.deliveries.get()
                if isinstance(index, Exception):
                    raise index
                count += 1
                candidate = self.runner.candidates[index]
                # A caller that is cancelled here must not cancel the future, which the candidate's task still sets.
                output = await asyncio.shield(candidate.output)
                if not candidate.aborted:
                    spec, token_ids = self.spec, self.engine.token_ids(candidate.request, output)
                    self._observer.trajectory_returned(
                        TrajectoryRecord(
                            spec.group_id, spec.prompt_key, self.started_at, index, *token_ids, owner=self.owner
                        )
                    )
                selected = self._group.rule.size if self._selected is None else self._selected
                yield Trajectory(index, output, last=count == selected)
                if count == selected:
                    return
        finally:
            self.cancel()

    def suspend(self) -> bool:
        """Stop all candidates, to start as many again in `resume`; whether nothing of the group still runs."""
        if self._group.can_restart:
            self.runner.suspend()
            self._act(self._group.restart())
        return self._group.is_paused or self.has_ended

    def resume(self) -> None:
        """Start new candidates after `suspend`. Harmless if the group was not suspended."""
        self._act(self._group.resume())

    def set_deadline(self, tokens: int, bound: int | None = None) -> None:
        """Apply the cohort's deadline, and the length at which every candidate is cut."""
        self._feed(DeadlineSet(tokens, bound))

    def poll(self) -> None:
        """Feed the progress of candidates that reached a count at which it matters, and scores of others."""
        try:
            if (
                self._cohort is not None
                and (limit := self._cohort.deadline.pending_bound) not in (None, self._reported_limit)
                and self._tokens_needed is None
                and not self._group.is_paused
            ):
                # Report, once for each limit, if this group can only be complete beyond what the others allow it.
                generated = {index: engine.tokens() or 0 for index, engine in self.runner.running.items()}
                minimum = self._group.standings.nth_shortest_minimum(self._need_place, generated)
                if minimum is None or minimum > limit:
                    self._reported_limit = limit
                    self._cohort.report_minimum(self, minimum)
            if events := self.runner.poll():
                self._feed(*events)
        except Exception as error:
            self._handle_bug(error)

    def finish_early(self) -> None:
        """End the group with the trajectories delivered so far, and stop the rest."""
        self._act(self._group.end_decided())
        self._close()

    def cancel(self, error: Exception | None = None, reason: DiscardReason = DiscardReason.CANCELLED) -> None:
        """Stop whatever still runs. Synchronous, so that it works while the caller is being cancelled.

        ``error``: why, for its record, if it was ended from outside.
        """
        self._act(self._group.cancel(reason))
        self._close(error)

    def stop_to_carry(self, error: DartsError | None = None) -> None:
        """End the group, so that another run goes on with what `CandidateRunner.collect_carried` returns.

        It must not have ended: it was counted. ``error``: why, for its record, if it was ended from outside.
        """
        assert not self.has_ended
        self._act(self._group.carry())
        self._close(error)

    def abort(self, reason: str = "the request was aborted while its group was running") -> None:
        """End the group from outside, see `interrupt`."""
        self.interrupt(GroupAborted(reason))

    def interrupt(self, error: DartsError, on_abort: OnAbort | None = None) -> None:
        """End the group from outside, unless its caller has all of it already.

        What its caller gets beside the error says its spec, or ``on_abort``. Nothing is chosen by length. A group that
        was stopped to be restarted has no candidates; its caller gets the error alone.
        """
        if self.has_ended:
            return
        self.interrupted = error
        has_candidates = self._group.candidates and not self._group.is_paused
        candidates = self.runner.candidates
        delivered = self._group.delivered
        undelivered = [c for c in candidates if c.state.alive and c.state.index not in delivered]
        match (on_abort or self.spec.on_abort) if has_candidates else OnAbort.FAIL:
            case OnAbort.FAIL:
                self.fail(error)
            case OnAbort.ANSWER:  # as many as its caller waits for, those that were started first
                if self._group.is_open:
                    undelivered = undelivered[: self._group.rule.size - len(delivered)]
                self._selected = len(delivered) + len(undelivered)
                for candidate in undelivered:
                    candidate.aborted = True
                self.cancel(error)
                for candidate in undelivered:
                    self.deliveries.put_nowait(candidate.state.index)
            case OnAbort.RETURN:
                for candidate in undelivered:
                    candidate.aborted = True
                self.cancel(error, DiscardReason.ABORTED)
                self.deliveries.put_nowait(error)
            case OnAbort.CARRY:
                self.stop_to_carry(error)
                self.deliveries.put_nowait(error)

    async def aborted_outputs(self) -> dict[int, OutputT]:
        """Return what the candidates of a group have generated that was aborted, with those that it had delivered.

        Without those that failed: their errors are of no concern to the others.
        """
        found: dict[int, OutputT] = {}
        for index, candidate in enumerate(self.runner.candidates):
            if candidate.aborted or index in self._group.delivered:
                try:
                    found[index] = await asyncio.shield(candidate.output)
                except Exception as error:
                    logger.warning("candidate %d of group %s failed: %r", index, self.spec.group_id, error)
        return found

    def fail(self, error: Exception) -> None:
        """End the group from outside; its caller gets the error."""
        self.cancel(error)
        self.deliveries.put_nowait(error)

    # --- observing the group ------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether it has its outcome, though its caller may not have taken all trajectories yet."""
        return self._group.outcome is not None

    @property
    def is_complete(self) -> bool:
        """Whether its trajectories were selected, though its caller may not have taken all of them yet."""
        return self._group.outcome is Outcome.COMPLETED

    @property
    def size(self) -> int | None:
        """Trajectories that it returns; ``None`` while its requests are being collected."""
        return self._group.rule.size if self._group.is_open else None

    # --- the state machine --------------------------------------------------

    def _feed(self, *events: Event) -> None:
        """Pass events to the group and carry out its decisions."""
        quota = self.spec.quota
        try:
            if quota is not None and not quota.left and not self.has_ended:
                # Groups may finish in one step of the engine. One that is complete is counted, and could not go on in
                # another batch. So stop it before its state machine handles this event; the candidate that has just
                # finished is carried over with its whole answer.
                self.is_surplus = True
                self.stop_to_carry()
                self.deliveries.put_nowait(GroupAborted("enough other groups of its batch are complete"))
                return
            self._act(self._group.handle(*events))
        except Exception as error:
            self._handle_bug(error, *events)

    def _handle_bug(self, error: Exception, *events: Event) -> None:
        """End the group after an error of ours. Its caller gets the error, and no other group is touched."""
        logger.error("group %s failed%s", self.spec.group_id, f" on {events}" if events else "", exc_info=error)
        self.fail(error)

    def _act(self, decisions: list[Decision]) -> None:
        """Report how many tokens the group needs, once that is known, and carry out its decisions."""
        if self._cohort is not None and self._tokens_needed is None and self._group.is_open:
            self._tokens_needed = self._group.standings.nth_shortest(self._need_place)
            if self._tokens_needed is not None:
                self._cohort.report_need(self, self._tokens_needed)
            elif self._reported_limit is not None and (
                self._group.is_paused or any(isinstance(decision, Start) for decision in decisions)
            ):  # new candidates may be short
                self._reported_limit = None
                self._cohort.report_minimum(self, 0)
        for decision in decisions:
            match decision:
                case Start(indices=indices):
                    self.runner.start(indices)
                    self._observer.candidates_started(len(indices))
                case Stop(index=index):
                    self.runner.stop(index)
                case Keep(index=index) if self.runner.scorer is not None:
                    self.runner.scorer.record_kept(index, self._group.candidates[index].survival)
                case Cut(index=index, tokens=tokens):
                    self.runner.cut(index, tokens)
                case Deliver(index=index):
                    self.deliveries.put_nowait(index)
                case Complete(selection=selection):
                    self._selected = len(selection)
                    if self.spec.quota is not None:
                        self.spec.quota.left -= 1
                    self._close()
                    for index in selection:
                        if index not in self._group.delivered:
                            self.deliveries.put_nowait(index)
                case GiveUp(error=error):
                    self._close(error)
                    self.deliveries.put_nowait(error)

    def _close(self, error: Exception | None = None) -> None:
        """Record and report the group's end, once."""
        group, spec, now, cohort = self._group, self.spec, self._clock(), self._cohort
        if group.outcome is None or self._is_closed:
            return
        self._is_closed = True
        try:
            explored, rule = cohort is not None and cohort.record.explored, None if cohort is None else cohort.rule
            deadline, bound = group.deadline, group.bound
            if cohort is not None and explored:  # what they would have been
                deadline = cohort.deadline.tokens
                bound = None if rule is None or deadline is None else rule.bound_of(deadline)
            weights, indices = selection_weights(group), range(len(self.runner.candidates))
            tail_wait, finish_times = None, self.runner.finish_times
            if group.outcome is Outcome.COMPLETED and len(finish_times) >= group.rule.num_shortest:
                tail_wait = now - finish_times[group.rule.num_shortest - 1]
            self.record = GroupRecord(
                group_id=spec.group_id,
                prompt_key=spec.prompt_key,
                policy=spec.plan.policy,
                size=group.rule.size if group.is_open else len(group.candidates),
                outcome=group.outcome,
                # What happens to stopped candidates from now on does not change their records.
                candidates=tuple(map(self.runner.record, indices, map(weights.get, indices))),
                started_at=self.started_at,
                ended_at=now,
                tail_wait=tail_wait,
                error=None if error is None else str(error),
                cohort_deadline=deadline,
                max_lost=None if rule is None else rule.max_lost,
                bound=bound,
                stretch=1.0 if rule is None or deadline is None else rule.stretch,
                completion_length=group.standings.nth_shortest(group.rule.completion_place) if group.is_open else None,
                num_shortest=group.rule.num_shortest if weights and group.rule.samples_rest else None,
                sampled_from=sampled_from(group),
                tail_share=tail_share(group),
                earlier_pass_rate=self._earlier_pass_rate,
                explored=explored,
                tokens_needed=self._tokens_needed,
                request_ids=self.request_ids,
                chosen=None if cohort is None else cohort.record.chosen,
                restarted_from=group.restarted_from,
                owner=self.owner,
                prompt_tokens=spec.tokens.prompt,
                max_tokens=spec.tokens.most,
            )
            self._observer.group_ended(self.record)
        finally:  # an observer that fails must not make others wait
            if self.runner.scorer is not None:
                self.runner.scorer.close(self._group.candidates)
            self._on_end(self)
            if self._cohort is not None:
                self._cohort.end_group(self, self.record)
