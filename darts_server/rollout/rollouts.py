"""Plan requests and run groups on one engine: the entrance to this room."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from darts_server.engine.port import UNKNOWN_TOKENS, Engine, OutputT, RequestT, RequestTokens
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
from darts_server.serving.admission import Admission, Bounds, Ticket
from darts_server.serving.gate import Gate
from darts_server.types import OFF, FinishReason, Outcome, RequestOptions, SelectedAs

_BLOBS = (*blob_kinds(QUALITY_BLOBS), *blob_kinds(VOTE_BLOBS))
_ALL: Sequence[Kind[Any]] = (allocator.PRICE, auto.STATE, *deadlines.KINDS, *learned.KINDS, *_BLOBS)
KINDS: Mapping[str, Kind[Any]] = {kind.name: kind for kind in _ALL}
"""Of documents that are used here; of other kinds, by nothing."""


POLL_SECONDS = 0.02
"""About as long as one step of an engine: a candidate that is no longer needed generates one or two tokens more, and
the API process has nothing to do for each token."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals in seconds.

    ``poll``: time between two polls of token counts. ``allocation``: time within which groups are allocated together.
    ``join``: time without a further request after which a group of single requests is closed. ``join_named``: the same
    for a group that has a name; at least ``join``.
    """

    poll: float = POLL_SECONDS
    allocation: float = 0.02
    join: float = 5.0
    join_named: float = 60.0


class Rollouts(Generic[RequestT, OutputT]):
    """Run groups on one engine.

    Args:
        engine: where candidates run.
        planner: chooses the policy of each request; may be replaced while groups run, which keep theirs.
        statistics: what is learned; every completed group adds to it.
        intervals: of polling, allocation and joining.
        gate: what groups pass; every running group is inside. ``None`` for a gate of its own.
        bounds: of the candidates that are admitted; ``None`` for no bounds.
        brownout: how redundancy falls while candidates queue; ``None`` for not at all.
        scorer: scores candidates under policies that prune; ``None`` refuses these policies.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: Engine[RequestT, OutputT],
        planner: Planner,
        statistics: Statistics,
        intervals: Intervals | None = None,
        *,
        gate: Gate | None = None,
        bounds: Bounds | None = None,
        brownout: Brownout | None = None,
        scorer: Pruner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        intervals = intervals or Intervals()
        self.planner = planner
        self.statistics = statistics
        self.gate = gate or Gate()
        self.turns = Turns()
        self.starts = StartQueue()
        self.admission = Admission(lambda: engine.unfinished, engine.capacity, bounds)
        self.observers = GroupEvents()
        self.allocator = Allocator(
            statistics,
            intervals.allocation,
            self.observers.cohort_ended,
            clock,
            scale=self.redundancy_scale,
            opening=lambda: self.gate.opening,
        )
        self.observers.group_ended.add(statistics.group_ended, self.allocator.deadlines.group_ended)
        self.joiner: GroupJoiner[RequestT, OutputT] = GroupJoiner(
            self.collect,
            self.allocator,
            self.observers,
            intervals.join,
            intervals.join_named,
            lambda: engine.weight_version,
            clock,
        )
        self.engine = engine
        self._brownout = brownout or Brownout(0, 0)
        self._context = GroupContext(engine, self.observers, scorer, self.starts, clock)
        self.poll_seconds = intervals.poll
        self._polling: asyncio.Task[None] | None = None  # while there are groups
        self.runs: dict[GroupRun[RequestT, OutputT], None] = {}
        """Running groups, the oldest first: a set that keeps its order."""
        self.aborts = 0
        """How often everything was aborted."""
        self._suspended = False
        self._group_ended = asyncio.Event()

    # --- planning -----------------------------------------------------------

    def plan(self, n: int, options: RequestOptions, turn: Turn | None = None) -> Plan | None:
        """Plan a request for ``n`` trajectories of one prompt; ``None``: unshaped, by the engine alone.

        ``turn``: what shows whether a request for one trajectory opens it; ``None`` for one that does.

        Raises:
            InvalidRequest: unknown policy, a policy that prunes where nothing can be scored, or a size that the policy
                or the limits do not allow.
        """
        plan = self.planner.plan(n, options)
        if plan is None:
            return None
        if plan.shaping.prunes:
            self.check_scorable(plan)
        if plan.single and turn is not None:
            kind = self.turns.classify(turn)
            self.observers.single_request_classified(kind)
            if not self.planner.limits.joins(kind):
                return None
        return plan

    def check_scorable(self, plan: Plan) -> None:
        """Check whether candidates can be scored, for a policy that prunes.

        Raises:
            InvalidRequest: nothing can be scored here.
        """
        if not self.can_score:
            why = "hidden states, which this engine does not report; use another policy, or start the server with "
            why += "--quality logprob"
            if self._context.scorer is None:
                why = "quality, which this server cannot score; use another policy"
            raise InvalidRequest("policy", f"{plan.policy!r} prunes by {why}")

    @property
    def can_score(self) -> bool:
        """Whether anything can score candidates."""
        scorer = self._context.scorer
        return scorer is not None and (not scorer.uses_hidden_states or self.engine.probe_width is not None)

    def usual_candidates(self, plan: Plan) -> int:
        """Return the number of candidates that a group gets now, before anything is known of its prompt."""
        return plan.candidates(self.redundancy_scale())

    def redundancy_scale(self) -> float:
        """Return the share of the redundancy that there is room for now, 0 to 1."""
        return self._brownout.scale_at(self.admission.waiting)

    # --- running groups -----------------------------------------------------

    def start(
        self,
        spec: GroupSpec[RequestT],
        allocation: Allocation,
        ticket: Ticket | None = None,
        carried: Sequence[CarriedCandidate[OutputT]] = (),
    ) -> GroupRun[RequestT, OutputT]:
        """Start a group. Its caller must take its trajectories, or call `GroupRun.cancel`.

        ``ticket``: holds the allocation, and is released when the group has ended, which may be after its caller left.
        ``carried``: what its candidates have generated already, by index.
        """
        run = self.collect(spec, ticket=ticket, carried=carried)
        run.open(spec.plan.rule_for(allocation.saturated), allocation)
        return run

    def collect(
        self,
        spec: GroupSpec[RequestT],
        on_end: Callable[[], None] | None = None,
        ticket: Ticket | None = None,
        carried: Sequence[CarriedCandidate[OutputT]] = (),
    ) -> GroupRun[RequestT, OutputT]:
        """Create a group to which candidates are added one by one before it is opened.

        ``on_end`` is called when it has ended, with any outcome. ``ticket``, ``carried``: see `start`.
        """
        held = ticket or Ticket(self.admission, None, None)

        def ended(run: GroupRun[RequestT, OutputT]) -> None:
            self._group_ended.set()
            del self.runs[run]
            self.gate.leave()
            held.release()
            if on_end is not None:
                on_end()
            if run.runner.scorer is not None and run.record is not None:
                self.observers.scored_group_ended(run.record)

        try:
            order, rewards = self.starting_order(spec.prompt_key), self.statistics.rewards.prompts
            stats = None if spec.prompt_key is None else rewards.load(spec.prompt_key)
            self.gate.let_in()
        except BaseException:
            held.release()
            raise
        earlier_pass_rate = None if stats is None else stats.pass_rate
        run = GroupRun(self._context, spec, held, ended, carried, order, earlier_pass_rate)
        self.runs[run] = None
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll(), name="darts-poller")
        if self._suspended:
            run.suspend()
        return run

    async def _poll(self) -> None:
        """Poll all groups for their progress; no timer runs while there is none."""
        while self.runs:
            await asyncio.sleep(self.poll_seconds)
            for run in list(self.runs):
                run.poll()
            # Also after the last group has ended: the next group must not find the queue as this group saw it.
            self._brownout.update(self.admission.waiting)
        self._polling = None

    def starting_order(self, prompt_key: str | None) -> StartingOrder:
        """Return the place of a request that comes now among others, on an engine that has priorities."""
        if not self.engine.has_priorities:
            return lambda _: 0.0
        since, statistics = self._context.clock(), self.statistics
        stats = None if prompt_key is None else statistics.prompts.load(prompt_key)
        # A new prompt is expected to be as long as the data set's mean.
        expected = (statistics.dataset.stats.mean or 0.0) if stats is None else stats.mean_ema
        return lambda tokens: since - TOKEN_SECONDS * max(expected, tokens)

    @property
    def running(self) -> int:
        """Number of running groups."""
        return len(self.runs)

    def learn_unshaped(
        self,
        prompt_key: str,
        ends: Sequence[tuple[int, FinishReason]],
        request: RequestTokens = UNKNOWN_TOKENS,
    ) -> None:
        """Learn the lengths of a request that the engine has served by itself, as those of a group.

        ``ends``: tokens of each trajectory, and how it ended. ``request``: tokens that it takes.
        """
        now, version = self._context.clock(), self.engine.weight_version
        candidates = [
            CandidateRecord(i, tokens, reason, SelectedAs.SHORT, None, False, now, now, version, version)
            for i, (tokens, reason) in enumerate(ends)
        ]
        record = GroupRecord(
            "",
            prompt_key,
            OFF,
            len(ends),
            Outcome.COMPLETED,
            candidates,
            now,
            now,
            None,
            prompt_tokens=request.prompt,
            max_tokens=request.most,
        )
        self.statistics.group_ended(record)

    # --- ending groups ------------------------------------------------------

    def abort(self, group_id: str) -> None:
        """Abort all groups, or the single request, with that id, if they run: see `GroupRun.abort`."""
        self.joiner.abort(group_id)
        for run in [run for run in self.runs if run.spec.group_id == group_id]:  # callers choose ids, which may recur
            run.abort()

    def abort_all(self, reason: str) -> None:
        """Abort all running groups, see `GroupRun.abort`. ``reason``: for callers that get an error."""
        self.aborts += 1
        for run in list(self.runs):
            run.abort(reason)

    def fail_all(self, error: DartsError) -> None:
        """End all running groups; their callers get the error."""
        for run in list(self.runs):
            run.fail(error)

    async def suspend(self) -> None:
        """Stop the candidates of every group that can be restarted, and wait until the other groups have ended.

        Groups that begin before `resume` start no candidates either.
        """
        self._suspended = True
        unfinished = [run for run in list(self.runs) if not run.suspend()]
        while any(not run.has_ended for run in unfinished):
            self._group_ended.clear()
            await self._group_ended.wait()

    def weights_change(self) -> None:
        """Record what running candidates have generated so far, before the paused model gets other weights."""
        for run in list(self.runs):
            run.runner.weights_change()
        self.joiner.counted.weights_change()

    def resume(self) -> None:
        """Restart suspended groups with new candidates. Harmless if there are none."""
        self._suspended = False
        for run in list(self.runs):
            run.resume()


def check_document(kind: str, document: Document) -> None:
    """Check whether a document of a saved state can be used, before it replaces what was learned here.

    Raises:
        ValueError: it cannot be used; the message names the field.
    """
    if (found := KINDS.get(kind)) is not None:
        found.parse(document)
