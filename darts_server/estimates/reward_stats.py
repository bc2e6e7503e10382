"""Reward statistics of a prompt: its pass rate, and whether its long answers are worth their tokens.

DARTS (arXiv 2605.30859) compares the mean lengths of right and wrong trajectories. If right trajectories are not longer
(pattern I, ineffective verbosity), long answers earn nothing. If they are longer (pattern II, necessary depth), some
right answers need their length.

A shaped policy does not return a plain sample, so each trajectory counts with 1 / (its probability to be returned).
Without weights the pass rate is off by up to .1, and the difference of lengths, usually too close to zero, by 40 %.

Over a whole data set, right trajectories look shorter if harder prompts have longer trajectories.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from darts_server.estimates.checks import LARGEST

MIN_TRAJECTORIES = 10
"""With fewer right or wrong trajectories, the difference of their mean lengths is mostly chance."""


@dataclass(frozen=True, slots=True)
class MeanLength:
    """Count, weighted mean length in tokens and sum of weights of some trajectories.

    ``a + b`` is the mean length of both samples together.

    Raises:
        ValueError: no sample has this mean length.
    """

    count: int = 0
    mean: float = 0.0
    weight: float = 0.0

    def __post_init__(self) -> None:
        is_count = type(self.count) is int and self.count >= 0
        are_numbers = all(type(x) in (int, float) and 0 <= x < math.inf for x in (self.mean, self.weight))
        is_consistent = self.weight > 0
        if self.count == 0:
            is_consistent = self.mean == self.weight == 0
        if not (is_count and are_numbers and is_consistent):
            raise ValueError(f"a mean length must be a count and finite numbers of at least 0, got {self}")

    def __add__(self, other: "MeanLength") -> "MeanLength":
        if not self.count:
            return other
        if not other.count:
            return self
        weight = self.weight + other.weight
        mean = self.mean + (other.mean - self.mean) * other.weight / weight
        return MeanLength(self.count + other.count, mean, weight)

    def __sub__(self, other: "MeanLength") -> "MeanLength":
        weight = self.weight - other.weight
        # A restored state may not have the other sample.
        if self.count <= other.count or weight <= 0:
            return MeanLength()
        mean = self.mean + (self.mean - other.mean) * other.weight / weight
        return MeanLength(self.count - other.count, max(mean, 0.0), weight)


def single_length(tokens: int, weight: float = 1.0) -> MeanLength:
    return MeanLength(1, float(tokens), weight)


@dataclass(frozen=True, slots=True)
class RewardStats:
    """Reward statistics of a prompt, or of all prompts.

    ``right``, ``wrong``: mean lengths of right and wrong trajectories. ``groups``: number of groups whose returned
    trajectories all have rewards. ``zero_variance``: number of these groups whose rewards are equal, so that GRPO
    learns nothing from them.
    """

    right: MeanLength = MeanLength()
    wrong: MeanLength = MeanLength()
    groups: int = 0
    zero_variance: int = 0

    def __post_init__(self) -> None:
        are_whole = type(self.groups) is int and type(self.zero_variance) is int
        if not are_whole or not 0 <= self.zero_variance <= self.groups:
            raise ValueError(f"zero_variance must be a whole number from 0 to groups, got {self}")

    def __add__(self, other: "RewardStats") -> "RewardStats":
        return RewardStats(
            self.right + other.right,
            self.wrong + other.wrong,
            self.groups + other.groups,
            self.zero_variance + other.zero_variance,
        )

    def __sub__(self, other: "RewardStats") -> "RewardStats":
        groups = max(self.groups - other.groups, 0)
        zero_variance = max(self.zero_variance - other.zero_variance, 0)
        return RewardStats(self.right - other.right, self.wrong - other.wrong, groups, min(zero_variance, groups))

    @property
    def rewarded(self) -> int:
        return self.right.count + self.wrong.count

    @property
    def pass_rate(self) -> float | None:
        """Weighted share of right trajectories among rewarded trajectories, or None without rewards."""
        if not self.rewarded:
            return None
        return self.right.weight / (self.right.weight + self.wrong.weight)

    @property
    def difference(self) -> float | None:
        """Mean length of right trajectories minus mean length of wrong trajectories, in tokens.

        Above 0, long answers are worth their tokens. None below `MIN_TRAJECTORIES` right or wrong trajectories.
        """
        if min(self.right.count, self.wrong.count) < MIN_TRAJECTORIES:
            return None
        return self.right.mean - self.wrong.mean

    @property
    def state(self) -> list[list[float]]:
        return [list(astuple(self.right)), list(astuple(self.wrong)), [self.groups, self.zero_variance]]


def restore_stats(state: Sequence[Sequence[Any]]) -> RewardStats:
    """Restore statistics from their ``state``.

    Raises:
        ValueError, TypeError: the state has another form, or a number is out of range.
    """
    right, wrong, (groups, zero_variance) = state
    stats = RewardStats(_restore_mean_length(right), _restore_mean_length(wrong), groups, zero_variance)
    if max(stats.groups, *astuple(stats.right), *astuple(stats.wrong)) > LARGEST:
        raise ValueError(f"statistics of rewards have counts or lengths out of range: {stats}")
    return stats


def _restore_mean_length(state: Sequence[Any]) -> MeanLength:
    # Older versions saved squared deviations and squares of weights too.
    if len(state) == 5:
        count, mean, _, weight, _ = state
        return MeanLength(count, mean, weight)
    return MeanLength(*state)
