"""The room's front door: which policy a request gets, and groups that run under it."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from darts_server.engine.port import Engine, OutputT, RequestT
from darts_server.exceptions import DartsError, GroupAborted, InvalidRequest
from darts_server.policy.allocation.brownout import Brownout
from darts_server.policy.deadline import DeadlineLosses
from darts_server.policy.group import Group
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.shaping import Shaping
from darts_server.rollout.allocation.allocator import Allocator
from darts_server.rollout.allocation.budgets import Budgets
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.joining import Assembly, Joining
from darts_server.rollout.learned.dataset import Dataset
from darts_server.rollout.learned.documents import DocumentStore
from darts_server.rollout.learned.latency import Latency
from darts_server.rollout.learned.prompts import Prompts
from darts_server.rollout.ledger import Ledger
from darts_server.rollout.observers.base import GroupObserver
from darts_server.rollout.plan import Limits, Plan, Planner
from darts_server.rollout.poller import ProgressPoller
from darts_server.rollout.pruning.scorer import CandidateScorer
from darts_server.rollout.run import GroupRun
from darts_server.serving.admission import Admission
from darts_server.serving.gate import Gate
from darts_server.types import CohortRecord, GroupRecord, RequestOptions, Returned

NO_WISHES = RequestOptions()
SURVIVAL = (1,)
"""Sets the tail_seed of survival apart from those of the tail, which are the same with and without pruning."""
PlanT = TypeVar("PlanT", Plan, Plan | None)


class Rollouts(Generic[RequestT, OutputT]):
    """Runs groups on one engine.

    Args:
        engine: where candidates run.
        policies: what each named policy does; ``off`` need not be named.
        default_policy: for requests that name none.
        limits: what may be asked for.
        documents: where what is learned is kept; every completed group adds to it.
        observers: hear of every group.
        on_return: hears of every trajectory when its caller gets it.
        peek_interval: seconds between two looks at token counts.
        batch_window: seconds within which groups that come together are allocated together.
        group_wait: seconds without a further request after which a group of single requests is complete.
        latency: how fast the engine is; ``None`` for one that is learned here.
        clock: monotonic seconds.
        gate: what groups pass; every group that runs is inside. ``None`` for one of its own.
        admission: who is let in; ``None`` for everyone.
        brownout: what becomes of redundancy while much waits; ``None`` for nothing.
        scorer: scores candidates under policies that prune; ``None`` refuses these.
    """

    def __init__(
        self,
        engine: Engine[RequestT, OutputT],
        policies: Mapping[str, Shaping],
        default_policy: str,
        limits: Limits,
        documents: DocumentStore,
        observers: Sequence[GroupObserver] = (),
        peek_interval: float = 0.02,
        batch_window: float = 0.02,
        group_wait: float = 5.0,
        latency: Latency | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_return: Callable[[Returned], None] = lambda _: None,
        gate: Gate | None = None,
        admission: Admission | None = None,
        brownout: Brownout | None = None,
        scorer: CandidateScorer | None = None,
    ) -> None:
        self._engine = engine
        self._scorer = scorer
        self._planner = Planner(policies, default_policy, limits)
        self._prompts = Prompts(documents)
        self._dataset = Dataset(documents)
        self._latency = latency or Latency(documents, engine.capacity)
        budgets = Budgets(self._prompts, self._dataset, self._latency, clock)
        self._allocator = Allocator(
            self._prompts, budgets, documents, batch_window, self.cohort_ended, clock, scale=self.redundancy_scale
        )
        self._observers = tuple(observers)
        self._on_return = on_return
        self._clock = clock
        self._assembly = Assembly(self, group_wait)
        self._watch = ProgressPoller(peek_interval)
        self._runs: dict[str, GroupRun[RequestT, OutputT]] = {}
        self._halted = False
        self._left = asyncio.Event()
        self.gate = gate or Gate()
        self.admission = admission or Admission(lambda: engine.unfinished, engine.capacity)
        self._brownout = brownout or Brownout(0, 0)

    @property
    def running(self) -> int:
        """Groups that run now."""
        return len(self._runs)

    @property
    def newest(self) -> Iterator[GroupRun[RequestT, OutputT]]:
        """Groups that run now, the newest first."""
        return reversed(self._runs.values())

    def plan(self, n: int, options: RequestOptions = NO_WISHES) -> Plan | None:
        """How a request for ``n`` trajectories of one prompt is served; ``None``: unshaped, by the engine alone.

        Raises:
            InvalidRequest: unknown policy, one that prunes where nothing can be scored, or a size that the policy or
                the limits do not allow.
        """
        return self.check_scorable(self._planner.plan(n, options))

    def check_scorable(self, plan: PlanT) -> PlanT:
        """The plan, if it can be done here.

        Raises:
            InvalidRequest: its policy prunes by quality, and nothing can score that.
        """
        if plan is None or not plan.shaping.prunes:
            return plan
        if self._scorer is None:
            raise InvalidRequest(
                "policy",
                f"{plan.policy!r} prunes by quality, which nothing scores here; name one that does not prune",
            )
        if self._engine.probe_width is None and self._scorer.uses_hidden_states:
            raise InvalidRequest(
                "policy",
                f"{plan.policy!r} prunes by hidden states, which this engine cannot tell; name one that does not "
                f"prune, or start the server with --quality logprob",
            )
        return plan

    @property
    def scores(self) -> bool:
        """Whether anything can score candidates."""
        return self._scorer is not None and (
            not self._scorer.uses_hidden_states or self._engine.probe_width is not None
        )

    def configure(self, policies: Mapping[str, Shaping], default_policy: str, limits: Limits) -> None:
        """Shape groups that are planned from now on so; those that run keep what they were planned with."""
        self._planner = Planner(policies, default_policy, limits)

    async def allocate(self, plan: Plan, prompt_key: str) -> Allocation:
        """How many candidates the group gets. Most policies wait a moment for others to allocate with."""
        return await self._allocator.grant(plan.policy, plan.shaping, plan.size, prompt_key)

    def allocate_together(self, plan: Plan, prompt_keys: Sequence[str], budget: int | None = None) -> list[Allocation]:
        """The same for groups that make a batch by themselves; ``budget``: candidates in all."""
        return self._allocator.grant_together(plan.policy, plan.shaping, plan.size, prompt_keys, budget)

    def redundancy_scale(self) -> float:
        """How much of the redundancy there is room for now, 0 to 1."""
        return self._brownout.update(self.admission.waiting)

    def expected_length(self, prompt_key: str) -> float | None:
        """Mean length of the prompt's trajectories in tokens, as far as it is known."""
        return self._prompts.mean(prompt_key)

    def run(
        self,
        request: RequestT,
        plan: Plan,
        grant: Allocation,
        *,
        group_id: str,
        prompt_key: str | None = None,
        tail_seed: Sequence[int] | None = None,
        early: bool = False,
    ) -> GroupRun[RequestT, OutputT]:
        """A group that has begun; its caller must see its trajectories, or `GroupRun.leave` it.

        Args:
            prompt_key: under which its lengths are remembered; ``None`` for not at all.
            tail_seed: seed of the tail's lottery; ``None`` for a fresh one.
            early: give trajectories as soon as they are known to belong.
        """
        early = early or plan.shaping.shadow  # the caller leaves with its trajectories; the others go on
        run = self.gathering(
            request,
            plan.policy,
            group_id=group_id,
            prompt_key=prompt_key,
            tail_seed=tail_seed,
            early=early,
            pruning=plan.shaping.pruning if plan.shaping.prunes else None,
        )
        run.open(
            plan.shaping.selection_rule(plan.size, grant.candidates), grant, plan.shaping.max_candidates(plan.size)
        )
        return run

    def gathering(
        self,
        request: RequestT,
        policy: str,
        *,
        group_id: str,
        prompt_key: str | None = None,
        tail_seed: Sequence[int] | None = None,
        early: bool = True,
        on_end: Callable[[], None] = lambda: None,
        pruning: Pruning | None = None,
    ) -> GroupRun[RequestT, OutputT]:
        """A group that is not open yet, and to which single candidates may be added before it is.

        ``on_end`` is called when it has ended, whichever way. With ``pruning`` its candidates are scored, if anything
        can, and those that it can spare are pruned so.
        """
        chances = (
            None if pruning is None else np.random.default_rng(np.random.SeedSequence(tail_seed, spawn_key=SURVIVAL))
        )
        group = Group(rng=np.random.default_rng(tail_seed), early=early, chances=chances)
        ledger = Ledger(group_id, policy, self._clock, prompt_key)

        def ended() -> None:
            self._forget(group_id, run)
            self.gate.leave()
            on_end()

        self.gate.let_in()
        run = GroupRun(self._engine, request, group, ledger, self, ended, self._on_return, self._scorer, pruning)
        self._runs[group_id] = run
        self._watch.add(run)
        if self._halted:
            run.halt()
        return run

    def rewarded(self, record: GroupRecord, right: Mapping[int, bool]) -> None:
        """Which of an ended group's candidates, by index, gave the right answer."""
        shaping = self._planner.shaping(record.policy)
        if shaping is not None and shaping.deadline is not None:
            self._allocator.deadlines.rewarded(record, right, shaping.deadline)

    @property
    def losses(self) -> DeadlineLosses:
        """What deadlines take away, as far as rewards were reported."""
        return self._allocator.deadlines.losses

    def step(self, batch: int, seconds: float) -> None:
        """The engine made a decode step of ``batch`` sequences."""
        self._latency.observe(batch, seconds)

    def flush(self) -> None:
        """Hand all that was learned to ``documents``, before the end."""
        self._dataset.flush()
        self._latency.flush()

    def candidates_started(self, count: int) -> None:
        """Implements the observer for this room's own groups."""
        for observer in self._observers:
            observer.candidates_started(count)

    def group_ended(self, record: GroupRecord) -> None:
        """Implements the observer for this room's own groups."""
        self._dataset.learn(record, self._prompts.learn(record))
        self._allocator.learn(record)
        for observer in self._observers:
            observer.group_ended(record)

    def cohort_ended(self, record: CohortRecord) -> None:
        """Implements the observer for this room's own batches."""
        for observer in self._observers:
            observer.cohort_ended(record)

    async def join(self, joining: Joining[RequestT], told: Callable[[str], None]) -> OutputT:
        """The trajectory of a request for one, as part of a group; ``told`` hears the group's id."""
        return await self._assembly.join(joining, told)

    def awaits(self, joining: Joining[RequestT]) -> bool:
        """Whether a group that has begun waits for such requests."""
        return self._assembly.awaits(joining.same)

    def abort(self, group_id: str) -> None:
        """End the group or the single request of that id, if it runs, with an error for its caller."""
        self._assembly.abort(group_id)
        if run := self._runs.get(group_id):
            run.abort()

    async def halt(self) -> None:
        """Stop the candidates of every group that can be restarted, and return when the others have ended.

        Groups that begin before `resume` start nothing either.
        """
        self._halted = True
        going = [run for run in list(self._runs.values()) if not run.halt()]
        while any(not run.ended for run in going):
            self._left.clear()
            await self._left.wait()

    def resume(self) -> None:
        """Restart the candidates of halted groups. Harmless if there are none."""
        self._halted = False
        for run in list(self._runs.values()):
            run.go_on()

    def abort_all(self, reason: str) -> None:
        """End every group that runs, with an error for its callers."""
        self.fail_all(GroupAborted(reason))

    def hurry(self) -> None:
        """No further request will come: no group of single requests waits for any."""
        self._assembly.hurry()

    def fail_all(self, error: DartsError) -> None:
        """End every group that runs, with that error for its callers."""
        for run in list(self._runs.values()):
            run.fail(error)

    def _forget(self, group_id: str, run: GroupRun[RequestT, OutputT]) -> None:
        self._watch.remove(run)
        self._left.set()
        if self._runs.get(group_id) is run:
            del self._runs[group_id]
