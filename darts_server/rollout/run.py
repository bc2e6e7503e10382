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
from darts_server.group.events import (
    Complete,
    Cut,
    DeadlineSet,
    Decision,
    Deliver,
    Event,
    Finished,
    GiveUp,
    Keep,
    Rewarded,
    Start,
    Stop,
)
from darts_server.group.group import Group, advantages, selection_weights
from darts_server.group.informative import have_equal_rewards
from darts_server.group.selection import SelectionRule
from darts_server.records import CandidateRecord, GroupRecord, TrajectoryRecord
from darts_server.rollout.allocation.cohort import Allocation, CohortMember
from darts_server.rollout.candidates import CandidateRunner, CarriedCandidate
from darts_server.rollout.group_record import make_group_record
from darts_server.rollout.spec import GroupContext, GroupSpec, OnAbort
from darts_server.rollout.start_queue import StartingOrder
from darts_server.rollout.verification import Verification
from darts_server.serving.admission import Ticket
from darts_server.types import DiscardReason, Outcome
from darts_server.verify.types import NO_VERDICT

logger = logging.getLogger(__name__)

MAX_TOKENS_BETWEEN_POLLS = 40
"""2,000 tokens a second, with a poll every 20 ms. A faster candidate is stopped later."""
MAX_SKIPPED_POLLS = 5
"""A busy event loop polls less often, so candidates get further between two polls."""

SURVIVAL_STREAM = (1,)


@dataclass(frozen=True, slots=True)
class Trajectory(Generic[OutputT]):
    index: int
    output: OutputT
    last: bool


class GroupRun(Generic[RequestT, OutputT]):
    """Runs a group on an engine: feeds its state machine, and carries out the decisions.

    Only `runner` waits for the engine, in one task per candidate. Everything else is synchronous, so a stop reaches the
    engine at once.

    Args:
        ticket: holds the group's candidates.
        on_end: called once, with any outcome.
        carried: tokens that the first candidates resume from, by index.
        earlier_pass_rate: see `GroupRecord`.
    """

    def __init__(
        self,
        context: GroupContext[RequestT, OutputT],
        spec: GroupSpec[RequestT],
        ticket: Ticket,
        on_end: Callable[["GroupRun[RequestT, OutputT]"], None],
        carried: Sequence[CarriedCandidate[OutputT]] = (),
        starting_order: StartingOrder = lambda _: 0.0,
        earlier_pass_rate: float | None = None,
    ) -> None:
        self.spec = spec
        self.engine = context.engine
        self.started_at = context.clock()
        # Read now, because the group may end in the context of another request.
        self.owner = caller.get().name
        self.request_ids: tuple[str, ...] = ()
        """Ids and other names that the group can be looked up by."""
        self.record: GroupRecord | None = None
        self.interrupted: DartsError | None = None
        """Error that ended the group from outside."""
        self.is_surplus = False
        """Whether the group was carried over because its batch had enough groups."""
        self.has_used_quota = False
        """Whether the group has lowered `Quota.missing_groups`."""
        self.polls_to_skip = 0
        """Number of next polls that cannot find anything, unless an event arrives."""
        self._is_poll_scheduled = False
        self._observer = context.observer
        self._clock = context.clock
        self._ticket = ticket
        self._on_end = on_end
        self._is_closed = False

        # Survival has a generator of its own, so that pruning does not change the sampled tail.
        survival_rng = None
        if spec.plan.shaping.prunes:
            survival_rng = np.random.default_rng(np.random.SeedSequence(spec.tail_seed, spawn_key=SURVIVAL_STREAM))
        tail_rng = np.random.default_rng(spec.tail_seed)
        self._group = Group(
            rng=tail_rng,
            deliver_early=spec.delivers_early,
            survival_rng=survival_rng,
            waits_for_rewards=spec.only_informative,
            stops_when_decided=spec.stops_when_decided,
        )
        self.verification = Verification(spec.group_id, spec.verify, self._handle_verdict)
        self.candidates: Sequence[Candidate] = self._group.candidates
        self.runner = CandidateRunner(
            context,
            spec,
            self.owner,
            self._group,
            ticket,
            on_events=self._handle_events,
            on_bug=self._handle_bug,
            carried=carried,
            starting_order=starting_order,
        )
        self._earlier_pass_rate = earlier_pass_rate

        self.member: CohortMember | None = None
        """None for a group that was allocated alone."""

        # Number of trajectories for the caller, or None until the group ends.
        self._num_returned: int | None = None
        self.deliveries: asyncio.Queue[int | Exception] = asyncio.Queue()
        """Indices of candidates, or an error, for the caller."""

    # --- driving the group --------------------------------------------------

    def add_candidate(self, request: RequestT) -> None:
        """Start a candidate with its own request, before the group's size is known."""
        self.runner.own_requests.append(request)
        self._apply_decisions(self._group.add_candidate())

    def open(self, rule: SelectionRule, allocation: Allocation) -> None:
        """Join the cohort, and start the missing candidates of the allocation."""
        # The group may have failed while its requests were collected.
        if self.has_ended:
            allocation.drop()
            return
        if allocation.cohort is not None:
            self.member = CohortMember(
                allocation.cohort,
                self._group,
                rule.completion_place,
                allocation.candidates,
                self.set_deadline,
            )
        self._apply_decisions(self._group.open(rule, allocation.candidates))

    async def trajectories(self) -> AsyncGenerator[Trajectory[OutputT], None]:
        """Yield each trajectory once it is certain to be in the group. Leaving early stops all candidates.

        Raises:
            EngineError: error of the last failed candidate, if too few candidates could finish.
            GroupFailed, GroupAborted
        """
        num_yielded = 0
        try:
            while num_yielded != self._num_returned:
                index = await self.deliveries.get()
                if isinstance(index, Exception):
                    raise index
                num_yielded += 1
                candidate = self.runner.candidates[index]
                # Without the shield, a cancelled caller would cancel the future that the candidate's task still sets.
                output = await asyncio.shield(candidate.output)
                if not candidate.aborted:
                    prompt_ids, token_ids = self.engine.token_ids(candidate.request, output)
                    self._observer.trajectory_returned(
                        TrajectoryRecord(
                            self.spec.group_id,
                            self.spec.prompt_key,
                            self.started_at,
                            index,
                            prompt_ids,
                            token_ids,
                            self.owner,
                        )
                    )
                # Before the end, the group has the rule's size.
                num_expected = self._group.rule.size if self._num_returned is None else self._num_returned
                is_last = num_yielded == num_expected
                yield Trajectory(index, output, is_last)
                if is_last:
                    return
        finally:
            self.cancel()

    def suspend(self) -> None:
        """Stop candidates until `resume`, if the group can be restarted."""
        if self._group.can_restart:
            self.runner.prepare_restart()
            self.verification.restart()
            self._apply_decisions(self._group.restart())

    @property
    def needs_engine(self) -> bool:
        if self._group.is_paused or self.has_ended:
            return False
        # A group that waits for verdicts alone needs no engine. Verifiers may take longer than an update.
        return bool(self._group.selector.running_by_length or self.runner.running)

    def resume(self) -> None:
        self._apply_decisions(self._group.resume())

    def set_deadline(self, tokens: int, cut_length: int | None = None) -> None:
        self._handle_events(DeadlineSet(tokens, cut_length))

    def poll(self) -> None:
        """Report tokens and scores of the running candidates to the group and its cohort."""
        try:
            needs_every_poll = self.runner.scorer is not None
            if self.member is not None and self.member.may_exceed_cut_length:
                needs_every_poll = True
                self.member.report_if_over_cut_length(
                    lambda: {index: running.count_tokens() or 0 for index, running in self.runner.running.items()}
                )
            events = self.runner.poll()
            if events:
                self._handle_events(*events)
            elif not needs_every_poll:
                # Polls take much of the time of a process that serves many engines. No candidate reaches its check
                # before the last skipped poll.
                self.polls_to_skip = min(self.runner.tokens_until_check // MAX_TOKENS_BETWEEN_POLLS, MAX_SKIPPED_POLLS)
        except Exception as error:
            self._handle_bug(error)

    def end_with_delivered(self) -> None:
        self._apply_decisions(self._group.end_as_decided())
        self._close()

    def cancel(self, error: Exception | None = None, reason: DiscardReason = DiscardReason.CANCELLED) -> None:
        """``error``: recorded as the cause."""
        # Nothing is awaited, so this works while the caller is being cancelled.
        self._apply_decisions(self._group.cancel(reason))
        self._close(error)

    def stop_to_carry(self, error: DartsError | None = None) -> None:
        """End a running group for `CandidateRunner.collect_carried`."""
        # An ended group was counted in its batch.
        assert not self.has_ended
        self._apply_decisions(self._group.end_as_carried())
        self._close(error)

    def abort(self, reason: str = "the request was aborted while its group was running") -> None:
        self.interrupt(GroupAborted(reason))

    def interrupt(self, error: DartsError, on_abort: OnAbort | None = None) -> None:
        """End the group from outside, with ``on_abort`` or the spec's choice. Nothing is selected by length."""
        if self.has_ended:
            return
        self.interrupted = error
        # A suspended group has no partial candidates to return.
        if self._group.is_paused or not self._group.candidates:
            on_abort = OnAbort.FAIL
        delivered = self._group.delivered
        undelivered = [c for c in self.runner.candidates if c.state.is_alive and c.state.index not in delivered]
        match on_abort or self.spec.on_abort:
            case OnAbort.FAIL:
                self.fail(error)
            case OnAbort.ANSWER:
                # The caller gets the candidates that started first.
                if self._group.is_open:
                    undelivered = undelivered[: self._group.rule.size - len(delivered)]
                self._num_returned = len(delivered) + len(undelivered)
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

    async def collect_aborted_outputs(self) -> dict[int, OutputT]:
        """Return delivered and partial outputs, by index."""
        outputs: dict[int, OutputT] = {}
        for index, candidate in enumerate(self.runner.candidates):
            if candidate.aborted or index in self._group.delivered:
                try:
                    # The engine returns tokens a moment after the stop.
                    outputs[index] = await asyncio.shield(candidate.output)
                except Exception as error:
                    logger.warning("candidate %d of group %s failed: %r", index, self.spec.group_id, error)
        return outputs

    def fail(self, error: Exception) -> None:
        self.cancel(error)
        self.deliveries.put_nowait(error)

    # --- observing the group ------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """The group's caller may not have all trajectories yet."""
        return self._group.outcome is not None

    @property
    def is_complete(self) -> bool:
        return self._group.outcome is Outcome.COMPLETED

    @property
    def size(self) -> int | None:
        """Number of returned trajectories, or None before it is known."""
        return self._group.rule.size if self._group.is_open else None

    def make_candidate_record(
        self,
        index: int,
        weight: float | None = None,
        advantage: float | None = None,
    ) -> CandidateRecord:
        state = self.candidates[index]
        history = self.runner.candidates[index].history
        verdict = self.verification.verdicts.get(index, NO_VERDICT)
        tokens = self.runner.count_tokens(index)
        return CandidateRecord(
            index=index,
            tokens=tokens,
            finish_reason=state.finish_reason,
            selected_as=state.selected_as,
            reason=state.reason,
            cut=state.cut,
            started_at=history.started_at,
            ended_at=history.ended_at,
            weight_version_start=history.version_start,
            weight_version_end=history.version_end,
            quality=state.quality,
            survival=state.survival,
            weight=weight,
            version_spans=history.version_spans(tokens, self.engine.weight_version),
            resumed=history.resumed,
            reward=verdict.reward,
            correct=verdict.correct,
            advantage=advantage,
        )

    @property
    def zero_variance(self) -> bool | None:
        """Whether all known rewards of a complete group are equal; None without rewards."""
        rewards = []
        for candidate in self._group.current_candidates:
            reward = self.verification.verdicts.get(candidate.index, NO_VERDICT).reward
            # A rule that needs rewards has selected from all candidates with a reward.
            counts = self._group.rule.needs_rewards or candidate.selected_as is not None
            if reward is not None and counts:
                rewards.append(reward)
        return have_equal_rewards(rewards)

    # --- the state machine --------------------------------------------------

    def _handle_events(self, *events: Event) -> None:
        quota = self.spec.quota
        try:
            if quota is not None and not quota.missing_groups and not self.has_ended:
                # Several groups may finish in one step of the engine. Stop before the event completes the group: a
                # complete group cannot be carried over.
                self.is_surplus = True
                self.stop_to_carry()
                self.deliveries.put_nowait(GroupAborted("enough other groups of its batch are complete"))
                return
            self._apply_decisions(self._group.handle(*events))
            if not self._group.needs_engine:
                # While the group waits for verdicts, its caller may use its share of the engine for other groups.
                self._ticket.release()
            for event in events:
                if isinstance(event, Finished):
                    # The message of an end also brings the siblings' token counts.
                    self._poll_soon()
                    if self._needs_verdicts:
                        self.verification.start(event.index, self.runner.candidates[event.index].output)
        except Exception as error:
            self._handle_bug(error, *events)

    def _poll_soon(self) -> None:
        if not self._is_poll_scheduled:
            self._is_poll_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_scheduled_poll)

    def _run_scheduled_poll(self) -> None:
        self._is_poll_scheduled = False
        if not self.has_ended:
            self.poll()

    @property
    def _needs_verdicts(self) -> bool:
        # A complete group is returned with all verdicts, unless it was decided without the missing verdicts.
        return self._group.outcome in (None, Outcome.COMPLETED) and not self._group.decided_early

    def _handle_verdict(self, index: int, reward: float | None) -> None:
        if not self.has_ended:
            self._handle_events(Rewarded(index, reward))

    def _handle_bug(self, error: Exception, *events: Event) -> None:
        # A bug of ours ends this group alone.
        logger.error(
            "group %s failed on the events %s",
            self.spec.group_id,
            events,
            exc_info=error,
        )
        self.fail(error)

    def _apply_decisions(self, decisions: list[Decision]) -> None:
        # Decisions may change `Group.check_at`.
        self.polls_to_skip = 0
        if self.member is not None:
            has_new_candidates = any(isinstance(decision, Start) for decision in decisions)
            self.member.report_need(has_new_candidates=has_new_candidates)
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
                    # The cut answer may get another reward.
                    self.verification.start(index, self.runner.candidates[index].output, has_new_output=True)
                case Deliver(index=index):
                    self.deliveries.put_nowait(index)
                case Complete(selection=selection):
                    self._num_returned = len(selection)
                    counts = not self.spec.only_informative or self.zero_variance is False
                    if self.spec.quota is not None and counts:
                        self.spec.quota.missing_groups -= 1
                        self.has_used_quota = True
                    self._close()
                    for index in selection:
                        if index not in self._group.delivered:
                            self.deliveries.put_nowait(index)
                case GiveUp(error=error):
                    self._close(error)
                    self.deliveries.put_nowait(error)

    # --- the end ------------------------------------------------------------

    def _close(self, error: Exception | None = None) -> None:
        """Record and report the group's end, once."""
        if self._group.outcome is None or self._is_closed:
            return
        self._is_closed = True
        if not self._needs_verdicts:
            self.verification.cancel()
        try:
            self.record = self._make_record(self._group.outcome, error)
            self._observer.group_ended(self.record)
        finally:
            # Cohort and gate must not wait for the group after an error.
            if self.runner.scorer is not None:
                self.runner.scorer.drop_unselected(self._group.candidates)
            self._on_end(self)
            if self.member is not None:
                self.member.end(self.record)

    def _make_record(self, outcome: Outcome, error: Exception | None) -> GroupRecord:
        group = self._group
        rule = group.rule
        now = self._clock()

        # Stopped candidates run for a moment longer, but their records do not change any more.
        weights_by_index = selection_weights(group)
        advantages_by_index = advantages(group)
        candidates = []
        for index in range(len(self.runner.candidates)):
            weight = weights_by_index.get(index)
            candidates.append(self.make_candidate_record(index, weight, advantages_by_index.get(index)))

        # Seconds since enough candidates for the shortest trajectories had finished.
        tail_wait = None
        finish_times = self.runner.finish_times
        if outcome is Outcome.COMPLETED and len(finish_times) >= rule.num_shortest:
            tail_wait = now - finish_times[rule.num_shortest - 1]

        return make_group_record(
            group,
            candidates,
            self.member,
            group_id=self.spec.group_id,
            prompt_key=self.spec.prompt_key,
            policy=self.spec.plan.policy,
            outcome=outcome,
            started_at=self.started_at,
            ended_at=now,
            tail_wait=tail_wait,
            error=error,
            earlier_pass_rate=self._earlier_pass_rate,
            request_ids=self.request_ids,
            owner=self.owner,
            tokens=self.spec.request_tokens,
            run_probability=self.spec.run_probability,
            weight_version=self.engine.weight_version,
        )
