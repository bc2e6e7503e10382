"""Votes: weigh and count answers, and decide early."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.voting import (
    LogOddsWeighting,
    MajorityWeighting,
    RankWeighting,
    Tally,
    Vote,
    Weighting,
    count_votes,
    create_weighting,
    is_decided,
)

# --- weights ----------------------------------------------------------------

SCORES = st.sampled_from([0.001, 0.05, 0.3, 0.5, 0.8, 0.999])
WEIGHTINGS: list[Weighting] = [
    MajorityWeighting(),
    RankWeighting(),
    LogOddsWeighting(),
    LogOddsWeighting(wrong_answers=1),
    LogOddsWeighting(wrong_answers=1, max_chance=0.5),
    LogOddsWeighting(wrong_answers=2, min_chance=0.01, max_chance=0.8),
]
KINDS = st.sampled_from(WEIGHTINGS)


@st.composite
def elections(draw: st.DrawFn, most: int = 5, left: int = 2) -> tuple[list[Vote], list[int]]:
    """Create votes and remaining candidates, with mixed indices."""
    cast = draw(st.integers(0, most))
    remain = draw(st.integers(0, left))
    indices = draw(st.permutations(range(cast + remain)))
    votes = [Vote(i, draw(st.sampled_from("abc")), draw(SCORES)) for i in indices[:cast]]
    return votes, list(indices[cast:])


@given(elections(most=9, left=0))
def test_ranks_are_linear_from_worst_to_best_and_ties_share(election: tuple[list[Vote], list[int]]) -> None:
    votes, _ = election
    scores = sorted(v.score for v in votes)
    for vote, weight in zip(votes, RankWeighting().weights(votes), strict=True):
        ranks = [rank for rank, s in enumerate(scores) if s == vote.score]
        mean = Fraction(sum(ranks), len(ranks))
        assert weight == (mean / (len(votes) - 1) if len(votes) > 1 else 1)


def test_rank_weights_are_the_formula_of_the_paper() -> None:
    votes = [Vote(0, "a", 0.2), Vote(1, "b", 0.9), Vote(2, "a", 0.4)]
    expected = Tally("b", {"b": 1.0, "a": 0.5}, {"b": 1, "a": 2}, {0: 0.0, 1: 1.0, 2: 0.5})
    assert count_votes(votes, RankWeighting()) == expected


def test_log_odds_weights_agree_with_naive_bayes() -> None:
    """Compare with the posterior of each answer, for three votes and W = 4 wrong answers."""
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


def test_listed_choices_set_the_number_of_wrong_answers() -> None:
    assert create_weighting("log_odds", ["yes", "no"]) == create_weighting("log_odds", ["only"]) == LogOddsWeighting(1)
    assert create_weighting("log_odds", "(.)") == LogOddsWeighting()
    kinds = [type(create_weighting(weights, "(.)")) for weights in ("majority", "rank")]
    assert kinds == [MajorityWeighting, RankWeighting]


# --- counting and deciding --------------------------------------------------


@given(elections(left=0), KINDS)
def test_the_heaviest_answer_wins_and_of_equal_answers_the_earliest(
    election: tuple[list[Vote], list[int]], weighting: Weighting
) -> None:
    votes, _ = election
    weights = dict(zip((v.index for v in votes), weighting.weights(votes), strict=True))
    sums = {a: sum(weights[v.index] for v in votes if v.answer == a) for a in {v.answer for v in votes}}
    first = {a: min(v.index for v in votes if v.answer == a) for a in sums}
    best = min(sums, key=lambda a: (-sums[a], first[a]), default=None)
    assert count_votes(votes, weighting).winner == best
    assert count_votes(votes[::-1], weighting) == count_votes(votes, weighting)


def completions(votes: Sequence[Vote], remaining: Sequence[int], marks: Sequence[float]) -> Iterator[list[Vote]]:
    """Yield all ways to vote of the others: no vote, any known answer or one of two others, with any score."""
    answers = [*sorted({v.answer for v in votes}), "x", "y"]
    ballots = [None, *product(answers, marks)]
    for cast in product(ballots, repeat=len(remaining)):
        yield [*votes, *(Vote(i, *ballot) for i, ballot in zip(remaining, cast, strict=True) if ballot is not None)]


@given(elections(), KINDS)
def test_a_vote_is_decided_exactly_when_no_completion_changes_the_winner(
    election: tuple[list[Vote], list[int]], weighting: Weighting
) -> None:
    votes, remaining = election
    leader = count_votes(votes, weighting).winner
    levels = sorted({v.score for v in votes})
    between = [(a + b) / 2 for a, b in pairwise(levels)]
    marks = [0.0, *levels, *between, 1.0] if isinstance(weighting, RankWeighting) else [0.0, 0.4, 1.0]
    turned = any(count_votes(cast, weighting).winner != leader for cast in completions(votes, remaining, marks))
    assert is_decided(votes, remaining, weighting) == (not turned)


def test_a_single_vote_wins_and_without_votes_nothing_is_decided_until_none_remain() -> None:
    assert count_votes([Vote(3, "a", 0.2)], RankWeighting()) == Tally("a", {"a": 1.0}, {"a": 1}, {3: 1.0})
    assert not is_decided([], [0], MajorityWeighting())
    assert is_decided([], [], MajorityWeighting())


def test_a_lead_that_two_votes_can_equal_decides_only_for_the_earlier_answer() -> None:
    """Of the ranks 0 to 6, the rival has 3 and the leader has 18 in all. Two more votes add 7 + 8."""

    def votes(rival: int) -> list[Vote]:
        others = [i for i in range(7) if i != rival]
        return [Vote(rival, "b", 3.0), *(Vote(i, "a", s) for i, s in zip(others, (0.0, 1, 2, 4, 5, 6), strict=True))]

    assert is_decided(votes(rival=6), [7, 8], RankWeighting())
    assert not is_decided(votes(rival=0), [7, 8], RankWeighting())


def test_a_negative_vote_for_the_leader_may_still_make_it_the_earlier_answer() -> None:
    """A vote of low q for the leader can make both answers equally heavy. With index 0 the leader is the earlier."""
    rule = LogOddsWeighting(wrong_answers=1, max_chance=0.8)
    leader = [Vote(4, "a", 0.8), Vote(5, "a", 0.8)]
    rival = [Vote(1, "b", 0.8), Vote(2, "b", 0.8), Vote(3, "b", 0.0)]
    assert is_decided(leader + rival, [0], rule)
    assert not is_decided(leader + rival, [6], rule)


def test_five_of_eight_decide_a_majority_and_four_only_with_the_first_index() -> None:
    assert is_decided([Vote(i, "a") for i in range(5)], [5, 6, 7], MajorityWeighting())
    assert is_decided([Vote(i, "a") for i in range(4)], [4, 5, 6, 7], MajorityWeighting())
    assert not is_decided([Vote(i, "a") for i in range(1, 5)], [0, 5, 6, 7], MajorityWeighting())
