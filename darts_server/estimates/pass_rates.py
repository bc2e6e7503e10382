"""Pass rates of prompts as Beta distributions, from rewards of earlier steps.

Most prompts are seen once an epoch, so a prompt's own rewards are few and old. The prior is the distribution of pass
rates over all prompts (empirical Bayes): the Beta distribution with the mean and variance that recent groups show.
Rewards count less the older they are, because training moves pass rates.

``version`` is the number of weight versions that had rewards. It counts on when a server restarts, whose engine counts
from 0 again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from darts_server.estimates.checks import LARGEST, check_count, check_number

HALF_LIFE = 40
"""Weight versions after which a reward counts half.

In `benchmarks.signal`, pass rates drift slowly or fast, and epochs have 15 to 200 versions. With this half-life, the
allocation is never worse than an even allocation. Shorter half-lives forget rewards before the next epoch, and longer
half-lives trust old rewards too much.
"""
PRIOR_DECAY = 0.9
"""Weight of a group in the prior, relative to a group of the next version: the last ten versions count."""
MIN_STRENGTH = 0.1
MAX_STRENGTH = 16.0
"""Limits of the prior's strength, in rewards. With few groups, the variance of pass rates is mostly noise."""


class Beta(NamedTuple):
    """A Beta distribution of a pass rate. Both parameters are above 0."""

    right: float
    wrong: float


class Answers(NamedTuple):
    """Rewarded answers of one group.

    ``right``, ``wrong``: numbers of right and wrong answers. Their sum is the effective sample size.
    ``both_right``: estimated probability that two answers to the prompt are right, or None with a single answer.
    """

    right: float
    wrong: float
    both_right: float | None


def count_answers(answers: Sequence[tuple[bool, float]]) -> Answers:
    """Count answers, at least one, each given by its correctness and its weight above 0."""
    total = math.fsum(weight for _, weight in answers)
    squares = math.fsum(weight * weight for _, weight in answers)
    # Scaled weights have a sum that equals the sum of their squares: Kish's effective sample size (Survey Sampling,
    # 1965, section 11.7).
    scale = total / squares
    size = scale * total
    right = scale * math.fsum(weight for correct, weight in answers if correct)
    right_squares = scale * scale * math.fsum(weight * weight for correct, weight in answers if correct)
    both_right = None
    if len(answers) > 1:
        # The weight of pairs of different right answers, of the weight of all pairs of different answers, size² - size.
        # Rounding must not leave the range of a probability.
        share = (right * right - right_squares) / (size * size - size)
        both_right = min(max(share, 0.0), 1.0)
    return Answers(right, max(size - right, 0.0), both_right)


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Aged numbers of right and wrong answers of a prompt. ``PassCounts(*json)`` restores them.

    ``version``: version of the last reward.
    """

    right: float = 0.0
    wrong: float = 0.0
    version: int = 0

    def __post_init__(self) -> None:
        check_number("right", self.right)
        check_number("wrong", self.wrong)
        check_count("version", self.version)

    def with_answers(self, answers: Answers, version: int) -> "PassCounts":
        """Return the counts after another group, whose rewards are of this version."""
        share = self._remaining_share(version)
        right = min(self.right * share + answers.right, LARGEST)
        wrong = min(self.wrong * share + answers.wrong, LARGEST)
        return PassCounts(right, wrong, version)

    def posterior(self, prior: Beta, version: int) -> Beta:
        """Return the distribution of the pass rate at a later version."""
        share = self._remaining_share(version)
        return Beta(prior.right + self.right * share, prior.wrong + self.wrong * share)

    def _remaining_share(self, version: int) -> float:
        age = max(version - self.version, 0)
        return float(0.5 ** (age / HALF_LIFE))


@dataclass(frozen=True, slots=True)
class RecentPassRates:
    """Moments of pass rates over recent groups of all prompts. ``RecentPassRates(*json)`` restores them.

    ``groups``, ``rates``, ``squares``: sums over groups of 1, of pass rates, and of `Answers.both_right`.
    """

    groups: float = 0.0
    rates: float = 0.0
    squares: float = 0.0
    version: int = 0

    def __post_init__(self) -> None:
        check_number("groups", self.groups)
        check_number("rates", self.rates, 0.0, self.groups)
        check_number("squares", self.squares, 0.0, self.groups)
        check_count("version", self.version)

    def with_group(self, answers: Answers, version: int) -> "RecentPassRates":
        decay = float(PRIOR_DECAY ** max(version - self.version, 0))
        groups = self.groups * decay
        rates = self.rates * decay
        squares = self.squares * decay
        # The chance that two answers are right is on average the square of the rate. A single answer does not show it.
        if answers.both_right is not None:
            groups = min(groups + 1, LARGEST)
            rates += answers.right / (answers.right + answers.wrong)
            squares += answers.both_right
        return RecentPassRates(groups, min(rates, groups), min(squares, groups), version)

    @property
    def prior(self) -> Beta:
        """Distribution of the pass rate of a prompt without rewards."""
        # One group is added that favours neither side: Beta(1/2, 1/2), with mean 1/2 and mean square 3/8.
        groups = self.groups + 1
        mean = (self.rates + 1 / 2) / groups
        variance = (self.squares + 3 / 8) / groups - mean * mean
        # The sum of both parameters of the Beta distribution with this mean and variance.
        strength = MAX_STRENGTH
        if variance > 0:
            strength = min(max(mean * (1 - mean) / variance - 1, MIN_STRENGTH), MAX_STRENGTH)
        return Beta(strength * mean, strength * (1 - mean))
