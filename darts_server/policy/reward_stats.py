"""Reward statistics of a prompt: pass rate, and whether its right trajectories are longer than its wrong ones.

DARTS (arXiv 2605.30859) distinguishes two patterns of long-tailed prompts by what long trajectories are good for:

* Pattern I, ineffective verbosity: E[l | right] <= E[l | wrong]. Running on earns nothing.
* Pattern II, necessary depth: E[l | right] > E[l | wrong]. Some right answers need their length.

The paper compares the two means. Here the comparison comes with its standard error, since a handful of trajectories
would show either pattern by chance (`TailPattern.UNCLEAR`).

Only trajectories that were returned have a reward, and under a shaped policy they are not a plain sample of what the
model generates. So each counts with its weight, 1 / (its probability to be returned). Without weights the pass rate is
off by up to .1, and the difference of lengths by 40 % (audited on random worlds with the 7 shortest of 12 and a sampled
one). Where a policy gives no weights, since some candidates can never be returned, all count alike: both means come out
too low, as a rule the longer one more, which draws their difference towards zero. A rule that cuts turns right answers
beyond the deadline into wrong ones of exactly that length. Policies and weight versions are not kept apart.

Over a whole data set the difference also has a part between prompts: if harder prompts have longer trajectories, right
ones come out shorter even if within each prompt they do not.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any

from darts_server.policy.checks import LARGEST

MIN_STANDARD_ERRORS = 2.0
"""Standard errors that a difference must reach: without any true difference about one in twenty does."""
MIN_TRAJECTORIES = 10
"""Trajectories on each side below which the standard error is itself too uncertain. With ten, six in a hundred prompts
without a true difference show one."""
LARGEST_SQUARES = 1e300
"""Largest M2 that is accepted: the sum of two is still finite."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, weighted mean and weighted M2 (the sum of squared deviations from the mean) of lengths in tokens.

    ``a + b`` are those of both samples together (Chan, Golub and LeVeque 1979). The order of adding matters for
    rounding only, so statistics can be merged as rewards arrive, without keeping the lengths.

    ``weight``, ``squares``: sums of the weights and of their squares.

    Raises:
        ValueError: no sample has these moments.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    weight: float = 0.0
    squares: float = 0.0

    def __post_init__(self) -> None:
        whole = type(self.count) is int and self.count >= 0
        sums = (self.mean, self.m2, self.weight, self.squares)
        numbers = all(type(x) in (int, float) and 0 <= x < math.inf for x in sums)
        if not (whole and numbers and (self.weight > 0 if self.count > 0 else not any(sums))):
            raise ValueError(f"moments must be a count and finite numbers of at least 0, got {self}")

    def __add__(self, other: "Moments") -> "Moments":
        if not self.count or not other.count:
            return self if self.count else other
        weight, apart = self.weight + other.weight, other.mean - self.mean
        return Moments(
            self.count + other.count,
            self.mean + apart * other.weight / weight,
            self.m2 + other.m2 + apart * apart * self.weight * other.weight / weight,
            weight,
            self.squares + other.squares,
        )

    @property
    def square_error(self) -> float | None:
        """Squared standard error of the mean; ``None`` for fewer than two lengths.

        With unequal weights it takes the spread as independent of the weight.
        """
        if self.count < 2:
            return None
        lost = self.squares / self.weight  # 1 with equal weights of 1
        return None if self.weight <= lost else self.m2 / (self.weight - lost) * self.squares / self.weight**2

    @property
    def error(self) -> float | None:
        """Standard error of the mean in tokens; ``None`` for fewer than two lengths."""
        return None if self.square_error is None else math.sqrt(self.square_error)


def single_length(tokens: int, weight: float = 1.0) -> Moments:
    """Return the moments of one trajectory of so many tokens."""
    return Moments(1, float(tokens), 0.0, weight, weight**2)


class TailPattern(StrEnum):
    """What long trajectories of a prompt are good for: the paper's two patterns."""

    VERBOSITY = "I"
    DEPTH = "II"
    UNCLEAR = "unclear"
    """Too few trajectories, or the two means are too close."""


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """E[l | right] - E[l | wrong] in tokens, its standard error, and the pattern that follows.

    All are ``None`` without lengths on both sides; ``error`` is also ``None`` while one side has a single length.
    """

    tokens: float | None = None
    error: float | None = None
    pattern: TailPattern | None = None


@dataclass(frozen=True, slots=True)
class RewardStats:
    """Reward statistics of one prompt, or of all prompts.

    ``right``, ``wrong``: lengths of right and of wrong trajectories. ``groups``: groups of which every returned
    trajectory has a reward. ``zero_variance``: groups among them whose rewards are all equal, so that GRPO learns
    nothing from them.
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
        """Weighted share of right ones among the rewarded trajectories; ``None`` without any."""
        right, wrong = self.right.weight, self.wrong.weight
        return right / (right + wrong) if self.rewarded else None

    @property
    def difference(self) -> MeanDifference:
        """Compare the mean lengths of right and wrong trajectories.

        The standard error is Welch's, since the two may differ in their spread. A pattern needs `MIN_TRAJECTORIES`
        lengths on each side, and means that are `MIN_STANDARD_ERRORS` apart. Equal means without spread are unclear.
        """
        right, wrong = self.right, self.wrong
        if not right.count or not wrong.count:
            return MeanDifference()
        tokens, error = right.mean - wrong.mean, None
        if right.square_error is not None and wrong.square_error is not None:
            error = math.sqrt(right.square_error + wrong.square_error)
        are_few = min(right.count, wrong.count) < MIN_TRAJECTORIES
        if error is None or are_few or tokens == 0 or abs(tokens) < MIN_STANDARD_ERRORS * error:
            return MeanDifference(tokens, error, TailPattern.UNCLEAR)
        return MeanDifference(tokens, error, TailPattern.DEPTH if tokens > 0 else TailPattern.VERBOSITY)

    @property
    def state(self) -> list[list[float]]:
        """Argument of `restore_stats` that restores these."""
        right, wrong = (list(astuple(moments)) for moments in (self.right, self.wrong))
        return [right, wrong, [self.groups, self.zero_variance]]


def restore_stats(state: Sequence[Sequence[Any]]) -> RewardStats:
    """Restore statistics from their ``state``.

    Raises:
        ValueError, TypeError: it is no such state, or its numbers are out of range.
    """
    right, wrong, (groups, zero_variance) = state
    stats = RewardStats(Moments(*right), Moments(*wrong), groups, zero_variance)
    sides = (stats.right, stats.wrong)
    numbers = [stats.groups, *(x for m in sides for x in (m.count, m.mean, m.weight, m.squares))]
    if max(numbers) > LARGEST or max(m.m2 for m in sides) > LARGEST_SQUARES:
        raise ValueError(f"statistics of rewards have counts or lengths out of range: {stats}")
    return stats
