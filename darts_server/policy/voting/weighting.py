"""Weights of votes: how much each trajectory's answer counts.

Each trajectory votes for the answer that was extracted from it; one without an answer has no vote. A vote weighs:

* `MajorityWeighting`: 1.
* `RankWeighting` (ARRoL, test-time use): votes are sorted by score and their ranks mapped linearly to [0, 1], best 1,
  worst 0; equal scores share their mean rank; a single vote weighs 1.
* `LogOddsWeighting`: log(W q / (1 - q)) of the calibrated probability q to be right. If each vote is right with its own
  probability q, and a wrong one is equally likely any of W wrong answers, the heaviest answer is the most probable one
  (naive Bayes). A vote with q below 1 / (W + 1) counts against its own answer.

Weights and their sums are exact fractions, so neither rounding nor the order of adding can decide a vote.
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
    """The answer of candidate ``index``.

    ``score``: any finite number for `RankWeighting`, the probability q for `LogOddsWeighting`.
    """

    index: int
    answer: str
    score: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.score):
            raise ValueError(f"score must be finite, got {self.score}")


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """The score of one answer: the weight of its votes, and the earliest candidate that gave it."""

    weight: Fraction
    first: float

    def beats(self, other: "AnswerScore") -> bool:
        """Whether it wins against another answer: more weight or, of equal weights, an earlier candidate."""
        return (self.weight, -self.first) > (other.weight, -other.first)


NO_VOTES = AnswerScore(ZERO, math.inf)
"""The score of an answer without a vote."""


class Weighting(Protocol):
    """How votes are weighted."""

    def weights(self, votes: Sequence[Vote]) -> list[Fraction]:
        """Compute the weight of each vote, given all of them."""
        ...

    def worst_cases(
        self, leader: AnswerScore, rival: AnswerScore, cast: int, remaining: Sequence[int]
    ) -> Iterator[tuple[AnswerScore, AnswerScore]]:
        """Yield leader and rival after the remaining votes that hurt the leader most.

        ``cast``: number of votes so far, which gave ``leader`` and ``rival`` their scores. ``remaining``: indices of
        the candidates that have not voted, ascending, at least one. More than one pair where either may be the worst.
        """
        ...


@dataclass(frozen=True, slots=True)
class MajorityWeighting:
    """Count each vote as 1."""

    def weights(self, votes: Sequence[Vote]) -> list[Fraction]:
        return [ONE] * len(votes)

    def worst_cases(
        self, leader: AnswerScore, rival: AnswerScore, cast: int, remaining: Sequence[int]
    ) -> Iterator[tuple[AnswerScore, AnswerScore]]:
        yield leader, AnswerScore(rival.weight + len(remaining), min(rival.first, remaining[0]))


@dataclass(frozen=True, slots=True)
class RankWeighting:
    """Weight votes by the rank of their scores among all votes (ARRoL)."""

    def weights(self, votes: Sequence[Vote]) -> list[Fraction]:
        if len(votes) == 1:
            return [ONE]
        ordered = sorted(v.score for v in votes)
        return [
            Fraction(bisect_left(ordered, v.score) + bisect_right(ordered, v.score) - 1, 2 * (len(votes) - 1))
            for v in votes
        ]

    def worst_cases(
        self, leader: AnswerScore, rival: AnswerScore, cast: int, remaining: Sequence[int]
    ) -> Iterator[tuple[AnswerScore, AnswerScore]]:
        """Give all remaining votes to the rival, with the best scores.

        A rank is the number of other votes beaten. With the best scores, a remaining vote beats every vote it is
        compared with, so together they add the number of pairs that contain one. The ranks of the ``cast`` votes do not
        change; their weights do, by a scale that all answers share and that therefore does not matter.
        """
        r = len(remaining)
        pairs = Fraction(r * cast) + Fraction(r * (r - 1), 2)
        scale = max(cast - 1, 0)
        yield (
            AnswerScore(leader.weight * scale, leader.first),
            AnswerScore(rival.weight * scale + pairs, min(rival.first, remaining[0])),
        )


@dataclass(frozen=True, slots=True)
class LogOddsWeighting:
    """Weight votes by the log-odds of being right.

    ``wrong_answers``: W; 1 for questions with two answers, where the weight is the plain log-odds. ``min_chance``,
    ``max_chance``: q is clipped to these, so that no single vote decides alone.
    """

    wrong_answers: int = 10
    min_chance: float = 0.01
    max_chance: float = 0.99

    def __post_init__(self) -> None:
        if self.wrong_answers < 1:
            raise ValueError(f"wrong_answers must be at least 1, got {self.wrong_answers}")
        if not 0 < self.min_chance <= 0.5 <= self.max_chance < 1:
            raise ValueError(
                "chances must hold 0 < min_chance <= 1/2 <= max_chance < 1, "
                f"got {self.min_chance} and {self.max_chance}"
            )

    def weights(self, votes: Sequence[Vote]) -> list[Fraction]:
        return [self.weight(v.score) for v in votes]

    def weight(self, chance: float) -> Fraction:
        """Compute the weight of a vote that is right with this probability."""
        q = min(max(chance, self.min_chance), self.max_chance)
        return Fraction(math.log(self.wrong_answers * q / (1 - q)))

    def worst_cases(
        self, leader: AnswerScore, rival: AnswerScore, cast: int, remaining: Sequence[int]
    ) -> Iterator[tuple[AnswerScore, AnswerScore]]:
        """Give all remaining votes to the rival, with the highest q; or to the leader, with the lowest.

        Votes with the lowest q count against the answer they are for, so the leader can be hurt by votes for it. If no
        other answer has a vote yet, one of them must still be for a rival.
        """
        r, gain, loss = len(remaining), self.weight(self.max_chance), min(self.weight(self.min_chance), ZERO)
        yield leader, AnswerScore(rival.weight + r * gain, min(rival.first, remaining[0]))
        fewest = 1 if rival is NO_VOTES else 0  # an answer can win only with a vote
        hurt = AnswerScore(leader.weight + (r - fewest) * loss, leader.first)
        if rival is NO_VOTES:
            yield hurt, AnswerScore(gain, remaining[0])
        else:
            yield AnswerScore(hurt.weight, min(leader.first, remaining[0])), rival
