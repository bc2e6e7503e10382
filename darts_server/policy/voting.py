r"""Votes: weigh and count the answers of trajectories, and decide early.

**Weights**: a trajectory votes for its answer, and has no vote without an answer. A vote weighs:

* `MajorityWeighting`: 1.
* `RankWeighting` (ARRoL, test-time use): the rank of its score, mapped linearly to [0, 1] from worst to best. Equal
  scores share their mean rank. A single vote weighs 1.
* `LogOddsWeighting`: log(W q / (1 - q)) of the calibrated probability q to be right, with W equally likely wrong
  answers. The heaviest answer is the most probable (naive Bayes). A vote with q below 1 / (W + 1) counts against its
  own answer.

Weights and their sums are exact fractions, so neither rounding nor the order of adding can decide a vote.

**Decision**: the heaviest answer wins, and of equally heavy answers the earliest candidate's. A vote is decided when
the leader wins whatever the remaining candidates answer. The test is exact: it tries the answers that hurt the leader
most.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from darts_server.types import VoteWeights

# --- weights ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Vote:
    """The answer of candidate ``index``.

    ``score``: any finite number for `RankWeighting`, the probability q for `LogOddsWeighting`.
    """

    index: int
    answer: str
    score: float = 0.0


class AnswerScore(NamedTuple):
    """The score of an answer. The greatest score wins.

    ``weight``: sum of its votes. ``priority``: minus the index of the earliest candidate that gave it.
    """

    weight: Fraction
    priority: float


NO_VOTES = AnswerScore(Fraction(0), -math.inf)
WorstCases = Iterator[tuple[AnswerScore, AnswerScore]]
"""Scores of leader and rival after the remaining votes that hurt the leader most. Each pair may be the worst.

They are computed from the scores of both so far, the number of votes ``cast``, and the indices of the ``remaining``
candidates: at least one, ascending.
"""


class MajorityWeighting:
    """Counts each vote as 1."""

    def weights(self, votes: Sequence[Vote]) -> list[Fraction]:
        return [Fraction(1)] * len(votes)

    def worst_cases(
        self,
        leader: AnswerScore,
        rival: AnswerScore,
        cast: int,
        remaining: Sequence[int],
    ) -> WorstCases:
        # All remaining votes are for the rival.
        yield leader, _with_votes(rival, Fraction(len(remaining)), remaining)


class RankWeighting:
    """Weighs votes by the rank of their scores (ARRoL)."""

    def weights(self, votes: Sequence[Vote]) -> list[Fraction]:
        if len(votes) == 1:
            return [Fraction(1)]
        ordered = sorted(vote.score for vote in votes)
        weights = []
        for vote in votes:
            # Equal scores share the mean of their first and last rank.
            twice_rank = bisect_left(ordered, vote.score) + bisect_right(ordered, vote.score) - 1
            weights.append(Fraction(twice_rank, 2 * (len(votes) - 1)))
        return weights

    def worst_cases(
        self,
        leader: AnswerScore,
        rival: AnswerScore,
        cast: int,
        remaining: Sequence[int],
    ) -> WorstCases:
        # All remaining votes are for the rival, with the best scores, so the ranks of the votes that were cast stay. A
        # rank is the number of votes with a lower score. A weight is a rank over the largest rank, and that divisor may
        # be left out, because it is the same for all. So the scores return from weights to sums of ranks.
        num_remaining = len(remaining)
        largest_rank = max(cast - 1, 0)
        remaining_ranks = num_remaining * cast + Fraction(num_remaining * (num_remaining - 1), 2)
        leader_ranks = AnswerScore(leader.weight * largest_rank, leader.priority)
        rival_ranks = AnswerScore(rival.weight * largest_rank, rival.priority)
        yield leader_ranks, _with_votes(rival_ranks, remaining_ranks, remaining)


@dataclass(frozen=True, slots=True)
class LogOddsWeighting:
    """Weighs votes by the log-odds of being right.

    ``wrong_answers``: W; with 1 the weight is the plain log-odds. ``min_chance``, ``max_chance``: limits of q, so that
    no single vote decides alone.
    """

    wrong_answers: int = 10
    min_chance: float = 0.01
    max_chance: float = 0.99

    def weights(self, votes: Sequence[Vote]) -> list[Fraction]:
        return [self.weight(vote.score) for vote in votes]

    def weight(self, chance: float) -> Fraction:
        # Each of W wrong answers has the probability (1 - q) / W.
        q = min(max(chance, self.min_chance), self.max_chance)
        return Fraction(math.log(self.wrong_answers * q / (1 - q)))

    def worst_cases(
        self,
        leader: AnswerScore,
        rival: AnswerScore,
        cast: int,
        remaining: Sequence[int],
    ) -> WorstCases:
        # All remaining votes are for the rival, with the highest q.
        num_remaining = len(remaining)
        heaviest = self.weight(self.max_chance)
        yield leader, _with_votes(rival, num_remaining * heaviest, remaining)

        # Or all are for the leader, with the lowest q, and count against it.
        loss = min(self.weight(self.min_chance), Fraction(0))
        if rival is not NO_VOTES:
            yield _with_votes(leader, num_remaining * loss, remaining), rival
            return
        # An answer wins only with a vote, so the first remaining vote is for the rival.
        leader_after = AnswerScore(leader.weight + (num_remaining - 1) * loss, leader.priority)
        yield leader_after, _with_votes(NO_VOTES, heaviest, remaining)


def _with_votes(score: AnswerScore, weight: Fraction, remaining: Sequence[int]) -> AnswerScore:
    # The first of the remaining candidates gives this answer too, and has the best priority among them.
    return AnswerScore(score.weight + weight, max(score.priority, -remaining[0]))


Weighting = MajorityWeighting | RankWeighting | LogOddsWeighting


def create_weighting(weights: VoteWeights, pattern: str | Sequence[str]) -> Weighting:
    """Create a weighting by its name. ``pattern``: see `create_extractor`."""
    if weights == "majority":
        return MajorityWeighting()
    if weights == "rank":
        return RankWeighting()
    if isinstance(pattern, str):
        return LogOddsWeighting()
    # A list has all possible answers.
    num_wrong_answers = max(1, len(pattern) - 1)
    return LogOddsWeighting(num_wrong_answers)


# --- counting ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tally:
    """Result of a vote.

    ``winner``: None without votes. ``weights``: weight of each answer, heaviest first. ``votes``: number of votes of
    each answer. ``vote_weights``: weight of each vote by candidate index.
    """

    winner: str | None
    weights: Mapping[str, float]
    votes: Mapping[str, int]
    vote_weights: Mapping[int, float]


def count_votes(votes: Sequence[Vote], weighting: Weighting) -> Tally:
    """Count the votes, in any order. Each candidate has at most one vote."""
    scores = _score_answers(votes, weighting)
    return Tally(
        winner=next(iter(scores), None),
        weights={answer: float(score.weight) for answer, score in scores.items()},
        votes={answer: sum(vote.answer == answer for vote in votes) for answer in scores},
        vote_weights={vote.index: float(weight) for vote, weight in zip(votes, weighting.weights(votes), strict=True)},
    )


def is_decided(votes: Sequence[Vote], remaining: Sequence[int], weighting: Weighting) -> bool:
    """Return whether the leader wins whatever the ``remaining`` candidates, given by index, answer."""
    if not remaining:
        return True
    if not votes:
        return False
    leader, *rivals = _score_answers(votes, weighting).values()
    # An answer that has no vote yet may win too.
    for rival in (NO_VOTES, *rivals):
        for leader_after, rival_after in weighting.worst_cases(leader, rival, len(votes), sorted(remaining)):
            if rival_after > leader_after:
                return False
    return True


def _score_answers(votes: Sequence[Vote], weighting: Weighting) -> dict[str, AnswerScore]:
    scores: dict[str, AnswerScore] = {}
    for vote, weight in zip(votes, weighting.weights(votes), strict=True):
        score = scores.get(vote.answer, NO_VOTES)
        scores[vote.answer] = AnswerScore(score.weight + weight, max(score.priority, -vote.index))
    # The winner is first.
    return dict(sorted(scores.items(), key=lambda item: item[1], reverse=True))
