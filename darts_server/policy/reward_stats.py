"""Which of two kinds of long tails a prompt has, from the lengths of its right and of its wrong trajectories.

DARTS (arXiv 2605.30859) tells them apart by what long trajectories are good for:

* Pattern I, ineffective verbosity: E[l | right] <= E[l | wrong]. Running on earns nothing.
* Pattern II, necessary depth: E[l | right] > E[l | wrong]. Some right answers need their length.

The paper compares the two means. Here the comparison comes with its error (`Pattern.UNCLEAR`), for a handful of
trajectories would tell one pattern or the other by chance.

Only trajectories with a reward can be told right or wrong, and only those that were returned get one. Under a shaped
policy these are not a plain sample of what the model generates: of the long ones, right or wrong, most were stopped.
So both means come out too low, as a rule the longer one more, which draws their difference towards zero; the pass rate
comes out too high in Pattern I and too low in Pattern II; and a rule that cuts turns right answers beyond the deadline
into wrong ones of just that length. Under ``off`` and shadow policies the sample is plain. Neither policies nor weight
versions are kept apart.

Over a whole data set the difference also has a part between prompts: where harder prompts have longer trajectories,
right ones come out shorter even if within each prompt they do not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MIN_STANDARD_ERRORS = 2.0
"""Standard errors that a difference must reach: by chance about one in twenty does."""
MIN_TRAJECTORIES = 10
"""Trajectories on each side below which the error is itself too uncertain: with ten, six in a hundred do."""
LARGEST = 2**52
"""Count or mean that is taken for one: twice as large, it is still exact."""
LARGEST_SQUARES = 1e300
"""The same for M2: twice as large, it is still finite."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and M2 (the sum of squared deviations from the mean) of lengths in tokens.

    Two of them merge into those of both samples (Chan, Golub and LeVeque 1979), in any order but for rounding.

    Raises:
        ValueError: no sample has these.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def __post_init__(self) -> None:
        whole = type(self.count) is int and self.count >= 0
        numbers = all(type(x) in (int, float) and 0 <= x < math.inf for x in (self.mean, self.m2))
        if not (whole and numbers and (self.count > 0 or self.mean == self.m2 == 0)):
            raise ValueError(f"moments must be a count and two finite numbers of at least 0, got {self}")

    def __add__(self, other: "Moments") -> "Moments":
        if not self.count or not other.count:
            return self if self.count else other
        count, apart = self.count + other.count, other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * other.count / count,
            self.m2 + other.m2 + apart * apart * self.count * other.count / count,
        )

    @property
    def square_error(self) -> float | None:
        """Squared standard error of the mean; ``None`` for fewer than two lengths."""
        return self.m2 / (self.count - 1) / self.count if self.count > 1 else None

    @property
    def error(self) -> float | None:
        """Standard error of the mean in tokens; ``None`` for fewer than two lengths."""
        return None if self.square_error is None else math.sqrt(self.square_error)


def single_length(tokens: int) -> Moments:
    """The moments of a single length."""
    return Moments(1, float(tokens))


class TailPattern(StrEnum):
    """What long trajectories of a prompt are good for, in the paper's words."""

    VERBOSITY = "I"
    DEPTH = "II"
    UNCLEAR = "unclear"
    """Too few trajectories, or the two means are too close to tell."""


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """E[l | right] - E[l | wrong] in tokens, its standard error, and what these say.

    All are ``None`` without lengths on both sides. ``error`` also is while one side has a single one.
    """

    tokens: float | None = None
    error: float | None = None
    pattern: TailPattern | None = None


def compare_means(right: Moments, wrong: Moments) -> MeanDifference:
    """Right against wrong, with Welch's standard error: the two may differ in their spread.

    A pattern is told from `FEWEST` lengths on each side, if the means are `ERRORS` standard errors apart. Equal means
    without any spread say nothing.
    """
    if not right.count or not wrong.count:
        return MeanDifference()
    tokens = right.mean - wrong.mean
    if right.square_error is None or wrong.square_error is None:
        return MeanDifference(tokens, None, TailPattern.UNCLEAR)
    error = math.sqrt(right.square_error + wrong.square_error)
    if min(right.count, wrong.count) < MIN_TRAJECTORIES or tokens == 0 or abs(tokens) < MIN_STANDARD_ERRORS * error:
        return MeanDifference(tokens, error, TailPattern.UNCLEAR)
    return MeanDifference(tokens, error, TailPattern.DEPTH if tokens > 0 else TailPattern.VERBOSITY)


@dataclass(frozen=True, slots=True)
class RewardStats:
    """What rewards said of a prompt's trajectories, or of all prompts'.

    ``groups``: those of which every returned trajectory has a reward. ``zero_variance``: those of them whose rewards
    are all equal, so that they teach nothing.
    """

    right: Moments = Moments()
    wrong: Moments = Moments()
    groups: int = 0
    zero_variance: int = 0

    def __post_init__(self) -> None:
        whole = type(self.groups) is int and type(self.zero_variance) is int
        if not (whole and 0 <= self.zero_variance <= self.groups):
            raise ValueError(f"zero-variance groups must be some of the rewarded ones, got {self}")

    def __add__(self, other: "RewardStats") -> "RewardStats":
        return RewardStats(
            self.right + other.right,
            self.wrong + other.wrong,
            self.groups + other.groups,
            self.zero_variance + other.zero_variance,
        )

    @property
    def rewarded(self) -> int:
        """Trajectories with a reward."""
        return self.right.count + self.wrong.count

    @property
    def pass_rate(self) -> float | None:
        """Share of right ones among them; ``None`` without any."""
        return self.right.count / self.rewarded if self.rewarded else None

    @property
    def difference(self) -> MeanDifference:
        return compare_means(self.right, self.wrong)

    @property
    def state(self) -> list[list[float]]:
        """What `restored` takes."""
        right, wrong = ([m.count, m.mean, m.m2] for m in (self.right, self.wrong))
        return [right, wrong, [self.groups, self.zero_variance]]


def restore_stats(state: Sequence[Sequence[Any]]) -> RewardStats:
    """The statistics of that state.

    Raises:
        ValueError, TypeError: it is no such state.
    """
    (right, mean_right, m2_right), (wrong, mean_wrong, m2_wrong), (groups, zero_variance) = state
    stats = RewardStats(
        Moments(right, mean_right, m2_right), Moments(wrong, mean_wrong, m2_wrong), groups, zero_variance
    )
    counts = (stats.groups, stats.right.count, stats.wrong.count, stats.right.mean, stats.wrong.mean)
    if max(counts) > LARGEST or max(stats.right.m2, stats.wrong.m2) > LARGEST_SQUARES:
        raise ValueError(f"statistics of rewards must have counts and lengths that can be, got {stats}")
    return stats
