"""Groups on the scripted engine."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from darts_server.engine.scripted import Script, ScriptedEngine, settle
from darts_server.policy.shaping import Shaping, Tail
from darts_server.rollout.allocation.allocator import Allocator
from darts_server.rollout.allocation.budgets import Budgets
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.learned.dataset import Dataset
from darts_server.rollout.learned.documents import Scalar
from darts_server.rollout.learned.latency import Latency
from darts_server.rollout.learned.prompts import Prompts
from darts_server.rollout.plan import Limits, Plan
from darts_server.rollout.pruning.scorer import CandidateScorer
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun, Trajectory
from darts_server.types import CohortRecord, GroupRecord, RequestOptions

SHAPINGS = {
    "uniform": Shaping(redundancy=1.5, num_longest=1, tail=Tail.SAMPLED),
    "longest": Shaping(redundancy=1.5, num_longest=1, tail=Tail.LONGEST),
    "shortest": Shaping(redundancy=1.5, num_longest=0),
}


class Recorder:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.started = 0
        self.records: list[GroupRecord] = []
        self.batches: list[CohortRecord] = []

    def candidates_started(self, count: int) -> None:
        self.started += count

    def group_ended(self, record: GroupRecord) -> None:
        self.records.append(record)

    def cohort_ended(self, record: CohortRecord) -> None:
        self.batches.append(record)


class Documents:
    """A store of plain dictionaries."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], dict[str, Scalar]] = {}

    def get(self, kind: str, key: str) -> dict[str, Scalar] | None:
        return self.kept.get((kind, key))

    def put(self, kind: str, key: str, document: Mapping[str, Scalar]) -> None:
        self.kept[kind, key] = dict(document)

    def know(self, **stds: float) -> "Documents":
        """Length stds of prompts."""
        for key, std in stds.items():
            document = {"std_ema": std, "mean_ema": 1.0, "groups": 1, "candidates": 12, "weight_version": 0}
            self.put("prompt", key, document)
        return self


class House:
    """A rollout room on a scripted engine. Peeks are instant, so that steps alone pass time."""

    def __init__(
        self,
        script: Callable[[str, int], Script],
        shapings: Mapping[str, Shaping] = SHAPINGS,
        store: Documents | None = None,
        scorer: CandidateScorer | None = None,
        engine: Callable[[Callable[[str, int], Script]], ScriptedEngine] = ScriptedEngine,
    ) -> None:
        self.script = script
        self.limits = Limits(64)
        self.engine = engine(script)
        self.recorder = Recorder()
        self.store = store or Documents()
        self.rollouts: Rollouts[str, list[int]] = Rollouts(
            self.engine,
            shapings,
            "uniform",
            self.limits,
            self.store,
            [self.recorder],
            peek_interval=0,
            batch_window=0,
            clock=lambda: self.engine.now,
            scorer=scorer,
        )

    def run(
        self, size: int, policy: str = "shortest", *, group_id: str = "g", early: bool = False, tail_seed: int = 7
    ) -> GroupRun[str, list[int]]:
        """A group under a policy that asks nobody how many candidates it gets."""
        plan = self.plan(size, policy)
        grant = Allocation(plan.shaping.candidates(size))
        return self.rollouts.run(
            group_id, plan, grant, group_id=group_id, prompt_key=group_id, tail_seed=(tail_seed,), early=early
        )

    async def together(self, size: int, policy: str, group_ids: Sequence[str]) -> list[GroupRun[str, list[int]]]:
        """Groups that are allocated together, begun. Each draws its tail_seed from its place."""
        plan = self.plan(size, policy)
        grants = await asyncio.gather(*(self.rollouts.allocate(plan, name) for name in group_ids))
        return [
            self.rollouts.run(name, plan, grant, group_id=name, prompt_key=name, tail_seed=(place,))
            for place, (name, grant) in enumerate(zip(group_ids, grants, strict=True))
        ]

    def plan(self, size: int, policy: str) -> Plan:
        plan = self.rollouts.plan(size, RequestOptions(policy))
        assert plan is not None
        return plan

    def record(self, group_id: str) -> GroupRecord:
        [record] = [r for r in self.recorder.records if r.group_id == group_id]
        return record

    async def group(self, run: GroupRun[str, list[int]]) -> list[Trajectory[list[int]]]:
        """Play a group to its end."""
        waiting = asyncio.create_task(collect(run))
        await settle()
        await self.engine.run()
        return await waiting


def an_allocator(
    documents: Documents,
    window: float = 0,
    on_batch_end: Callable[[CohortRecord], None] = lambda _: None,
    seed: int = 0,
    scale: float = 1.0,
) -> Allocator:
    def clock() -> float:
        return 0.0

    prompts = Prompts(documents)
    budgets = Budgets(prompts, Dataset(documents), Latency(Documents()), clock)
    rng = np.random.default_rng(seed)
    return Allocator(prompts, budgets, documents, window, on_batch_end, clock, rng, lambda: scale)


async def collect(run: GroupRun[str, list[int]]) -> list[Trajectory[list[int]]]:
    return [trajectory async for trajectory in run.trajectories()]


def lengths(*each: int) -> Callable[[str, int], Script]:
    """Candidate i has the i-th length; later ones the last."""
    return lambda _, index: Script(each[min(index, len(each) - 1)])
