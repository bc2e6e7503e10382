import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from darts_server.engine.port import Engine, OutputT, RequestT, RequestTokens
from darts_server.exceptions import DartsError, InvalidRequest
from darts_server.observers import GroupEvents
from darts_server.policy.allocation import Brownout
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.allocation import allocator, auto, deadlines
from darts_server.rollout.allocation.allocator import Allocator
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.candidates import CarriedCandidate
from darts_server.rollout.joining import GroupJoiner
from darts_server.rollout.learned import statistics as learned
from darts_server.rollout.learned.documents import Document, Kind, blob_kinds
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.plan import Plan, Planner
from darts_server.rollout.pruning.pruner import Pruner
from darts_server.rollout.pruning.scoring import QUALITY_BLOBS, VOTE_BLOBS
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupContext, GroupSpec
from darts_server.rollout.start_queue import TOKEN_SECONDS, StartingOrder, StartQueue
from darts_server.rollout.turns import Turn, Turns
from darts_server.serving.admission import Admission, AdmissionLimits, Ticket
from darts_server.serving.gate import Gate
from darts_server.types import OFF, FinishReason, Outcome, RequestOptions, SelectedAs
from darts_server.verify.types import Verifier

_ALL_KINDS: Sequence[Kind[Any]] = (
    allocator.PRICE,
    auto.STATE,
    *deadlines.KINDS,
    *learned.KINDS,
    *blob_kinds(QUALITY_BLOBS),
    *blob_kinds(VOTE_BLOBS),
)
KINDS: Mapping[str, Kind[Any]] = {kind.name: kind for kind in _ALL_KINDS}

POLL_SECONDS = 0.02
"""About one step of an engine: an unneeded candidate generates one or two more tokens."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """In seconds. ``join``, ``join_named``: see `GroupJoiner`."""

    poll: float = POLL_SECONDS
    allocation: float = 0.02
    """Time window of groups that are allocated together."""
    join: float = 5.0
    join_named: float = 60.0


class Rollouts(Generic[RequestT, OutputT]):
    """Plans requests and runs groups on an engine: the entrance to this room.

    Args:
        planner: may be replaced while groups run, and running groups keep their plans.
        gate: running groups are inside.
        scorer: without a scorer, policies that prune are refused.
        verifier: without a verifier, policies that need rewards are refused.
    """

    def __init__(
        self,
        engine: Engine[RequestT, OutputT],
        planner: Planner,
        statistics: Statistics,
        intervals: Intervals | None = None,
        *,
        gate: Gate | None = None,
        admission_limits: AdmissionLimits | None = None,
        brownout: Brownout | None = None,
        scorer: Pruner | None = None,
        verifier: Verifier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        intervals = intervals or Intervals()
        self.engine = engine
        self.verifier = verifier if verifier is not None and verifier.names else None
        self.planner = planner
        self.statistics = statistics
        self.gate = gate or Gate()
        self.turns = Turns()
        self.start_queue = StartQueue()
        self.admission = Admission(lambda: engine.unfinished_requests, engine.capacity, admission_limits)
        self.observers = GroupEvents()
        self.allocator = Allocator(
            statistics,
            intervals.allocation,
            self.observers.cohort_ended,
            clock,
            redundancy_scale=self.redundancy_scale,
            gate_opening_number=lambda: self.gate.opening_number,
        )
        self.observers.group_ended.add(statistics.group_ended, self.allocator.deadlines.group_ended)
        self.joiner: GroupJoiner[RequestT, OutputT] = GroupJoiner(
            self.create_run,
            self.allocator,
            self.observers,
            intervals.join,
            intervals.join_named,
            lambda: engine.weight_version,
            clock,
        )
        self.poll_seconds = intervals.poll
        self.runs: dict[GroupRun[RequestT, OutputT], None] = {}
        """The oldest group comes first."""
        self.abort_all_count = 0
        self._brownout = brownout or Brownout(0, 0)
        self._context = GroupContext(engine, self.observers, scorer, self.start_queue, clock)
        self._polling_task: asyncio.Task[None] | None = None
        self._is_suspended = False
        self._group_ended = asyncio.Event()

    # --- planning -----------------------------------------------------------

    def plan(self, n: int, options: RequestOptions, turn: Turn | None = None) -> Plan | None:
        """See `Planner.plan`. Without ``turn`` a single request opens a trajectory.

        Raises:
            InvalidRequest: see `Planner.plan` and `check_can_prune`; or the policy needs rewards.
        """
        plan = self.planner.plan(n, options)
        if plan is None:
            return None
        if plan.shaping.prunes:
            self.check_can_prune(plan)
        if plan.shaping.needs_rewards:
            raise InvalidRequest(
                "policy",
                f"{plan.policy!r} needs rewards while a group runs, which only batches have; send the prompts to "
                "POST /darts/v1/rollouts with their answers as metadata, or use another policy, such as 'off'",
            )
        if plan.single and turn is not None:
            kind = self.turns.classify(turn)
            self.observers.single_request_classified(kind)
            if not self.planner.limits.should_join(kind):
                return None
        return plan

    def check_can_prune(self, plan: Plan) -> None:
        """Raise `InvalidRequest` if this server cannot score candidates."""
        if self.can_score:
            return
        if self._context.scorer is None:
            missing = "quality, which this server cannot score; use another policy"
        else:
            missing = (
                "hidden states, which this engine does not report; use another policy, or start the server with "
                "--quality logprob"
            )
        raise InvalidRequest("policy", f"{plan.policy!r} prunes by {missing}")

    @property
    def can_score(self) -> bool:
        scorer = self._context.scorer
        if scorer is None:
            return False
        return not scorer.uses_hidden_states or self.engine.probe_width is not None

    def estimate_candidates(self, plan: Plan) -> int:
        return plan.candidates_without_statistics(self.redundancy_scale())

    def redundancy_scale(self) -> float:
        """Share of the redundancy that the load allows, 0 to 1."""
        return self._brownout.scale_at(self.admission.waiting)

    @property
    def starts_in_rounds(self) -> bool:
        """See `FirstRound`."""
        # With priorities, the engine orders candidates by their expected lengths.
        return self.engine.drafts_from_siblings and not self.engine.has_priorities

    def make_starting_order(self, prompt_key: str | None) -> StartingOrder:
        """Return the order for a request that arrives now."""
        if not self.engine.has_priorities:
            return lambda _: 0.0
        now = self._context.clock()
        prompt_stats = None if prompt_key is None else self.statistics.prompts.load(prompt_key)
        if prompt_stats is not None:
            expected_tokens = prompt_stats.mean_ema
        else:
            expected_tokens = self.statistics.dataset.stats.mean or 0.0
        # The longest candidates start first, unless others have waited for long.
        return lambda carried_tokens: now - TOKEN_SECONDS * max(expected_tokens, carried_tokens)

    # --- running groups -----------------------------------------------------

    def start(
        self,
        spec: GroupSpec[RequestT],
        allocation: Allocation,
        ticket: Ticket | None = None,
        carried: Sequence[CarriedCandidate[OutputT]] = (),
    ) -> GroupRun[RequestT, OutputT]:
        """Start a group. The caller must take the trajectories, or call `GroupRun.cancel`.

        ``ticket``, ``carried``: see `GroupRun`.
        """
        try:
            run = self.create_run(spec, ticket=ticket, carried=carried)
        except BaseException:
            # Without a run, nothing else ends the group in its cohort.
            allocation.drop()
            raise
        try:
            run.open(spec.plan.rule_for(allocation.saturated), allocation)
        except Exception as error:
            if run.member is None:
                allocation.drop()
            # An update of the weights would wait for the run.
            run.cancel(error)
            raise
        return run

    def create_run(
        self,
        spec: GroupSpec[RequestT],
        on_end: Callable[[], None] | None = None,
        ticket: Ticket | None = None,
        carried: Sequence[CarriedCandidate[OutputT]] = (),
    ) -> GroupRun[RequestT, OutputT]:
        """Create a group without candidates, which the caller must open."""
        group_ticket = ticket or Ticket(self.admission, None, None)

        def handle_end(run: GroupRun[RequestT, OutputT]) -> None:
            self._group_ended.set()
            del self.runs[run]
            self.gate.leave()
            group_ticket.release()
            if on_end is not None:
                on_end()
            if run.runner.scorer is not None and run.record is not None:
                self.observers.scored_group_ended(run.record)

        try:
            starting_order = self.make_starting_order(spec.prompt_key)
            earlier_pass_rate = None
            if spec.prompt_key is not None:
                rewards = self.statistics.rewards.prompts.load(spec.prompt_key)
                if rewards is not None:
                    earlier_pass_rate = rewards.pass_rate
            run = GroupRun(
                self._context,
                spec,
                group_ticket,
                on_end=handle_end,
                carried=carried,
                starting_order=starting_order,
                earlier_pass_rate=earlier_pass_rate,
            )
            self.gate.let_in()
        except BaseException:
            # Without a run, nothing else releases the ticket.
            group_ticket.release()
            raise
        self.runs[run] = None
        if self._polling_task is None:
            self._polling_task = asyncio.create_task(self._poll_runs(), name="darts-poller")
        if self._is_suspended:
            run.suspend()
        return run

    async def _poll_runs(self) -> None:
        while self.runs:
            await asyncio.sleep(self.poll_seconds)
            for run in list(self.runs):
                if run.polls_to_skip > 0:
                    run.polls_to_skip -= 1
                else:
                    run.poll()
            # The last update follows the last group's end, so that the next group finds the present queue.
            self._brownout.update(self.admission.waiting)
        self._polling_task = None

    def learn_unshaped_lengths(
        self,
        prompt_key: str,
        lengths_and_reasons: Sequence[tuple[int, FinishReason]],
        request_tokens: RequestTokens,
    ) -> None:
        """Learn the lengths of a request that the engine has served without us."""
        now = self._context.clock()
        version = self.engine.weight_version
        candidates = [
            CandidateRecord(
                index=index,
                tokens=tokens,
                finish_reason=finish_reason,
                selected_as=SelectedAs.SHORT,
                reason=None,
                cut=False,
                started_at=now,
                ended_at=now,
                weight_version_start=version,
                weight_version_end=version,
            )
            for index, (tokens, finish_reason) in enumerate(lengths_and_reasons)
        ]
        record = GroupRecord(
            group_id="",
            prompt_key=prompt_key,
            policy=OFF,
            size=len(lengths_and_reasons),
            outcome=Outcome.COMPLETED,
            candidates=candidates,
            started_at=now,
            ended_at=now,
            tail_wait=None,
            prompt_tokens=request_tokens.prompt,
            max_tokens=request_tokens.max_tokens,
        )
        self.statistics.group_ended(record)

    # --- ending groups ------------------------------------------------------

    def abort(self, group_id: str) -> None:
        """Abort the single request, and all groups, with this id."""
        self.joiner.abort(group_id)
        # Callers may choose the same id.
        for run in list(self.runs):
            if run.spec.group_id == group_id:
                run.abort()

    def abort_all(self, reason: str) -> None:
        self.abort_all_count += 1
        for run in list(self.runs):
            run.abort(reason)

    def fail_all(self, error: DartsError) -> None:
        for run in list(self.runs):
            run.fail(error)

    async def suspend(self) -> None:
        """Stop all candidates until `resume`, and wait for the end of groups that cannot be restarted."""
        self._is_suspended = True
        for run in list(self.runs):
            run.suspend()
        # Groups that cannot be restarted end with the old weights.
        blocking_runs = [run for run in self.runs if run.needs_engine]
        while any(not run.has_ended for run in blocking_runs):
            self._group_ended.clear()
            await self._group_ended.wait()

    def prepare_weight_change(self) -> None:
        """Record the weight version of all tokens, before the paused model gets new weights."""
        for run in list(self.runs):
            run.runner.record_weight_version()
        self.joiner.counted.record_weight_version()
        self.observers.weights_changing()

    def resume(self) -> None:
        self._is_suspended = False
        for run in list(self.runs):
            run.resume()


def check_document(kind: str, document: Document) -> None:
    """Check a saved document. Unknown kinds pass.

    Raises:
        ValueError: the document cannot be used. The message names the field.
    """
    document_kind = KINDS.get(kind)
    if document_kind is not None:
        document_kind.parse(document)
