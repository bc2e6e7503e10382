"""Count votes and tell whether the rest can change the winner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from darts_server.policy.voting.weighting import NOBODY, Standing, Vote, Weighting


@dataclass(frozen=True, slots=True)
class Tally:
    """``winner``: ``None`` without votes. ``weights``: of each answer, heaviest first. ``votes``: of each answer."""

    winner: str | None
    weights: Mapping[str, float]
    votes: Mapping[str, int]


def count_votes(votes: Sequence[Vote], weighting: Weighting) -> Tally:
    """Count the votes; the order in which they are given does not matter.

    Raises:
        ValueError: a candidate votes twice.
    """
    standings = _standings(votes, weighting)
    ordered = _ordered(standings)
    return Tally(
        winner=ordered[0] if ordered else None,
        weights={a: float(standings[a].weight) for a in ordered},
        votes={a: sum(v.answer == a for v in votes) for a in ordered},
    )


def is_decided(votes: Sequence[Vote], remaining: Sequence[int], weighting: Weighting) -> bool:
    """Whether the winner among ``votes`` wins whatever the candidates ``remaining`` (their indices) answer, if they do.

    Raises:
        ValueError: a candidate votes twice, or remains though it has voted.
    """
    if len({*remaining, *(v.index for v in votes)}) < len(remaining) + len(votes):
        raise ValueError("a candidate votes once: indices of votes and of remaining candidates must all differ")
    if not remaining:
        return True
    standings = _standings(votes, weighting)
    if not standings:
        return False
    first, *others = _ordered(standings)
    rivals = [NOBODY, *(standings[a] for a in others)]
    return not any(
        threat.beats(leader)
        for rival in rivals
        for leader, threat in weighting.threats(standings[first], rival, len(votes), sorted(remaining))
    )


def _standings(votes: Sequence[Vote], weighting: Weighting) -> dict[str, Standing]:
    if len({v.index for v in votes}) < len(votes):
        raise ValueError("a candidate votes once: indices of votes must all differ")
    standings: dict[str, Standing] = {}
    for vote, weight in zip(votes, weighting.weights(votes), strict=True):
        known = standings.get(vote.answer, NOBODY)
        standings[vote.answer] = Standing(known.weight + weight, min(known.first, vote.index))
    return standings


def _ordered(standings: Mapping[str, Standing]) -> list[str]:
    return sorted(standings, key=lambda answer: (-standings[answer].weight, standings[answer].first))
