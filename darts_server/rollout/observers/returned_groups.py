"""Index of the trajectories that the last groups returned, by owner and id, and by their tokens."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from darts_server.records import GroupKey, GroupRecord, TrajectoryRecord
from darts_server.types import Outcome

FINGERPRINT_BYTES = 16
TOKEN_TYPE = "i"
"""32 bits: more than any vocabulary needs."""


@dataclass(slots=True, eq=False)
class ReturnedTrajectory:
    """A trajectory and its reward. ``reward`` is ``None`` until it is reported; ``correct`` has no meaning before."""

    group: "ReturnedGroup"
    index: int
    tokens: int
    fingerprint: bytes
    reward: float | None = None
    correct: bool = False

    @property
    def weight(self) -> float:
        """Its weight by the record of its group, which has ended; 1 if it has none."""
        assert self.group.record is not None
        return self.group.record.candidates[self.index].weight or 1.0


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

    @property
    def is_fully_rewarded(self) -> bool:
        """Whether all trajectories of the complete group have rewards."""
        return self.rewarded == self.size

    @property
    def zero_variance(self) -> bool:
        """Whether all rewards of a fully rewarded group are equal."""
        return len({trajectory.reward for trajectory in self.returned.values()}) == 1

    def set_reward(self, trajectory: ReturnedTrajectory, reward: float, correct: bool) -> None:
        trajectory.reward, trajectory.correct = reward, correct
        self.rewarded += 1

    def set_record(self, record: GroupRecord) -> None:
        """Set the record of the group, which has ended."""
        self.record = record
        self.size = len(record.selected) if record.outcome is Outcome.COMPLETED else None


class ReturnedGroups:
    """Keep the newest ``kept`` groups, in the order in which they ended, with at most ``kept_candidates`` in all.

    A trajectory takes about 400 bytes, and the record of a candidate as much.
    """

    def __init__(self, kept: int, kept_candidates: int) -> None:
        self._kept = kept
        self._kept_candidates = kept_candidates
        self._candidates = 0
        self._groups: OrderedDict[GroupKey, ReturnedGroup] = OrderedDict()
        self._owners: dict[str, set[str | None]] = {}  # of the kept groups, by their ids
        self._by_tokens: dict[bytes, list[ReturnedTrajectory]] = {}

    def add(self, returned: TrajectoryRecord) -> None:
        """Add a trajectory that its caller got, before its group ended or after."""
        group = self._find_or_create(returned.key, returned.started_at, returned.prompt_key)
        hashed = fingerprint(returned.prompt_token_ids, returned.token_ids)
        trajectory = ReturnedTrajectory(group, returned.index, len(returned.token_ids), hashed)
        group.returned[str(returned.index)] = trajectory
        self._by_tokens.setdefault(hashed, []).append(trajectory)

    def end(self, record: GroupRecord) -> ReturnedGroup:
        """Record a group's end and return the group."""
        group = self._find_or_create(record.key, record.started_at, record.prompt_key)
        group.set_record(record)
        self._candidates += len(record.candidates)
        self._groups.move_to_end(record.key)
        while self._candidates > self._kept_candidates and len(self._groups) > 1:
            self._drop(next(iter(self._groups)))
        return group

    def find(self, record: GroupRecord) -> ReturnedGroup | None:
        """The group of that record, if it is kept."""
        group = self._groups.get(record.key)
        return group if group is not None and group.started_at == record.started_at else None

    def by_id(self, trajectory_id: str, owner: str | None, others: bool) -> list[ReturnedTrajectory]:
        """The owner's trajectory with that id, if it is kept.

        ``others``: otherwise that of another owner, if only one has such an id.
        """
        group_id, _, index = trajectory_id.rpartition(":")
        owners = self._owners.get(group_id, set())
        if others and owner not in owners and len(owners) == 1:
            [owner] = owners
        group = self._groups.get((owner, group_id))
        found = None if group is None else group.returned.get(index)
        return [] if found is None else [found]

    def by_tokens(
        self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], owner: str | None
    ) -> Sequence[ReturnedTrajectory]:
        """All kept trajectories of the owner with exactly these tokens; those of all others if it has none."""
        found = self._by_tokens.get(fingerprint(prompt_token_ids, token_ids), ())
        return [trajectory for trajectory in found if trajectory.group.key[0] == owner] or found

    def _find_or_create(self, key: GroupKey, started_at: float, prompt_key: str | None) -> ReturnedGroup:
        group = self._groups.get(key)
        if group is not None and group.started_at != started_at:
            self._drop(key)  # a caller has reused its request id: the newer group counts
            group = None
        if group is None:
            group = self._groups[key] = ReturnedGroup(key, started_at, prompt_key)
            self._owners.setdefault(key[1], set()).add(key[0])
            while len(self._groups) > self._kept:
                self._drop(next(iter(self._groups)))
        return group

    def _drop(self, key: GroupKey) -> None:
        group = self._groups.pop(key)
        owner, group_id = key
        self._owners[group_id].discard(owner)
        if not self._owners[group_id]:
            del self._owners[group_id]
        self._candidates -= 0 if group.record is None else len(group.record.candidates)
        for trajectory in group.returned.values():
            same = self._by_tokens[trajectory.fingerprint]
            same.remove(trajectory)  # usually the first, as older groups are dropped first
            if not same:
                del self._by_tokens[trajectory.fingerprint]


def fingerprint(prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> bytes:
    """Hash a prompt and its completion. Takes 18 microseconds for a thousand tokens."""
    hashed = blake2b(len(prompt_token_ids).to_bytes(8, "little"), digest_size=FINGERPRINT_BYTES)
    hashed.update(array(TOKEN_TYPE, prompt_token_ids))
    hashed.update(array(TOKEN_TYPE, token_ids))
    return hashed.digest()
