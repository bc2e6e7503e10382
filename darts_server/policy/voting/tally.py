"""Count votes, and decide whether the remaining trajectories can still change the winner.

The heaviest answer wins; of equally heavy ones that of the earliest candidate.

A vote is decided when the leader wins whatever the remaining trajectories answer, which is tested with the answers that
would hurt it most. The test is exact: a decided vote cannot turn, and for an undecided one there are answers that turn
it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from darts_server.policy.voting.weighting import NO_VOTES, AnswerScore, Vote, Weighting


@dataclass(frozen=True, slots=True)
class Tally:
    """Result of a vote.

    ``winner``: ``None`` without votes. ``weights``: of each answer, heaviest first. ``votes``: how many each answer
    has.
    """

    winner: str | None
    weights: Mapping[str, float]
    votes: Mapping[str, int]


def count_votes(votes: Sequence[Vote], weighting: Weighting) -> Tally:
    """Count the votes, in any order.

    Raises:
        ValueError: a candidate votes twice.
    """
    scores = _score_answers(votes, weighting)
    ordered = _order(scores)
    return Tally(
        winner=ordered[0] if ordered else None,
        weights={a: float(scores[a].weight) for a in ordered},
        votes={a: sum(v.answer == a for v in votes) for a in ordered},
    )


def is_decided(votes: Sequence[Vote], remaining: Sequence[int], weighting: Weighting) -> bool:
    """Return whether the winner among ``votes`` wins whatever else is answered.

    ``remaining``: indices of the candidates that may still vote.

    Raises:
        ValueError: a candidate votes twice, or remains though it has voted.
    """
    if len({*remaining, *(v.index for v in votes)}) < len(remaining) + len(votes):
        raise ValueError("a candidate votes once: indices of votes and of remaining candidates must all differ")
    if not remaining:
        return True
    scores = _score_answers(votes, weighting)
    if not scores:
        return False
    first, *others = _order(scores)
    rivals = [NO_VOTES, *(scores[a] for a in others)]
    return not any(
        rival_after.beats(leader_after)
        for rival in rivals
        for leader_after, rival_after in weighting.worst_cases(scores[first], rival, len(votes), sorted(remaining))
    )


def _score_answers(votes: Sequence[Vote], weighting: Weighting) -> dict[str, AnswerScore]:
    if len({v.index for v in votes}) < len(votes):
        raise ValueError("a candidate votes once: indices of votes must all differ")
    scores: dict[str, AnswerScore] = {}
    for vote, weight in zip(votes, weighting.weights(votes), strict=True):
        before = scores.get(vote.answer, NO_VOTES)
        scores[vote.answer] = AnswerScore(before.weight + weight, min(before.first, vote.index))
    return scores


def _order(scores: Mapping[str, AnswerScore]) -> list[str]:
    return sorted(scores, key=lambda answer: (-scores[answer].weight, scores[answer].first))
