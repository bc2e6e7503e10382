"""Learn from the groups of other servers as from one's own, and let others learn from these."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from darts_server.observers import GroupObserver
from darts_server.policy.reward_stats import RewardStats
from darts_server.records import GroupRecord
from darts_server.rollout.allocation.allocator import Allocator
from darts_server.rollout.exchange.log import ObservationLog
from darts_server.rollout.exchange.observations import (
    EndedGroup,
    FirstExploration,
    NewRewards,
    Observation,
    OriginalObservation,
    RewardedGroup,
)
from darts_server.rollout.exchange.positions import Positions
from darts_server.rollout.learned.documents import Restores
from darts_server.rollout.learned.statistics import Statistics
from darts_server.types import Outcome

PER_TURN = 8
"""Observations that are learned from in one turn of the event loop: about two milliseconds."""


@dataclass(slots=True)
class Learned:
    """How many observations were learned from, were known before, and are missing between them."""

    learned: int = 0
    repeated: int = 0
    missed: int = 0


class Exchange(GroupObserver):
    """Record what this server learns about lengths, rewards and deadlines, and learn the same from other servers.

    Observations of others are learned from by the same methods as one's own. They are not recorded, so that nothing is
    passed on twice, and nothing else gets them: no metrics, no provenance, no monitor. Step times are not exchanged:
    they are of one machine.
    """

    def __init__(self, statistics: Statistics, allocator: Allocator) -> None:
        self.log = ObservationLog()
        self.positions = Positions(statistics.documents)
        self._statistics = statistics
        self._allocator = allocator
        self._restores = Restores(statistics.documents)
        allocator.deadlines.on_first_exploration = self.exploring_first

    @property
    def is_new(self) -> bool:
        """Whether this server has learned nothing about prompts and policies yet."""
        return not self.positions.all and not self._statistics.dataset.has_learned

    def flush(self) -> None:
        """Write everything that was learned; how far that is was written with each group."""
        self._statistics.flush()

    # --- own observations ---------------------------------------------------

    def group_ended(self, record: GroupRecord) -> None:
        """Record a group from which the statistics and the allocator have learned."""
        if record.outcome is Outcome.COMPLETED:
            self._add(EndedGroup(record))

    def learn(self, new_stats: Mapping[str | None, RewardStats]) -> None:
        """Learn from newly rewarded trajectories, see `Rewards.learn`."""
        if new_stats:
            self._statistics.rewards.learn(new_stats)
            self._add(NewRewards(dict(new_stats)))

    def group_rewarded(self, record: GroupRecord, correct: Mapping[int, bool]) -> None:
        """Learn what deadlines cost from the rewards of a group, by candidate index."""
        self._allocator.deadlines.learn_rewards(record, correct)
        if record.max_lost is not None:
            self._add(RewardedGroup(record, correct))

    def exploring_first(self, policy: str, groups: int) -> None:
        """Record groups that explore for want of rewarded ones that did."""
        self._add(FirstExploration(policy, groups))

    def after(self, life: str, number: int, most: int) -> list[tuple[int, Observation]]:
        """Return own observations after a number of that life; of another life, the oldest that are kept."""
        self.forget_replaced()
        return self.log.after(number if life == self.log.life else 0, most)

    def forget_replaced(self) -> None:
        """Begin another life if learned state was restored: what was learned before is in no statistics here."""
        if self._restores.noticed():
            self.log.restart()
            self.positions.merge_restored()

    def _add(self, observation: Observation) -> None:
        self.forget_replaced()
        self.log.add(observation)
        self.positions.set(self.log.life, self.log.last)
        self.positions.save()

    # --- observations of others ---------------------------------------------

    async def learn_from_others(self, observations: Sequence[OriginalObservation]) -> Learned:
        """Learn from observations that were not learned from yet. Those of one life come in order.

        Yields to the event loop between some of them. It can be cancelled: what was counted was learned from.
        """
        result = Learned()
        for begin in range(0, len(observations), PER_TURN):
            self.forget_replaced()
            for each in observations[begin : begin + PER_TURN]:
                self._learn_once(each, result)
            self._statistics.dataset.flush()  # else a killed process would have the positions without this part
            self.positions.save()
            await asyncio.sleep(0)
        return result

    def _learn_once(self, original: OriginalObservation, result: Learned) -> None:
        position = self.positions.of(original.life)
        if original.life == self.log.life or original.number <= position:
            result.repeated += 1
            return
        result.learned += 1
        result.missed += original.number - position - 1
        self.positions.set(original.life, original.number)  # before it may fail: it would fail again
        self._learn(original.observation)

    def _learn(self, observation: Observation) -> None:
        match observation:
            case EndedGroup(record):
                self._statistics.group_ended(record)
                self._allocator.group_ended(record)
            case NewRewards(stats):
                self._statistics.rewards.learn(stats)
            case RewardedGroup(record, correct):
                self._allocator.deadlines.learn_rewards(record, correct)
            case FirstExploration(policy, groups):
                self._allocator.deadlines.explore_first(policy, groups)
