"""Groups on the scripted engine."""

import asyncio
from collections.abc import Callable, Mapping

from darts_server.engine.scripted import Script, ScriptedEngine, settle
from darts_server.policy.shaping import Shaping, Tail
from darts_server.rollout.prompts import Prompts, Scalar
from darts_server.rollout.rollouts import Limits, Plan, Rollouts
from darts_server.rollout.run import GroupRun, Trajectory
from darts_server.types import GroupRecord

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

    def candidates_started(self, count: int) -> None:
        self.started += count

    def group_ended(self, record: GroupRecord) -> None:
        self.records.append(record)


class Documents:
    """A store of plain dictionaries."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], dict[str, Scalar]] = {}

    def get(self, kind: str, key: str) -> dict[str, Scalar] | None:
        return self.kept.get((kind, key))

    def put(self, kind: str, key: str, document: Mapping[str, Scalar]) -> None:
        self.kept[kind, key] = dict(document)


class House:
    """A rollout room on a scripted engine. Peeks are instant, so that steps alone pass time."""

    def __init__(self, script: Callable[[str, int], Script]) -> None:
        self.engine = ScriptedEngine(script)
        self.recorder = Recorder()
        self.store = Documents()
        self.rollouts: Rollouts[str, list[int]] = Rollouts(
            self.engine,
            SHAPINGS,
            "uniform",
            Limits(64),
            Prompts(self.store),
            [self.recorder],
            peek_interval=0,
            batch_window=0,
            clock=lambda: self.engine.now,
        )

    def run(
        self, size: int, policy: str = "shortest", *, group_id: str = "g", early: bool = False, lots: int = 7
    ) -> GroupRun[str, list[int]]:
        plan = self.rollouts.plan(size, policy)
        assert isinstance(plan, Plan)
        candidates = plan.shaping.candidates(size)
        return self.rollouts.run(
            group_id, plan, candidates, group_id=group_id, prompt_key=group_id, lots=(lots,), early=early
        )

    async def group(self, run: GroupRun[str, list[int]]) -> list[Trajectory[list[int]]]:
        """Play a group to its end."""
        waiting = asyncio.create_task(collect(run))
        await settle()
        await self.engine.run()
        return await waiting


async def collect(run: GroupRun[str, list[int]]) -> list[Trajectory[list[int]]]:
    return [trajectory async for trajectory in run.trajectories()]


def lengths(*each: int) -> Callable[[str, int], Script]:
    """Candidate i has the i-th length; later ones the last."""
    return lambda _, index: Script(each[min(index, len(each) - 1)])
