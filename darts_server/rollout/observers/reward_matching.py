"""Match reported rewards to the trajectories that were returned, and learn from them.

Rewards may arrive in any order and more than once, for a group that still runs, has ended, or is not kept any more.
"""

import asyncio
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from darts_server.caller import caller
from darts_server.estimates.reward_stats import RewardStats, single_length
from darts_server.identifiers import from_header
from darts_server.records import GroupKey, GroupRecord, TrajectoryRecord
from darts_server.rollout.learned.statistics import Rewards
from darts_server.rollout.observers.provenance import DEFAULT_KEPT, DEFAULT_KEPT_CANDIDATES
from darts_server.serving.kept import Kept
from darts_server.types import Outcome

REWARDS_PER_TURN = 64
"""Rewards handled in one turn of the event loop: ten milliseconds if each is given with 8,192 tokens."""
MAX_UNKNOWN_INDICES = 100
FINGERPRINT_BYTES = 16
TOKEN_TYPE = "i"
"""32 bits: more than any vocabulary needs."""

OnReward = Callable[[GroupKey, int, bool], None]
"""Called for a rewarded trajectory with its group, its candidate's index, and whether it is correct."""


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


@dataclass(slots=True, eq=False)
class ReturnedTrajectory:
    """A trajectory and its reward. ``reward`` is ``None`` until it is reported; ``correct`` has no meaning before."""

    group: "ReturnedGroup"
    index: int
    tokens: int
    fingerprint: bytes
    reward: float | None = None
    correct: bool = False


@dataclass(slots=True, eq=False)
class ReturnedGroup:
    """The trajectories that a group returned, by candidate index as text. ``record`` is ``None`` while it runs."""

    key: GroupKey
    started_at: float
    prompt_key: str | None
    record: GroupRecord | None = None
    size: int | None = None
    """Number of trajectories that it returns in all; ``None`` until it is complete."""
    returned: dict[str, ReturnedTrajectory] = field(default_factory=dict)
    rewarded: int = 0
    """How many have rewards; equal to ``size`` once all of the complete group do."""

    @property
    def zero_variance(self) -> bool:
        """Whether all rewards of a fully rewarded group are equal."""
        return len({trajectory.reward for trajectory in self.returned.values()}) == 1


def fingerprint(prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> bytes:
    """Hash a prompt and its completion. Takes 18 microseconds for a thousand tokens."""
    hashed = blake2b(len(prompt_token_ids).to_bytes(8, "little"), digest_size=FINGERPRINT_BYTES)
    hashed.update(array(TOKEN_TYPE, prompt_token_ids))
    hashed.update(array(TOKEN_TYPE, token_ids))
    return hashed.digest()


class RewardMatcher:
    """Match rewards to trajectories of the ``kept`` newest groups, and learn from them.

    At most `DEFAULT_KEPT_CANDIDATES` candidates are kept. At these limits, the server drops the oldest group of the
    caller that has most, see `Kept`. A trajectory takes about 400 bytes, and the record of a candidate as much.

    Args:
        rewards: gets statistics of rewarded trajectories.
        on_group_rewarded: called once per group when all of its returned trajectories have rewards, with its record,
            by candidate index which of them are correct, and whether all rewards are equal.
        on_report: called with the numbers of rewards of known trajectories and of unknown ones, chunk by chunk.
        on_reward: each is called with every trajectory's first reward.
    """

    def __init__(
        self,
        rewards: Rewards,
        on_group_rewarded: Callable[[GroupRecord, Mapping[int, bool], bool], None],
        on_report: Callable[[int, int], None],
        kept: int = DEFAULT_KEPT,
        on_reward: Sequence[OnReward] = (),
    ) -> None:
        self._rewards = rewards
        self._on_reward = tuple(on_reward)
        self._on_group_rewarded = on_group_rewarded
        self._on_report = on_report
        self._groups: Kept[str, ReturnedGroup] = Kept(kept, DEFAULT_KEPT_CANDIDATES)  # by id
        self._owners: dict[str, set[str | None]] = {}  # of the kept groups, by their ids
        self._by_tokens: dict[bytes, list[ReturnedTrajectory]] = {}

    def trajectory_returned(self, returned: TrajectoryRecord) -> None:
        """Keep a trajectory that its caller got, before its group ended or after."""
        key = (returned.owner, returned.group_id)
        group = self._find_or_create(key, returned.started_at, returned.prompt_key)
        hashed = fingerprint(returned.prompt_token_ids, returned.token_ids)
        trajectory = ReturnedTrajectory(group, returned.index, len(returned.token_ids), hashed)
        group.returned[str(returned.index)] = trajectory
        self._by_tokens.setdefault(hashed, []).append(trajectory)

    def group_ended(self, record: GroupRecord) -> None:
        group = self._find_or_create(record.key, record.started_at, record.prompt_key)
        group.record = record
        group.size = len(record.selected) if record.outcome is Outcome.COMPLETED else None
        self._keep(group)
        # Trajectories that were returned while it ran, and rewarded before it ended.
        is_complete = group.rewarded == group.size
        if not group.rewarded and not is_complete:
            return
        stats = RewardStats()
        for trajectory in group.returned.values():
            if trajectory.reward is not None:
                stats += _trajectory_stats(trajectory, record)
        if is_complete:
            stats += _group_stats(group)
        self._learn({group.prompt_key: stats}, [group] if is_complete else [])

    def group_rewards(self, record: GroupRecord) -> GroupRewards:
        """The rewards that were reported for that group."""
        group = self._groups.of(record.owner).get(record.group_id)
        if group is None or group.started_at != record.started_at:
            return GroupRewards()
        by_index = {t.index: (t.reward, t.correct) for t in group.returned.values() if t.reward is not None}
        return GroupRewards(by_index, group.zero_variance if group.rewarded == group.size else None)

    async def report(self, rewards: Sequence[Reward]) -> RewardReport:
        """Match rewards to kept trajectories that have none yet. Yields to the event loop between chunks.

        An id names a trajectory of the caller: others may have chosen the same. For admins, such as a service that
        computes the rewards of all, it may name another caller's. Tokens name others' if the caller has none with them.
        """
        report = RewardReport()
        for begin in range(0, len(rewards), REWARDS_PER_TURN):
            matched, unknown = report.matched, report.unknown
            stats: defaultdict[str | None, RewardStats] = defaultdict(RewardStats)
            fully_rewarded: list[ReturnedGroup] = []
            for place, reward in enumerate(rewards[begin : begin + REWARDS_PER_TURN], begin):
                found = self._find(reward)
                unrewarded = [trajectory for trajectory in found if trajectory.reward is None]
                for trajectory in unrewarded:
                    group = trajectory.group
                    trajectory.reward, trajectory.correct = reward.reward, reward.correct
                    group.rewarded += 1
                    for on_reward in self._on_reward:
                        on_reward(group.key, trajectory.index, reward.correct)
                    if group.record is not None:  # else its weight is not known yet, and it counts when the group ends
                        stats[group.prompt_key] += _trajectory_stats(trajectory, group.record)
                    if group.rewarded == group.size:
                        stats[group.prompt_key] += _group_stats(group)
                        fully_rewarded.append(group)
                if unrewarded:
                    report.matched += 1
                elif found:
                    report.repeated += 1
                else:
                    report.unknown += 1
                    if len(report.unknown_indices) < MAX_UNKNOWN_INDICES:
                        report.unknown_indices.append(place)
            self._on_report(report.matched - matched, report.unknown - unknown)
            self._learn(stats, fully_rewarded)
            await asyncio.sleep(0)
        return report

    def _find(self, reward: Reward) -> Sequence[ReturnedTrajectory]:
        """Find the trajectory with that id, or all kept ones with exactly these tokens."""
        who = caller.get()
        if reward.trajectory_id is None:
            found = self._by_tokens.get(fingerprint(reward.prompt_token_ids, reward.completion_token_ids), ())
            return [trajectory for trajectory in found if trajectory.group.key[0] == who.name] or found
        # Callers may have made it from the group's id in the header of its response.
        for name in (reward.trajectory_id, from_header(reward.trajectory_id)):
            group_id, _, index = name.rpartition(":")
            owner, owners = who.name, self._owners.get(group_id, set())
            if who.is_admin and owner not in owners and len(owners) == 1:
                [owner] = owners
            group = self._groups.of(owner).get(group_id)
            if group is not None and index in group.returned:
                return [group.returned[index]]
        return ()

    def _learn(self, stats: Mapping[str | None, RewardStats], fully_rewarded: Sequence[ReturnedGroup]) -> None:
        self._rewards.learn(stats)
        for group in fully_rewarded:
            assert group.record is not None
            correct = {trajectory.index: trajectory.correct for trajectory in group.returned.values()}
            self._on_group_rewarded(group.record, correct, group.zero_variance)

    def _find_or_create(self, key: GroupKey, started_at: float, prompt_key: str | None) -> ReturnedGroup:
        group = self._groups.of(key[0]).get(key[1])
        if group is not None and group.started_at != started_at:
            self._groups.pop(*key)  # a caller has reused its request id: the newer group counts
            self._forget(group)
            group = None
        if group is None:
            group = ReturnedGroup(key, started_at, prompt_key)
            self._owners.setdefault(key[1], set()).add(key[0])
            self._keep(group)
        return group

    def _keep(self, group: ReturnedGroup) -> None:
        """Keep a group as the newest one of its caller, and drop what it takes the place of."""
        owner, group_id = group.key
        candidates = 0 if group.record is None else len(group.record.candidates)
        for _, dropped in self._groups.put(owner, group_id, group, candidates):
            self._forget(dropped)

    def _forget(self, group: ReturnedGroup) -> None:
        """Remove a group that is not kept any more from what finds it."""
        owner, group_id = group.key
        self._owners[group_id].discard(owner)
        if not self._owners[group_id]:
            del self._owners[group_id]
        for trajectory in group.returned.values():
            same = self._by_tokens[trajectory.fingerprint]
            same.remove(trajectory)  # usually the first, as older groups are dropped first
            if not same:
                del self._by_tokens[trajectory.fingerprint]


def _trajectory_stats(trajectory: ReturnedTrajectory, record: GroupRecord) -> RewardStats:
    length = single_length(trajectory.tokens, record.candidates[trajectory.index].weight or 1.0)
    return RewardStats(right=length) if trajectory.correct else RewardStats(wrong=length)


def _group_stats(group: ReturnedGroup) -> RewardStats:
    return RewardStats(groups=1, zero_variance=int(group.zero_variance))
