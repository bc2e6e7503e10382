"""With any content of the state file, groups complete and statistics are learned again."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from darts_server.engine.scripted import Script, ScriptedEngine, settle
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import BudgetKind, Shaping
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.plan import Limits, Plan, Planner
from darts_server.rollout.rollouts import Intervals, Rollouts
from darts_server.rollout.spec import GroupSpec
from darts_server.store import Store
from tests.rollout.helpers import Recorder, collect

pytestmark = pytest.mark.anyio
POLICIES = {
    kind.value: Shaping(redundancy=1.5, adaptive=True, budget=kind, deadline=Deadline(exploration=0.0))
    for kind in BudgetKind
}
KEYS = ("all", "engine", "p", *(f"{policy}/8" for policy in POLICIES))
KINDS = ("prompt", "dataset", "step", "profile", "deadline", "losses", "price", "latency")
JUNK: list[Any] = [None, 3, -1.5, "x", [], [[1]], [[0, "a", None]], {}, {"recent": 7}, {"right": -1}, {"seconds": [1]}]
PROMPTS: list[dict[str, Any]] = [
    {},
    {"value": "null"},
    {"std_ema": "wide", "mean_ema": 3.0, "groups": 1, "candidates": 2, "weight_version": None},
    {"std_ema": 1.0, "mean_ema": -3.0, "groups": 1, "candidates": 2, "weight_version": None},
]


async def make(store: Store, policy: str) -> Recorder:
    engine, recorder = ScriptedEngine(lambda _, index: Script(5 + index)), Recorder()
    rollouts: Rollouts[str, list[int]] = Rollouts(
        engine, Planner(POLICIES, policy, Limits(64)), Statistics(store), Intervals(poll=0, allocation=0)
    )
    rollouts.observe(recorder)
    for batch in (1, 9):
        plan = rollouts.plan(8)
        assert isinstance(plan, Plan)
        grants = await asyncio.gather(*(rollouts.allocator.allocate(plan, "p") for _ in range(batch)))
        specs = [GroupSpec.of_plan(plan, "p", f"{batch}-{i}", "p") for i in range(batch)]
        runs = [rollouts.start(spec, plan, grant) for spec, grant in zip(specs, grants, strict=True)]
        tasks = [asyncio.create_task(collect(run)) for run in runs]
        await settle()
        rollouts.statistics.latency.observe(4, 0.01)
        await engine.run()
        assert {len(group) for group in await asyncio.gather(*tasks)} == {8}
    rollouts.statistics.flush()
    return recorder


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("junk", [*JUNK, *PROMPTS], ids=repr)
async def test_groups_complete_and_are_learned_from_whatever_the_store_holds(
    junk: Any, policy: str, tmp_path: Path
) -> None:
    with Store(tmp_path) as store:
        for kind in KINDS:
            for key in KEYS:
                store.put(kind, key, junk if junk in PROMPTS and kind == "prompt" else {"value": json.dumps(junk)})
    with Store(tmp_path) as store:
        recorder = await make(store, policy)
        assert [record.outcome for record in recorder.records] == ["completed"] * 10
        known = store.get("prompt", "p")
        assert known is not None
        assert known["groups"] == 10
