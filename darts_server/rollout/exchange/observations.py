"""What a server learns from: one observation for each ended group, and for rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from darts_server.policy.reward_stats import RewardStats, restore_stats
from darts_server.records import GroupRecord


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """A completed group: its lengths, and how many tokens it needed."""

    record: GroupRecord

    @property
    def size(self) -> int:
        """How much memory it takes, in candidates or prompts."""
        return len(self.record.candidates)


@dataclass(frozen=True, slots=True)
class RewardedGroup:
    """A group whose deadline may have taken something away, with the rewards of all its trajectories.

    ``correct``: by candidate index.
    """

    record: GroupRecord
    correct: Mapping[int, bool]

    @property
    def size(self) -> int:
        return len(self.record.candidates)


@dataclass(frozen=True, slots=True)
class NewRewards:
    """Statistics of newly rewarded trajectories, by prompt key."""

    stats: Mapping[str | None, RewardStats]

    @property
    def size(self) -> int:
        return len(self.stats)

    @classmethod
    def restore(cls, states: Mapping[str | None, Sequence[Sequence[float]]]) -> "NewRewards":
        """Restore them from the ``state`` of each prompt's statistics.

        Raises:
            ValueError: one is no such state.
        """
        try:
            return cls({key: restore_stats(state) for key, state in states.items()})
        except TypeError as error:
            raise ValueError(f"statistics of rewards must be three lists of numbers: {error}") from error


@dataclass(frozen=True, slots=True)
class FirstExploration:
    """So many groups of a policy explore for want of rewarded ones that did; see `DeadlineLosses.first_groups`."""

    policy: str
    groups: int

    @property
    def size(self) -> int:
        return 1


Observation = EndedGroup | RewardedGroup | NewRewards | FirstExploration


@dataclass(frozen=True, slots=True)
class OriginalObservation:
    """An observation, and where it was made: by the server of that ``life``, as its number ``number``, from 1 on."""

    life: str
    number: int
    observation: Observation
