"""Rewards that come back for trajectories that were returned, and what is done with them.

They may come in any order and more than once, for a group that runs still, ended long ago, or is not kept any more.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from darts_server.observers import GroupObserver, RewardObserver
from darts_server.policy.reward_stats import Moments, RewardStats, single_length
from darts_server.rollout.learned.rewards import Rewards
from darts_server.rollout.observers.provenance import DEFAULT_KEPT
from darts_server.rollout.observers.returned import Group, ReturnedGroups, Trajectory
from darts_server.types import GroupRecord, Returned

TURN = 64
"""Rewards taken in one turn of the event loop: ten milliseconds where each is named by 8,192 tokens."""
MOST_INDICES = 100

OnReward = Callable[[str, int, float, bool], None]
"""Hears of a trajectory's reward: its group's id, its candidate's index, the reward, and whether it is right."""


@dataclass(frozen=True, slots=True)
class Reward:
    """What a trainer says of a trajectory, which it names by its id or by its prompt's and its own token ids."""

    reward: float
    correct: bool
    trajectory_id: str | None = None
    prompt_token_ids: Sequence[int] = ()
    completion_token_ids: Sequence[int] = ()


@dataclass(slots=True)
class Report:
    """What became of rewards: each is one of the three.

    ``repeated``: for a trajectory that has one already. ``unknown``: for one that is not kept. ``unknown_indices``:
    places of the first `MOST_INDICES` of these.
    """

    matched: int = 0
    repeated: int = 0
    unknown: int = 0
    unknown_indices: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """Reward and whether it was right, by candidate index; ``zero_variance`` is ``None`` until all have one."""

    by_index: Mapping[int, tuple[float, bool]] = field(default_factory=dict)
    zero_variance: bool | None = None


class Feedback(GroupObserver):
    """Matches rewards to trajectories of the newest ``kept`` groups, and learns from them.

    Implements the observer of groups, and hears of each trajectory that is handed to a caller.

    Args:
        rewards: where statistics are kept.
        rewarded: hears once of each group whose returned trajectories all have rewards, and by candidate index which
            of them are right.
        observer: hears of reports.
        on_reward: each hears of every trajectory's first reward.
    """

    def __init__(
        self,
        rewards: Rewards,
        rewarded: Callable[[GroupRecord, Mapping[int, bool]], None],
        observer: RewardObserver,
        kept: int = DEFAULT_KEPT,
        on_reward: Sequence[OnReward] = (),
    ) -> None:
        self._rewards = rewards
        self._on_reward = tuple(on_reward)
        self._rewarded = rewarded
        self._observer = observer
        self._kept = ReturnedGroups(kept)

    async def report(self, rewards: Sequence[Reward]) -> Report:
        """Take in the rewards of trajectories that are kept and have none. Others have their turns meanwhile."""
        report = Report()
        for begin in range(0, len(rewards), TURN):
            self._take(rewards[begin : begin + TURN], begin, report)
            await asyncio.sleep(0)
        return report

    def of(self, record: GroupRecord) -> GroupRewards:
        """What was reported for that group."""
        group = self._kept.find(record)
        if group is None:
            return GroupRewards()
        known = {t.index: (t.reward, t.correct) for t in group.returned.values() if t.reward is not None}
        return GroupRewards(known, group.zero_variance if group.whole else None)

    def trajectory_returned(self, returned: Returned) -> None:
        """A trajectory was handed to its caller, before its group ended or after. Said once per trajectory."""
        self._kept.add(returned)

    def group_ended(self, record: GroupRecord) -> None:
        group = self._kept.end(record)
        if group.whole:  # its trajectories were returned while it ran, and their rewards were as fast
            self._learn({group.prompt_key: _of_group(group)}, [group])

    # --- taking them in -----------------------------------------------------

    def _take(self, rewards: Sequence[Reward], begin: int, report: Report) -> None:
        matched, unknown = report.matched, report.unknown
        news: defaultdict[str | None, RewardStats] = defaultdict(RewardStats)
        whole: list[Group] = []
        for place, reward in enumerate(rewards, begin):
            named = self._named(reward)
            fresh = [trajectory for trajectory in named if trajectory.reward is None]
            for trajectory in fresh:
                group = trajectory.group
                group.reward(trajectory, reward.reward, reward.correct)
                for told in self._on_reward:
                    told(group.group_id, trajectory.index, reward.reward, reward.correct)
                news[group.prompt_key] += _of_trajectory(trajectory)
                if group.whole:
                    news[group.prompt_key] += _of_group(group)
                    whole.append(group)
            _count(report, place, named, fresh)
        self._observer.rewards_reported(report.matched - matched, report.unknown - unknown)
        self._learn(news, whole)

    def _named(self, reward: Reward) -> Sequence[Trajectory]:
        if reward.trajectory_id is not None:
            return self._kept.of_id(reward.trajectory_id)
        return self._kept.of_tokens(reward.prompt_token_ids, reward.completion_token_ids)

    def _learn(self, news: Mapping[str | None, RewardStats], whole: Sequence[Group]) -> None:
        self._rewards.learn(news)
        for group in whole:
            assert group.record is not None
            self._observer.group_rewarded(group.zero_variance)
            self._rewarded(group.record, {t.index: t.correct for t in group.returned.values()})


def _count(report: Report, place: int, named: Sequence[Trajectory], fresh: Sequence[Trajectory]) -> None:
    if fresh:
        report.matched += 1
    elif named:
        report.repeated += 1
    else:
        report.unknown += 1
        if len(report.unknown_indices) < MOST_INDICES:
            report.unknown_indices.append(place)


def _of_trajectory(trajectory: Trajectory) -> RewardStats:
    length, none = single_length(trajectory.tokens), Moments()
    return RewardStats(length, none) if trajectory.correct else RewardStats(none, length)


def _of_group(group: Group) -> RewardStats:
    return RewardStats(groups=1, zero_variance=int(group.zero_variance))
