"""Groups on the scripted engine."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import numpy as np

from darts_server.engine.port import RequestTokens
from darts_server.engine.scripted import Script, ScriptedEngine, settle, slice_from
from darts_server.exceptions import InvalidRequest
from darts_server.observers import GroupEvents
from darts_server.policy.shaping import Shaping, Tail
from darts_server.records import CohortRecord, GroupRecord, TrajectoryRecord
from darts_server.rollout.allocation.allocator import Allocator
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.learned.documents import Scalar
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.plan import UNSHAPED, Limits, Plan, Planner
from darts_server.rollout.pruning.pruner import Pruner
from darts_server.rollout.rollouts import Intervals, Rollouts
from darts_server.rollout.run import GroupRun, Trajectory
from darts_server.rollout.spec import GroupSpec
from darts_server.types import FinishReason, PromptSpec, RequestOptions, Sample, TurnKind
from darts_server.verify.types import Verifier

P = ParamSpec("P")
T = TypeVar("T")
SHAPINGS = {
    "uniform": Shaping(redundancy=1.5, num_longest=1, tail=Tail.SAMPLED),
    "longest": Shaping(redundancy=1.5, num_longest=1, tail=Tail.LONGEST),
    "shortest": Shaping(redundancy=1.5, num_longest=0),
}


class Texts:
    """Create requests that are the prompts' texts; refuse texts with an ``x``."""

    def effective_sampling(self, sampling: Mapping[str, object]) -> Mapping[str, object]:
        return sampling

    async def make_request(self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str) -> str:
        if "x" in (prompt.text or "x"):
            raise InvalidRequest("text", "has an x")
        if sampling:
            raise InvalidRequest("sampling.any", "there is none")
        return prompt.text or ""

    def prompt_key(self, request: str) -> str:
        return f"key of {request}"

    def known_token_counts(self, request: str) -> RequestTokens:
        return RequestTokens(max(1, len(request.split())))

    def tail_seed(self, request: str) -> Sequence[int] | None:
        return (1,)

    def reuse_streams(self, request: str) -> AbstractContextManager[None]:
        return nullcontext()

    def has_numbered_streams(self, request: str) -> bool:
        return self.tail_seed(request) is not None

    async def to_sample(self, output: list[int]) -> Sample:
        return Sample(output, slice_from(output, 0).logprobs, "", FinishReason.STOP)


class AtOnce(Executor):
    """Calls functions in the thread that submits them."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Recorder:
    """Record what happens to groups."""

    def __init__(self, events: GroupEvents | None = None) -> None:
        self.events = events = events or GroupEvents()
        self.started = 0
        self.skipped = 0
        self.records: list[GroupRecord] = []
        self.cohorts: list[CohortRecord] = []
        self.returned: list[TrajectoryRecord] = []
        self.turns: list[TurnKind] = []
        events.candidates_started.add(self._add_started)
        events.prompts_skipped.add(self._add_skipped)
        events.trajectory_returned.add(self.returned.append)
        events.group_ended.add(self.records.append)
        events.cohort_ended.add(self.cohorts.append)
        events.single_request_classified.add(self.turns.append)

    def _add_started(self, count: int) -> None:
        self.started += count

    def _add_skipped(self, count: int) -> None:
        self.skipped += count


class Documents:
    """A document store in memory."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], dict[str, Scalar]] = {}
        self.generation = 0

    def get(self, kind: str, key: str) -> dict[str, Scalar] | None:
        return self.kept.get((kind, key))

    def put(self, kind: str, key: str, document: Mapping[str, Scalar]) -> None:
        self.kept[kind, key] = dict(document)

    def restore(self, kept: Mapping[tuple[str, str], dict[str, Scalar]]) -> None:
        """Replace everything, as `Store.restore` does."""
        self.kept = dict(kept)
        self.generation += 1

    def add_stds(self, **stds: float) -> "Documents":
        """Add prompts with these length stds."""
        for key, std in stds.items():
            document = {"std_ema": std, "mean_ema": 1.0, "groups": 1, "candidates": 12, "weight_version": 0}
            self.put("prompt", key, document)
        return self


class Harness:
    """The rollout room on a scripted engine. Polls take no time: only engine steps advance the clock."""

    def __init__(
        self,
        script: Callable[[str, int], Script],
        shapings: Mapping[str, Shaping] = SHAPINGS,
        store: Documents | None = None,
        scorer: Pruner | None = None,
        engine: Callable[[Callable[[str, int], Script]], ScriptedEngine] = ScriptedEngine,
        poll: float = 0,
        verifier: Verifier | None = None,
    ) -> None:
        self.script = script
        self.limits = Limits(64)
        self.engine = engine(script)
        self.store = store or Documents()
        self.rollouts: Rollouts[str, list[int]] = Rollouts(
            self.engine,
            Planner(shapings, "uniform", self.limits),
            Statistics(self.store, self.engine.capacity),
            Intervals(poll=poll, allocation=0),
            clock=lambda: self.engine.now,
            scorer=scorer,
            verifier=verifier,
        )
        self.recorder = Recorder(self.rollouts.observers)

    def run(
        self, size: int, policy: str = "shortest", *, group_id: str = "g", early: bool = False, tail_seed: int = 7
    ) -> GroupRun[str, list[int]]:
        """Start a group under a policy that is allocated alone."""
        plan = self.plan(size, policy)
        spec = GroupSpec(plan, group_id, group_id, group_id, (tail_seed,), delivers_early=early)
        return self.rollouts.start(spec, Allocation(plan.shaping.candidates(size)))

    async def start_cohort(self, size: int, policy: str, group_ids: Sequence[str]) -> list[GroupRun[str, list[int]]]:
        """Start groups that are allocated together. Each tail seed is the group's index."""
        plan = self.plan(size, policy)
        allocations = await asyncio.gather(*(self.rollouts.allocator.allocate(plan, name) for name in group_ids))
        return self.start_allocated(plan, group_ids, allocations)

    def start_allocated(
        self, plan: Plan, group_ids: Sequence[str], allocations: Sequence[Allocation]
    ) -> list[GroupRun[str, list[int]]]:
        return [
            self.rollouts.start(GroupSpec(plan, name, name, name, (place,)), allocation)
            for place, (name, allocation) in enumerate(zip(group_ids, allocations, strict=True))
        ]

    def collect(self, request: str, policy: str, tail_seed: Sequence[int] | None = None) -> GroupRun[str, list[int]]:
        """Create a group that is not open yet."""
        spec = GroupSpec(Plan(policy, UNSHAPED, 1), request, request, tail_seed=tail_seed, delivers_early=True)
        return self.rollouts.create_run(spec)

    def plan(self, size: int, policy: str) -> Plan:
        plan = self.rollouts.plan(size, RequestOptions(policy))
        assert plan is not None
        return plan

    def record(self, group_id: str) -> GroupRecord:
        [record] = [r for r in self.recorder.records if r.group_id == group_id]
        return record

    async def begin(self, run: GroupRun[str, list[int]], steps: int = 0) -> asyncio.Task[list[Trajectory[list[int]]]]:
        """Wait for a group in a task of its own, and let the engine make some steps."""
        waiting = asyncio.create_task(collect(run))
        await settle()
        await self.steps(steps)
        return waiting

    async def steps(self, count: int) -> None:
        for _ in range(count):
            await self.engine.step()

    async def group(self, run: GroupRun[str, list[int]]) -> list[Trajectory[list[int]]]:
        """Run a group to its end."""
        [trajectories] = await self.groups([run])
        return trajectories

    async def groups(self, runs: Sequence[GroupRun[str, list[int]]]) -> list[list[Trajectory[list[int]]]]:
        """Run groups to their ends."""
        waiting = [asyncio.create_task(collect(run)) for run in runs]
        await settle()
        await self.engine.run()
        return [await task for task in waiting]


def new_allocator(
    documents: Documents,
    window: float = 0,
    on_cohort_end: Callable[[CohortRecord], None] = lambda _: None,
    seed: int = 0,
    scale: float = 1.0,
) -> Allocator:
    def clock() -> float:
        return 0.0

    rng = np.random.default_rng(seed)
    return Allocator(Statistics(documents), window, on_cohort_end, clock, rng, lambda: scale)


async def collect(run: GroupRun[str, list[int]]) -> list[Trajectory[list[int]]]:
    return [trajectory async for trajectory in run.trajectories()]


def lengths(*each: int) -> Callable[[str, int], Script]:
    """Candidate i has the i-th length; later ones the last."""
    return lambda _, index: Script(each[min(index, len(each) - 1)])
