"""The rules by themselves: whom they choose, how they label, what they hold for certain."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from darts_server.policy.candidate import Candidate, State
from darts_server.policy.selection import InOrder, LongestTail, SampledTail, Shortest, Verdict
from darts_server.types import End, FinishReason, StopReason
from tests.policy.cases import RULES
from tests.policy.oracle import Fate, Rule, chosen, possible

cheap = settings(max_examples=3 * settings().max_examples)


def ended(index: int, tokens: int, *, valid: bool = True, draw: float = 0.5) -> Candidate:
    reason = FinishReason.STOP if valid else FinishReason.LENGTH
    return Candidate(index, draw=draw, state=State.FINISHED, tokens=tokens, finish_reason=reason)


def running(index: int, tokens: int, *, draw: float = 0.5) -> Candidate:
    return Candidate(index, draw=draw, state=State.RUNNING, tokens=tokens)


# --- choosing ---------------------------------------------------------------


@given(RULES, st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=10), st.randoms())
def test_a_rule_chooses_what_its_definition_says(rule: Rule, ends: list[tuple[int, bool]], random: Random) -> None:
    draws = random.sample(range(100), len(ends))
    fates = {i: Fate(length, valid, draw) for i, ((length, valid), draw) in enumerate(zip(ends, draws, strict=True))}
    finished = [ended(i, fate.length, valid=fate.valid, draw=fate.draw) for i, fate in fates.items()]
    random.shuffle(finished)
    assert rule.select(finished) == chosen(rule, fates)


def test_the_shortest_are_short_and_truncated_ones_fill() -> None:
    finished = [ended(0, 9), ended(1, 2, valid=False), ended(2, 4), ended(3, 1, valid=False)]
    assert Shortest(2).select(finished) == {0: End.SHORT, 2: End.SHORT}
    assert Shortest(3).select(finished) == {0: End.SHORT, 2: End.SHORT, 3: End.FILL}


def test_ties_go_to_the_earlier_index() -> None:
    assert Shortest(1).select([ended(2, 4), ended(1, 4), ended(3, 4)]) == {1: End.SHORT}
    assert LongestTail(0, 1).select([ended(2, 4), ended(1, 4)]) == {2: End.LONG}


def test_the_longest_are_long_and_truncated_ones_fill() -> None:
    finished = [ended(0, 9), ended(1, 2), ended(2, 4), ended(3, 99, valid=False)]
    assert LongestTail(1, 1).select(finished) == {1: End.SHORT, 0: End.LONG}
    assert LongestTail(1, 3).select(finished) == {1: End.SHORT, 2: End.LONG, 0: End.LONG, 3: End.FILL}
    assert LongestTail(1, 0).select(finished) == {1: End.SHORT}


def test_the_sampled_tail_is_drawn_from_all_but_the_shortest() -> None:
    finished = [
        ended(0, 9, draw=0.1),
        ended(1, 2, draw=0.9),
        ended(2, 4, draw=0.3),
        ended(3, 99, valid=False, draw=0.2),
    ]
    assert SampledTail(1, 1).select(finished) == {1: End.SHORT, 0: End.LONG}
    assert SampledTail(1, 2).select(finished) == {1: End.SHORT, 0: End.LONG, 3: End.FILL}


def test_a_sampled_tail_without_enough_valid_ones_takes_all_and_fills() -> None:
    finished = [ended(0, 9, draw=0.9), ended(1, 8, valid=False, draw=0.1), ended(2, 5, valid=False, draw=0.8)]
    assert SampledTail(2, 0).select(finished) == {0: End.SHORT, 2: End.FILL}


def test_in_order_takes_the_first_however_they_ended() -> None:
    finished = [ended(2, 1), ended(0, 9, valid=False), ended(1, 5)]
    assert InOrder(2).select(finished) == {0: End.FILL, 1: End.SHORT}


@pytest.mark.parametrize(
    ("rule", "short", "size"),
    [(InOrder(3), 3, 3), (Shortest(3), 3, 3), (LongestTail(3, 1), 3, 4), (SampledTail(3, 1), 3, 4)],
)
def test_a_rule_knows_its_seats(rule: Rule, short: int, size: int) -> None:
    assert (rule.num_shortest, rule.size) == (short, size)


@pytest.mark.parametrize(
    ("rule", "valid", "truncated"),
    [
        (InOrder(1), StopReason.MIDDLE, StopReason.MIDDLE),
        (Shortest(1), StopReason.LONGER_THAN_NEEDED, StopReason.TRUNCATED),
        (LongestTail(1, 1), StopReason.MIDDLE, StopReason.TRUNCATED),
        (SampledTail(1, 1), StopReason.MIDDLE, StopReason.TRUNCATED),
    ],
)
def test_the_rule_says_why_a_finished_one_is_surplus(rule: Rule, valid: StopReason, truncated: StopReason) -> None:
    assert rule.surplus(ended(0, 3)) is valid
    assert rule.surplus(ended(0, 3, valid=False)) is truncated


# --- being certain ----------------------------------------------------------


def test_one_that_has_run_as_far_as_the_last_short_place_is_hopeless() -> None:
    done = [ended(1, 5), ended(2, 7)]
    verdict = Shortest(2).assess([running(0, 6), running(3, 6), running(4, 5)], done, early=False)
    assert verdict.hopeless == {3: StopReason.LONGER_THAN_NEEDED}
    assert verdict.alarms == {0: 7, 4: 6}


def test_surplus_candidates_in_order_run_until_enough_before_them_have_ended() -> None:
    assert not InOrder(1).assess([running(0, 3), running(2, 3)], [], early=False).hopeless
    verdict = InOrder(1).assess([running(0, 3), running(2, 3)], [ended(1, 9, valid=False)], early=False)
    assert verdict.hopeless == {2: StopReason.LONGER_THAN_NEEDED}
    assert verdict.settled == frozenset()


def test_one_that_lost_the_lottery_is_pruned_from_the_tail() -> None:
    done = [ended(0, 2, draw=0.9), ended(1, 5, draw=0.1)]
    verdict = SampledTail(1, 1).assess([running(2, 5, draw=0.2), running(3, 0, draw=0.2)], done, early=False)
    assert verdict.hopeless == {2: StopReason.TAIL_PRUNED}
    assert verdict.tail == frozenset({1})


def test_one_that_passes_any_of_the_shortest_can_decide_the_lottery() -> None:
    """Candidate 4 wins only if both 2 and 3 come in before both that finished."""
    done = [ended(0, 5, draw=0.8), ended(1, 9, draw=0.9)]
    losing = running(4, 9, draw=0.3)
    before = SampledTail(2, 1).assess([running(2, 3, draw=0.1), running(3, 0, draw=0.2), losing], done, early=False)
    after = SampledTail(2, 1).assess([running(2, 4, draw=0.1), running(3, 0, draw=0.2), losing], done, early=False)
    assert not before.hopeless
    assert after.hopeless == {4: StopReason.TAIL_PRUNED}
    assert before.alarms[2] == 4


def test_a_drawn_one_is_certain_to_belong_if_it_is_valid_or_enough_others_are() -> None:
    going = [running(3, 0, draw=0.7), running(4, 0, draw=0.8), running(5, 0, draw=0.9)]
    valid = ended(0, 6, draw=0.1)
    truncated = ended(1, 9, valid=False, draw=0.1)
    assert SampledTail(2, 1).assess(going, [valid], early=True).settled == {0}
    assert SampledTail(2, 1).assess(going, [truncated], early=True).settled == set()
    assert SampledTail(1, 1).assess(going, [ended(2, 7), truncated], early=True).settled == {1}


def test_candidates_that_only_fill_up_are_not_the_tail() -> None:
    done = [ended(0, 2), ended(1, 5, valid=False), ended(2, 6, valid=False)]
    verdict = SampledTail(2, 1).assess([], done, early=False)
    assert verdict.settled == frozenset({0, 1, 2})
    assert verdict.tail == frozenset()


def states(most: int, max_tokens: int) -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(
        st.tuples(st.sampled_from(["running", "running", "stop", "stop", "length"]), st.integers(0, max_tokens)),
        max_size=most,
    )


def candidates(states: list[tuple[str, int]], random: Random) -> tuple[list[Candidate], list[Candidate]]:
    """Those that run and those that have finished, with lots in any order."""
    going, done = [], []
    draws = random.sample(range(100), len(states))
    for i, ((state, tokens), draw) in enumerate(zip(states, draws, strict=True)):
        if state == "running":
            going.append(running(i, tokens, draw=draw))
        else:
            done.append(ended(i, tokens + 1, valid=state == "stop", draw=draw))
    return going, done


@cheap
@given(RULES, states(most=5, max_tokens=3), st.booleans(), st.randoms())
def test_the_hopeless_are_those_that_no_future_selects(
    rule: Rule, states: list[tuple[str, int]], early: bool, random: Random
) -> None:
    going, done = candidates(states, random)
    known = tuple((c.index, Fate(c.tokens, c.valid, c.draw)) for c in done)
    some, every = possible(rule, known, tuple((c.index, c.tokens, c.draw) for c in going))
    verdict = rule.assess(going, done, early)
    assert verdict.hopeless.keys() == {c.index for c in going} - some
    assert verdict.settled | verdict.tail <= every


@cheap
@given(RULES, states(most=8, max_tokens=8), st.booleans(), st.randoms())
def test_no_verdict_changes_before_an_alarm(
    rule: Rule, states: list[tuple[str, int]], early: bool, random: Random
) -> None:
    going, done = candidates(states, random)
    now = rule.assess(going, done, early)
    assert now.alarms.keys() <= {c.index for c in going}
    assert all(now.alarms[c.index] > c.tokens for c in going if c.index in now.alarms)
    silent = [replace(c, tokens=random.randint(c.tokens, now.alarms.get(c.index, 20) - 1)) for c in going]
    then = rule.assess(silent, done, early)
    assert acted_on(rule, now, early) == acted_on(rule, then, early)


def acted_on(rule: Rule, verdict: Verdict, early: bool) -> Sequence[object]:
    return verdict.hopeless, verdict.tail, verdict.settled if early else len(verdict.settled) == rule.size
