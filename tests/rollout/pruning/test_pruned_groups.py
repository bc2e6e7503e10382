"""The whole path on the scripted engine: groups are scored, returned and rewarded, and later ones are pruned."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from darts_server.engine.scripted import Script
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, build_policies
from darts_server.policy.survival import Pruning
from darts_server.rollout.learned.statistics import Rewards
from darts_server.rollout.observers.reward_matching import Reward, RewardMatcher
from darts_server.rollout.pruning.scoring import ScoringSettings
from darts_server.types import DiscardReason
from tests.quality.synthetic import WIDTH, SyntheticTask
from tests.rollout.helpers import Documents, Harness
from tests.rollout.pruning.bench import FAST, Bench

pytestmark = pytest.mark.anyio
POINT = 4
SIZE = 4


class RewardedGroups:
    """Groups of a synthetic task on the scripted engine, whose trajectories are all rewarded."""

    def __init__(self, policy: str, settings: ScoringSettings = FAST) -> None:
        self.policy = policy
        self.task = SyntheticTask()
        self.correct: dict[tuple[str, int], bool] = {}
        self.bench = Bench(replace(settings, detect_at=(POINT,)))
        shapings = build_policies(Shaping(num_longest=1), Deadline(), Pruning())
        self.harness = Harness(self._script, shapings, scorer=self.bench.pruner)
        self.harness.engine.probe_width = WIDTH
        on_reward = [self.bench.pruner.learn_reward]
        self.reward_matcher = RewardMatcher(Rewards(Documents()), self._rewarded, lambda *_: None, on_reward=on_reward)
        events = self.harness.rollouts.observers
        events.trajectory_returned.add(self.reward_matcher.trajectory_returned)
        events.group_ended.add(self.reward_matcher.group_ended)
        self.groups = 0

    def _rewarded(self, *_: object) -> None:
        self.bench.pruner.record_rewarded_group()

    def _script(self, group: str, index: int) -> Script:
        [(hidden, target)] = self.task.trajectories(1)
        self.correct[group, index] = target > 0
        length = int(self.task.rng.integers(2, 14))
        return Script(length, hidden=lambda _: hidden.astype(np.float32).tolist())

    async def run_group(self) -> int:
        """Run and reward a group; return how many of its candidates were pruned."""
        name = f"g{self.groups}"
        self.groups += 1
        self.bench.version = self.groups // 16
        self.bench.now += 1
        run = self.harness.run(SIZE, self.policy, group_id=name, tail_seed=self.groups)
        returned = await self.harness.group(run)
        assert len(returned) == SIZE
        rewards = [
            Reward(float(self.correct[name, t.index]), self.correct[name, t.index], f"{name}:{t.index}")
            for t in returned
        ]
        assert (await self.reward_matcher.report(rewards)).matched == SIZE
        return sum(c.reason is DiscardReason.PRUNED for c in self.harness.record(name).candidates)


@pytest.mark.parametrize("policy", ["arrol", "darts+arrol"])
async def test_groups_are_complete_whether_or_not_candidates_are_pruned(policy: str) -> None:
    groups = RewardedGroups(policy)
    assert [await groups.run_group() for _ in range(16)] == [0] * 16
    for _ in range(32):
        await groups.run_group()
    assert groups.bench.pruner.status.value == "ready"
    pruned = [await groups.run_group() for _ in range(12)]
    assert sum(pruned) > 6
    counts = groups.bench.counter.counts
    assert counts["pruned"] >= sum(pruned)
    assert "states missing" not in counts
    survivals = groups.bench.head.trainer._replay._survivals[: len(groups.bench.head.trainer._replay)]
    assert 0 < survivals.min() < 1, "labels hold the survival probability of pruned groups"
    await asyncio.sleep(0)
    assert not groups.bench.pruner._pending.size, "each was rewarded or dropped"
