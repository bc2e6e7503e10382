import asyncio
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from darts_server.caller import caller
from darts_server.estimates.reward_stats import RewardStats, single_length
from darts_server.identifiers import decode_from_header
from darts_server.records import GroupKey, GroupRecord, TrajectoryRecord
from darts_server.rollout.learned.statistics import Rewards
from darts_server.rollout.observers.provenance import DEFAULT_KEPT, DEFAULT_KEPT_CANDIDATES
from darts_server.serving.fair_cache import FairCache
from darts_server.types import Outcome

REWARDS_PER_TURN = 64
"""Rewards in one turn of the event loop: ten milliseconds if they come with 8,192 tokens."""
MAX_UNKNOWN_INDICES = 100
FINGERPRINT_BYTES = 16
TOKEN_TYPE = "i"

OnReward = Callable[[GroupKey, int, bool], None]
"""Called with the group and the index of a rewarded trajectory, and whether it is correct."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward as a trainer reports it, with a trajectory's id, or the token ids of prompt and answer."""

    reward: float
    correct: bool
    trajectory_id: str | None = None
    prompt_token_ids: Sequence[int] = ()
    completion_token_ids: Sequence[int] = ()


@dataclass(slots=True)
class RewardReport:
    """A reward is repeated if its trajectory has a reported reward, and unknown if the trajectory is not kept.

    ``unknown_indices``: positions of the first `MAX_UNKNOWN_INDICES` unknown rewards.
    """

    matched: int = 0
    repeated: int = 0
    unknown: int = 0
    unknown_indices: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """Reward and correctness by index. ``zero_variance`` is None until all trajectories have rewards."""

    by_index: Mapping[int, tuple[float, bool]] = field(default_factory=dict)
    zero_variance: bool | None = None


@dataclass(slots=True, eq=False)
class ReturnedTrajectory:
    """``correct`` has no meaning before there is a reward."""

    group: "ReturnedGroup"
    index: int
    fingerprint: bytes
    reward: float | None = None
    correct: bool = False
    is_reported: bool = False
    """Whether the caller has reported the reward, which replaces a verifier's reward."""


@dataclass(slots=True, eq=False)
class ReturnedGroup:
    """``record`` is None while the group runs."""

    key: GroupKey
    started_at: float
    prompt_key: str | None
    record: GroupRecord | None = None
    size: int | None = None
    """None until the group is complete."""
    trajectories: dict[str, ReturnedTrajectory] = field(default_factory=dict)
    """By candidate index as text, as in the trajectories' ids."""
    num_rewarded: int = 0

    @property
    def is_fully_rewarded(self) -> bool:
        return self.num_rewarded == self.size

    @property
    def zero_variance(self) -> bool:
        """Of a fully rewarded group."""
        return len({trajectory.reward for trajectory in self.trajectories.values()}) == 1


@dataclass(slots=True)
class Changes:
    """Statistics by prompt key that rewards add and replace, and groups that became fully rewarded."""

    new: defaultdict[str | None, RewardStats] = field(default_factory=lambda: defaultdict(RewardStats))
    old: defaultdict[str | None, RewardStats] = field(default_factory=lambda: defaultdict(RewardStats))
    fully_rewarded: list[ReturnedGroup] = field(default_factory=list)

    def add_rewarded_group(self, group: ReturnedGroup) -> None:
        self.new[group.prompt_key] += _stats_if_fully_rewarded(group)
        self.fully_rewarded.append(group)


def fingerprint(prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> bytes:
    """Takes 18 microseconds for a thousand tokens."""
    hashed = blake2b(len(prompt_token_ids).to_bytes(8, "little"), digest_size=FINGERPRINT_BYTES)
    hashed.update(array(TOKEN_TYPE, prompt_token_ids))
    hashed.update(array(TOKEN_TYPE, token_ids))
    return hashed.digest()


class RewardMatcher:
    """Matches reported and verifiers' rewards to trajectories, and learns from them.

    Rewards may arrive in any order and more than once, for groups that run, have ended, or are not kept any more.

    Args:
        on_group_rewarded: called when all trajectories of a group have rewards, with correctness by candidate index,
            and whether all rewards are equal. A group that was selected by rewards has discarded candidates too.
        on_report: called with the numbers of matched and of unknown rewards.
        kept: number of groups. At the limit, see `FairCache`.
        on_reward: called with every trajectory's first reward.
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
        # By owner and group id.
        self._groups: FairCache[str, ReturnedGroup] = FairCache(kept, DEFAULT_KEPT_CANDIDATES)
        # Owners of the kept groups, by group id.
        self._owners: dict[str, set[str | None]] = {}
        self._by_fingerprint: dict[bytes, list[ReturnedTrajectory]] = {}

    def trajectory_returned(self, returned: TrajectoryRecord) -> None:
        key = (returned.owner, returned.group_id)
        group = self._find_or_create(key, returned.started_at, returned.prompt_key)
        trajectory = ReturnedTrajectory(
            group, returned.index, fingerprint(returned.prompt_token_ids, returned.token_ids)
        )
        index_in_id = str(returned.index)
        group.trajectories[index_in_id] = trajectory
        self._by_fingerprint.setdefault(trajectory.fingerprint, []).append(trajectory)

    def group_ended(self, record: GroupRecord) -> None:
        group = self._find_or_create(record.key, record.started_at, record.prompt_key)
        group.record = record
        group.size = len(record.selected) if record.outcome is Outcome.COMPLETED else None
        # Now the number of candidates is known, which the cache limits.
        self._keep(group)
        changes = Changes()
        if group.is_fully_rewarded:
            changes.add_rewarded_group(group)
        # Learn from trajectories that were rewarded before the group ended.
        for trajectory in group.trajectories.values():
            if trajectory.reward is not None:
                changes.new[group.prompt_key] += _trajectory_stats(trajectory, record)
        # A selection by rewards would bias the statistics, so learn discarded candidates too.
        for index, correct in _correct_of_discarded(record).items():
            tokens = record.candidates[index].tokens
            changes.new[group.prompt_key] += _candidate_stats(tokens, 1.0, correct=correct)
        self._learn(changes)

    def trajectory_verified(
        self,
        key: GroupKey,
        index: int,
        reward: float,
        correct: bool,
    ) -> None:
        """Learn a verifier's reward, unless the trajectory has a reward."""
        owner, group_id = key
        group = self._groups.entries_of(owner).get(group_id)
        trajectory = None if group is None else group.trajectories.get(str(index))
        if trajectory is None or trajectory.reward is not None:
            return
        changes = Changes()
        self._set_reward(trajectory, reward, correct, changes)
        self._learn(changes)

    def group_rewards(self, record: GroupRecord) -> GroupRewards:
        """Empty if the group is not kept."""
        group = self._groups.entries_of(record.owner).get(record.group_id)
        if group is None or group.started_at != record.started_at:
            return GroupRewards()
        by_index = {t.index: (t.reward, t.correct) for t in group.trajectories.values() if t.reward is not None}
        zero_variance = None
        if group.is_fully_rewarded:
            zero_variance = group.zero_variance
        return GroupRewards(by_index, zero_variance)

    async def report(self, rewards: Sequence[Reward]) -> RewardReport:
        """Match rewards to kept trajectories, and yield to the event loop between chunks.

        Callers may choose the same ids, so an id names a trajectory of the caller. Tokens name trajectories of the
        caller,
        or else of other callers.
        """
        report = RewardReport()
        for begin in range(0, len(rewards), REWARDS_PER_TURN):
            matched_before = report.matched
            unknown_before = report.unknown
            changes = Changes()
            for place, reward in enumerate(rewards[begin : begin + REWARDS_PER_TURN], begin):
                found = self._find_trajectories(reward)
                unreported = [trajectory for trajectory in found if not trajectory.is_reported]
                for trajectory in unreported:
                    trajectory.is_reported = True
                    self._set_reward(trajectory, reward.reward, reward.correct, changes)
                if unreported:
                    report.matched += 1
                elif found:
                    report.repeated += 1
                else:
                    report.unknown += 1
                    if len(report.unknown_indices) < MAX_UNKNOWN_INDICES:
                        report.unknown_indices.append(place)
            self._on_report(report.matched - matched_before, report.unknown - unknown_before)
            self._learn(changes)
            await asyncio.sleep(0)
        return report

    def _set_reward(
        self,
        trajectory: ReturnedTrajectory,
        reward: float,
        correct: bool,
        changes: Changes,
    ) -> None:
        group = trajectory.group
        # The weight is known when the group has ended. `group_ended` learns earlier rewards.
        record = group.record
        is_first = trajectory.reward is None
        if not is_first and record is not None:
            changes.old[group.prompt_key] += _trajectory_stats(trajectory, record) + _stats_if_fully_rewarded(group)
        trajectory.reward = reward
        trajectory.correct = correct

        if is_first:
            group.num_rewarded += 1
            for on_reward in self._on_reward:
                on_reward(group.key, trajectory.index, correct)
            if record is not None:
                changes.new[group.prompt_key] += _trajectory_stats(trajectory, record)
            if group.is_fully_rewarded:
                changes.add_rewarded_group(group)
        elif record is not None:
            changes.new[group.prompt_key] += _trajectory_stats(trajectory, record) + _stats_if_fully_rewarded(group)

    def _find_trajectories(self, reward: Reward) -> Sequence[ReturnedTrajectory]:
        who = caller.get()
        if reward.trajectory_id is None:
            same_tokens = self._by_fingerprint.get(
                fingerprint(reward.prompt_token_ids, reward.completion_token_ids), ()
            )
            of_caller = [trajectory for trajectory in same_tokens if trajectory.group.key[0] == who.name]
            # Rewards may come with another key than the rollouts.
            return of_caller or same_tokens
        # The caller may have the group's id from a response header, where it is encoded.
        for trajectory_id in (reward.trajectory_id, decode_from_header(reward.trajectory_id)):
            group_id, _, index = trajectory_id.rpartition(":")
            owner = who.name
            owners = self._owners.get(group_id, set())
            # An admin may reward another caller's trajectory, unless several callers have chosen the group's id.
            if who.is_admin and owner not in owners and len(owners) == 1:
                [owner] = owners
            group = self._groups.entries_of(owner).get(group_id)
            if group is not None and index in group.trajectories:
                return [group.trajectories[index]]
        return ()

    def _learn(self, changes: Changes) -> None:
        self._rewards.learn(changes.new, changes.old)
        for group in changes.fully_rewarded:
            assert group.record is not None
            correct_by_index = _correct_of_discarded(group.record)
            for trajectory in group.trajectories.values():
                correct_by_index[trajectory.index] = trajectory.correct
            self._on_group_rewarded(group.record, correct_by_index, group.zero_variance)

    def _find_or_create(self, key: GroupKey, started_at: float, prompt_key: str | None) -> ReturnedGroup:
        owner, group_id = key
        group = self._groups.entries_of(owner).get(group_id)
        # A caller may reuse a request id. The newer group replaces the older.
        if group is not None and group.started_at != started_at:
            self._groups.pop(owner, group_id)
            self._forget(group)
            group = None
        if group is None:
            group = ReturnedGroup(key, started_at, prompt_key)
            self._owners.setdefault(group_id, set()).add(owner)
            self._keep(group)
        return group

    def _keep(self, group: ReturnedGroup) -> None:
        owner, group_id = group.key
        candidates = 0 if group.record is None else len(group.record.candidates)
        for _, dropped in self._groups.put(owner, group_id, group, candidates):
            self._forget(dropped)

    def _forget(self, group: ReturnedGroup) -> None:
        owner, group_id = group.key
        self._owners[group_id].discard(owner)
        if not self._owners[group_id]:
            del self._owners[group_id]
        for trajectory in group.trajectories.values():
            same_tokens = self._by_fingerprint[trajectory.fingerprint]
            # Usually the first entry, as older groups are dropped first.
            same_tokens.remove(trajectory)
            if not same_tokens:
                del self._by_fingerprint[trajectory.fingerprint]


def _correct_of_discarded(record: GroupRecord) -> dict[int, bool]:
    """Return correctness by index, if the group was selected by rewards."""
    if record.num_rewarded is None or record.outcome is not Outcome.COMPLETED:
        return {}
    return {c.index: c.correct for c in record.candidates if c.selected_as is None and c.correct is not None}


def _stats_if_fully_rewarded(group: ReturnedGroup) -> RewardStats:
    if not group.is_fully_rewarded:
        return RewardStats()
    return RewardStats(groups=1, zero_variance=int(group.zero_variance))


def _trajectory_stats(trajectory: ReturnedTrajectory, record: GroupRecord) -> RewardStats:
    candidate = record.candidates[trajectory.index]
    weight = 1.0
    # All candidates of such a group are counted, so no candidate stands for others.
    is_selected_by_rewards = record.num_rewarded is not None
    if not is_selected_by_rewards:
        weight = candidate.weight or 1.0
    return _candidate_stats(candidate.tokens, weight, correct=trajectory.correct)


def _candidate_stats(tokens: int, weight: float, *, correct: bool) -> RewardStats:
    length = single_length(tokens, weight)
    return RewardStats(right=length) if correct else RewardStats(wrong=length)
