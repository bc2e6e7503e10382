"""Weights of votes."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.voting.tally import Tally, count_votes
from darts_server.policy.voting.weighting import LogOddsWeighting, RankWeighting, Vote

SCORES = st.sampled_from([0.001, 0.05, 0.3, 0.5, 0.8, 0.999])


@st.composite
def elections(draw: st.DrawFn, most: int = 5, left: int = 2) -> tuple[list[Vote], list[int]]:
    """Votes that were cast and candidates that remain, with their indices mixed."""
    cast, remain = draw(st.integers(0, most)), draw(st.integers(0, left))
    indices = draw(st.permutations(range(cast + remain)))
    votes = [Vote(i, draw(st.sampled_from("abc")), draw(SCORES)) for i in indices[:cast]]
    return votes, list(indices[cast:])


# --- weights ----------------------------------------------------------------


@given(elections(most=9, left=0))
def test_ranks_are_linear_from_worst_to_best_and_ties_share(election: tuple[list[Vote], list[int]]) -> None:
    votes, _ = election
    scores = sorted(v.score for v in votes)
    for vote, weight in zip(votes, RankWeighting().weights(votes), strict=True):
        ranks = [rank for rank, s in enumerate(scores) if s == vote.score]
        mean = Fraction(sum(ranks), len(ranks))
        assert weight == (mean / (len(votes) - 1) if len(votes) > 1 else 1)


def test_rank_weights_are_the_papers() -> None:
    votes = [Vote(0, "a", 0.2), Vote(1, "b", 0.9), Vote(2, "a", 0.4)]
    assert [float(w) for w in RankWeighting().weights(votes)] == [0.0, 1.0, 0.5]
    assert count_votes(votes, RankWeighting()) == Tally("b", {"b": 1.0, "a": 0.5}, {"b": 1, "a": 2})


def test_log_odds_weights_are_those_of_naive_bayes() -> None:
    """Three votes, W = 4 wrong answers: the posterior of each answer, worked out from the chances."""
    votes = [Vote(0, "a", 0.7), Vote(1, "b", 0.4), Vote(2, "b", 0.3)]
    wrong = 4
    likelihood = {
        answer: math.prod(v.score if v.answer == answer else (1 - v.score) / wrong for v in votes) for answer in "ab"
    }
    counted = count_votes(votes, LogOddsWeighting(wrong_answers=wrong))
    expected = math.log(likelihood["a"] / likelihood["b"])
    assert counted.weights["a"] - counted.weights["b"] == pytest.approx(expected)


def test_extreme_probabilities_are_clipped() -> None:
    rule = LogOddsWeighting(wrong_answers=1, min_chance=0.1, max_chance=0.75)
    assert [float(rule.weight(q)) for q in (0.0, 1.0)] == pytest.approx([math.log(1 / 9), math.log(3)])


# --- what is refused --------------------------------------------------------


def test_settings_and_scores_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="score must"):
        Vote(0, "a", math.nan)
    with pytest.raises(ValueError, match="wrong_answers must"):
        LogOddsWeighting(wrong_answers=0)
    with pytest.raises(ValueError, match="chances must"):
        LogOddsWeighting(max_chance=1.0)
