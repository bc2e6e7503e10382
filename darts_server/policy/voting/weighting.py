"""Votes of several trajectories for one answer, and when the rest of them need not be waited for.

Each trajectory votes for the answer that was found in it; one without an answer has no vote. What a vote weighs:

* `Majority`: 1.
* `Ranked` (ARRoL, test-time use): the votes are sorted by score and their ranks mapped linearly to [0, 1], best 1,
  worst 0; equal scores share their mean rank; a single vote weighs 1.
* `LogOdds`: log(W q / (1 - q)) of the calibrated chance q to be right. If each vote is right with its own chance q, and
  a wrong one falls on any of W wrong answers alike, the heaviest answer is the most probable one (naive Bayes). A vote
  of which less than 1 in W + 1 is expected weighs against its own answer.

The heaviest answer wins; of equally heavy ones that of the earliest candidate. Sums are exact fractions: no order of
adding, and no rounding, decides a vote.

A vote is decided when the leader stays ahead whatever the remaining trajectories say, which is tried with what would
hurt it most. That is exact: a decided vote cannot turn, and for an undecided one there is a way in which it would.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

ONE = Fraction(1)
ZERO = Fraction(0)


@dataclass(frozen=True, slots=True)
class Vote:
    """The answer of candidate ``index``. ``score``: any finite number for `Ranked`, the chance q for `LogOdds`."""

    index: int
    answer: str
    score: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.score):
            raise ValueError(f"score must be finite, got {self.score}")


@dataclass(frozen=True, slots=True)
class Standing:
    """How an answer stands: what its votes weigh, and the earliest candidate that gave it."""

    weight: Fraction
    first: float

    def beats(self, other: "Standing") -> bool:
        return (self.weight, -self.first) > (other.weight, -other.first)


NOBODY = Standing(ZERO, math.inf)
"""An answer that nobody has given yet."""


class Weighting(Protocol):
    """What votes weigh."""

    def weights(self, votes: Sequence[Vote]) -> list[Fraction]:
        """The weight of each vote, given all of them."""
        ...

    def threats(
        self, leader: Standing, rival: Standing, cast: int, remaining: Sequence[int]
    ) -> Iterator[tuple[Standing, Standing]]:
        """Leader and rival as they would stand after those votes of all ``remaining`` that hurt the leader most.

        ``cast``: how many votes there are, by which ``leader`` and ``rival`` stand as they do. ``remaining``: candidate
        indices, ascending, at least one. More than one way is told where it depends which is the worst.
        """
        ...


@dataclass(frozen=True, slots=True)
class MajorityWeighting:
    """Every vote weighs 1."""

    def weights(self, votes: Sequence[Vote]) -> list[Fraction]:
        return [ONE] * len(votes)

    def threats(
        self, leader: Standing, rival: Standing, cast: int, remaining: Sequence[int]
    ) -> Iterator[tuple[Standing, Standing]]:
        yield leader, Standing(rival.weight + len(remaining), min(rival.first, remaining[0]))


@dataclass(frozen=True, slots=True)
class RankWeighting:
    """Votes weigh by the rank of their scores among all votes (ARRoL)."""

    def weights(self, votes: Sequence[Vote]) -> list[Fraction]:
        if len(votes) == 1:
            return [ONE]
        ordered = sorted(v.score for v in votes)
        return [
            Fraction(bisect_left(ordered, v.score) + bisect_right(ordered, v.score) - 1, 2 * (len(votes) - 1))
            for v in votes
        ]

    def threats(
        self, leader: Standing, rival: Standing, cast: int, remaining: Sequence[int]
    ) -> Iterator[tuple[Standing, Standing]]:
        """All for the rival, with the best scores: so the rival wins each pair that a remaining vote is part of.

        A rank counts the pairs won. Up to the scale, which all answers share, weights of the ``cast`` votes stay.
        """
        r = len(remaining)
        pairs = Fraction(r * cast) + Fraction(r * (r - 1), 2)
        scale = max(cast - 1, 0)
        yield (
            Standing(leader.weight * scale, leader.first),
            Standing(rival.weight * scale + pairs, min(rival.first, remaining[0])),
        )


@dataclass(frozen=True, slots=True)
class LogOddsWeighting:
    """Votes weigh by the log-odds of being right.

    ``wrong_answers``: W; 1 for questions of two answers, and then the weight is the plain log-odds. ``least``,
    ``most``: q is held between these, so that no single vote is beyond appeal.
    """

    wrong_answers: int = 10
    least: float = 0.01
    most: float = 0.99

    def __post_init__(self) -> None:
        if self.wrong_answers < 1:
            raise ValueError(f"wrong_answers must be at least 1, got {self.wrong_answers}")
        if not 0 < self.least <= 0.5 <= self.most < 1:
            raise ValueError(f"chances must hold 0 < least <= 1/2 <= most < 1, got {self.least} and {self.most}")

    def weights(self, votes: Sequence[Vote]) -> list[Fraction]:
        return [self.weight(v.score) for v in votes]

    def weight(self, chance: float) -> Fraction:
        q = min(max(chance, self.least), self.most)
        return Fraction(math.log(self.wrong_answers * q / (1 - q)))

    def threats(
        self, leader: Standing, rival: Standing, cast: int, remaining: Sequence[int]
    ) -> Iterator[tuple[Standing, Standing]]:
        """All for the rival, as sure as can be; or as many as can be against the leader, as doubtful as can be."""
        r, gain, loss = len(remaining), self.weight(self.most), min(self.weight(self.least), ZERO)
        yield leader, Standing(rival.weight + r * gain, min(rival.first, remaining[0]))
        fewest = 1 if rival is NOBODY else 0  # an answer wins only if somebody gives it
        hurt = Standing(leader.weight + (r - fewest) * loss, leader.first)
        if rival is NOBODY:
            yield hurt, Standing(gain, remaining[0])
        else:
            yield Standing(hurt.weight, min(leader.first, remaining[0])), rival
