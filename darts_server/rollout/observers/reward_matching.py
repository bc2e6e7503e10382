"""Match reported rewards to the trajectories that were returned, and learn from them.

Rewards may arrive in any order and more than once, for a group that still runs, has ended, or is not kept any more.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Protocol

from darts_server.identifiers import from_header
from darts_server.observers import GroupObserver, RewardObserver
from darts_server.policy.reward_stats import Moments, RewardStats, single_length
from darts_server.records import GroupKey, GroupRecord, TrajectoryRecord
from darts_server.rollout.observers.provenance import DEFAULT_KEPT, DEFAULT_KEPT_CANDIDATES
from darts_server.rollout.observers.returned_groups import ReturnedGroup, ReturnedGroups, ReturnedTrajectory
from darts_server.serving.admission import caller

REWARDS_PER_TURN = 64
"""Rewards handled in one turn of the event loop: ten milliseconds if each is given with 8,192 tokens."""
MAX_UNKNOWN_INDICES = 100

OnReward = Callable[[GroupKey, int, float, bool], None]
"""Called with a trajectory's reward: its group, its candidate's index, the reward, and whether it is correct."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward as a trainer reports it, for a trajectory given by its id, or by its prompt's and its own token ids."""

    reward: float
    correct: bool
    trajectory_id: str | None = None
    prompt_token_ids: Sequence[int] = ()
    completion_token_ids: Sequence[int] = ()


@dataclass(slots=True)
class RewardReport:
    """How many of the reported rewards were matched, repeated or unknown; each is one of the three.

    ``repeated``: the trajectory has a reward already. ``unknown``: the trajectory is not kept. ``unknown_indices``:
    positions of the first `MAX_UNKNOWN_INDICES` of these.
    """

    matched: int = 0
    repeated: int = 0
    unknown: int = 0
    unknown_indices: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """Reward and whether it was correct, by candidate index; ``zero_variance`` is ``None`` until all have one."""

    by_index: Mapping[int, tuple[float, bool]] = field(default_factory=dict)
    zero_variance: bool | None = None


class RewardLearner(Protocol):
    """Learns from rewards."""

    def learn(self, new_stats: Mapping[str | None, RewardStats]) -> None:
        """Learn from newly rewarded trajectories, by prompt key."""
        ...


class RewardMatcher(GroupObserver):
    """Match rewards to trajectories of the newest ``kept`` groups, and learn from them.

    ``kept_candidates``: of all kept groups together, from which the oldest groups are dropped too.

    Args:
        rewards: gets statistics of rewarded trajectories.
        on_group_rewarded: called once per group when all of its returned trajectories have rewards, with its record
            and by candidate index which of them are correct.
        observer: gets the counts of every report.
        on_reward: each is called with every trajectory's first reward.
    """

    def __init__(
        self,
        rewards: RewardLearner,
        on_group_rewarded: Callable[[GroupRecord, Mapping[int, bool]], None],
        observer: RewardObserver,
        kept: int = DEFAULT_KEPT,
        on_reward: Sequence[OnReward] = (),
        kept_candidates: int = DEFAULT_KEPT_CANDIDATES,
    ) -> None:
        self._rewards = rewards
        self._on_reward = tuple(on_reward)
        self._on_group_rewarded = on_group_rewarded
        self._observer = observer
        self._groups = ReturnedGroups(kept, kept_candidates)

    async def report(self, rewards: Sequence[Reward]) -> RewardReport:
        """Match rewards to kept trajectories that have none yet. Yields to the event loop between chunks.

        An id names a trajectory of the caller: others may have chosen the same. For admins, such as a service that
        computes the rewards of all, it may name another caller's. Tokens name others' if the caller has none with them.
        """
        report = RewardReport()
        for begin in range(0, len(rewards), REWARDS_PER_TURN):
            self._match(rewards[begin : begin + REWARDS_PER_TURN], begin, report)
            await asyncio.sleep(0)
        return report

    def group_rewards(self, record: GroupRecord) -> GroupRewards:
        """The rewards that were reported for that group."""
        group = self._groups.find(record)
        if group is None:
            return GroupRewards()
        by_index = {t.index: (t.reward, t.correct) for t in group.returned.values() if t.reward is not None}
        return GroupRewards(by_index, group.zero_variance if group.is_fully_rewarded else None)

    def trajectory_returned(self, returned: TrajectoryRecord) -> None:
        self._groups.add(returned)

    def group_ended(self, record: GroupRecord) -> None:
        group = self._groups.end(record)
        # Trajectories that were returned while it ran, and rewarded before it ended.
        rewarded = [_trajectory_stats(t) for t in group.returned.values() if t.reward is not None]
        if group.is_fully_rewarded:
            rewarded.append(_group_stats(group))
        if rewarded:
            self._learn({group.prompt_key: reduce(add, rewarded)}, [group] if group.is_fully_rewarded else [])

    # --- matching -----------------------------------------------------------

    def _match(self, rewards: Sequence[Reward], begin: int, report: RewardReport) -> None:
        """Match one chunk, whose first reward is number ``begin`` of the report."""
        matched, unknown = report.matched, report.unknown
        stats: defaultdict[str | None, RewardStats] = defaultdict(RewardStats)
        fully_rewarded: list[ReturnedGroup] = []
        for place, reward in enumerate(rewards, begin):
            found = self._find_trajectories(reward)
            unrewarded = [trajectory for trajectory in found if trajectory.reward is None]
            for trajectory in unrewarded:
                group = trajectory.group
                group.set_reward(trajectory, reward.reward, reward.correct)
                for on_reward in self._on_reward:
                    on_reward(group.key, trajectory.index, reward.reward, reward.correct)
                if group.record is not None:  # otherwise its weight is not known yet, and it counts when the group ends
                    stats[group.prompt_key] += _trajectory_stats(trajectory)
                if group.is_fully_rewarded:
                    stats[group.prompt_key] += _group_stats(group)
                    fully_rewarded.append(group)
            _count(report, place, found, unrewarded)
        self._observer.rewards_reported(report.matched - matched, report.unknown - unknown)
        self._learn(stats, fully_rewarded)

    def _find_trajectories(self, reward: Reward) -> Sequence[ReturnedTrajectory]:
        who, groups, name = caller.get(), self._groups, reward.trajectory_id
        if name is not None:
            # Callers may have made it from the group's id in the header of its response.
            names = (name, from_header(name))
            return next(filter(None, (groups.by_id(each, who.name, others=who.is_admin) for each in names)), ())
        return groups.by_tokens(reward.prompt_token_ids, reward.completion_token_ids, who.name)

    def _learn(self, stats: Mapping[str | None, RewardStats], fully_rewarded: Sequence[ReturnedGroup]) -> None:
        self._rewards.learn(stats)
        for group in fully_rewarded:
            assert group.record is not None
            self._observer.group_rewarded(group.zero_variance)
            self._on_group_rewarded(group.record, {t.index: t.correct for t in group.returned.values()})


def _count(
    report: RewardReport, place: int, found: Sequence[ReturnedTrajectory], unrewarded: Sequence[ReturnedTrajectory]
) -> None:
    if unrewarded:
        report.matched += 1
    elif found:
        report.repeated += 1
    else:
        report.unknown += 1
        if len(report.unknown_indices) < MAX_UNKNOWN_INDICES:
            report.unknown_indices.append(place)


def _trajectory_stats(trajectory: ReturnedTrajectory) -> RewardStats:
    length, none = single_length(trajectory.tokens, trajectory.weight), Moments()
    return RewardStats(length, none) if trajectory.correct else RewardStats(none, length)


def _group_stats(group: ReturnedGroup) -> RewardStats:
    return RewardStats(groups=1, zero_variance=int(group.zero_variance))
