"""Counting votes, and deciding them early."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.voting.tally import Tally, count_votes, is_decided
from darts_server.policy.voting.weighting import LogOddsWeighting, MajorityWeighting, RankWeighting, Vote, Weighting
from tests.policy.voting.test_weighting import elections

WEIGHTINGS: list[Weighting] = [
    MajorityWeighting(),
    RankWeighting(),
    LogOddsWeighting(),
    LogOddsWeighting(wrong_answers=1),
    LogOddsWeighting(wrong_answers=1, max_chance=0.5),
    LogOddsWeighting(wrong_answers=2, min_chance=0.01, max_chance=0.8),
]


KINDS = st.sampled_from(WEIGHTINGS)


@given(elections(left=0), KINDS)
def test_the_heaviest_answer_wins_and_of_equals_the_earliest(
    election: tuple[list[Vote], list[int]], weighting: Weighting
) -> None:
    votes, _ = election
    weights = dict(zip((v.index for v in votes), weighting.weights(votes), strict=True))
    sums = {a: sum(weights[v.index] for v in votes if v.answer == a) for a in {v.answer for v in votes}}
    first = {a: min(v.index for v in votes if v.answer == a) for a in sums}
    best = min(sums, key=lambda a: (-sums[a], first[a]), default=None)
    assert count_votes(votes, weighting).winner == best
    assert count_votes(votes[::-1], weighting) == count_votes(votes, weighting)


def test_no_votes_have_no_winner() -> None:
    assert count_votes([], MajorityWeighting()) == Tally(None, {}, {})


def completions(votes: Sequence[Vote], remaining: Sequence[int], marks: Sequence[float]) -> Iterator[list[Vote]]:
    """All ways the rest could vote: nothing, any known answer or one of two others, with any of the scores."""
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


@given(elections(most=12, left=4), KINDS)
def test_a_decided_vote_stays_decided(election: tuple[list[Vote], list[int]], weighting: Weighting) -> None:
    votes, remaining = election
    if is_decided(votes, remaining, weighting) and remaining:
        for answer, score in product("axb", (0.0, 1.0)):
            more = [*votes, Vote(remaining[0], answer, score)]
            assert count_votes(more, weighting).winner == count_votes(votes, weighting).winner
            assert is_decided(more, remaining[1:], weighting)


def test_a_single_vote_wins_and_without_votes_nothing_is_decided_until_none_remain() -> None:
    assert count_votes([Vote(3, "a", 0.2)], RankWeighting()) == Tally("a", {"a": 1.0}, {"a": 1})
    assert not is_decided([], [0], MajorityWeighting())
    assert is_decided([], [], MajorityWeighting())


def test_five_of_eight_decide_a_majority_and_four_only_with_the_first_index() -> None:
    assert is_decided([Vote(i, "a") for i in range(5)], [5, 6, 7], MajorityWeighting())
    assert is_decided([Vote(i, "a") for i in range(4)], [4, 5, 6, 7], MajorityWeighting())
    assert not is_decided([Vote(i, "a") for i in range(1, 5)], [0, 5, 6, 7], MajorityWeighting())


def test_a_lead_that_two_more_can_equal_holds_for_the_earlier_answer_only() -> None:
    """Ranks 0 to 6: the rival has 3, the leader 18 in all. Two more on top bring 7 + 8."""

    def votes(rival: int) -> list[Vote]:
        others = [i for i in range(7) if i != rival]
        return [Vote(rival, "b", 3.0), *(Vote(i, "a", s) for i, s in zip(others, (0.0, 1, 2, 4, 5, 6), strict=True))]

    assert is_decided(votes(rival=6), [7, 8], RankWeighting())
    assert not is_decided(votes(rival=0), [7, 8], RankWeighting())


def test_a_negative_vote_for_the_leader_may_still_make_it_the_earlier_answer() -> None:
    """A vote of low q for the leader can only make both equally heavy. With index 0 the leader is then the earlier."""
    rule = LogOddsWeighting(wrong_answers=1, max_chance=0.8)
    leader, rival = [Vote(4, "a", 0.8), Vote(5, "a", 0.8)], [Vote(1, "b", 0.8), Vote(2, "b", 0.8), Vote(3, "b", 0.0)]
    assert is_decided(leader + rival, [0], rule)
    assert not is_decided(leader + rival, [6], rule)


def test_a_candidate_votes_once() -> None:
    twice = [Vote(0, "a"), Vote(0, "b")]
    with pytest.raises(ValueError, match="votes once"):
        count_votes(twice, MajorityWeighting())
    with pytest.raises(ValueError, match="votes once"):
        is_decided([Vote(0, "a")], [0], MajorityWeighting())
