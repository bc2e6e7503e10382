"""The selection rules alone: what they select, how they label it, and what they hold for certain.

What a group keeps of its candidates from event to event is what its rule says of all of them at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from darts_server.policy.candidate import Candidate, State
from darts_server.policy.events import Deliver, Finished, Lost, Progress, Start, Started
from darts_server.policy.group import Group
from darts_server.policy.sampled_tail import CutTail, SampledTail
from darts_server.policy.selection import AllSurvivors, InOrder, LongestTail, SampledSurvivors, SelectionRule, Shortest
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs
from tests.policy.cases import CUT_TAILS, RULES, WITH_FAILURES, WITHOUT_DEADLINE, Case, cases
from tests.policy.oracle import Fate, Known, Open, Rule, chosen, cut_lengths, futures, possible
from tests.policy.scored import ScoredCase, scored
from tests.policy.world import World

cheap = settings(max_examples=3 * settings().max_examples)
thoroughly = settings(max_examples=6 * settings().max_examples)


RuleT = TypeVar("RuleT", bound=Rule)
RANDOMS = st.randoms(use_true_random=True)
LIMITS = st.none() | st.integers(1, 8)


def ended(index: int, tokens: int, *, valid: bool = True, tail_draw: float = 0.5) -> Candidate:
    reason = FinishReason.STOP if valid else FinishReason.LENGTH
    return Candidate(index, tail_draw=tail_draw, state=State.FINISHED, tokens=tokens, finish_reason=reason)


def running(index: int, tokens: int, *, tail_draw: float = 0.5) -> Candidate:
    return Candidate(index, tail_draw=tail_draw, state=State.RUNNING, tokens=tokens)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is certain now, whatever the running candidates do, as long as they do not fail.

    ``settled``: finished candidates that belong to the group. ``hopeless``: running candidates that cannot belong to it
    any more, and why. ``cuts``: candidates, running or finished, of which only the first tokens belong to it, and how
    many. ``check_at``: running candidate -> token count at which this verdict may change; progress before that changes
    nothing.
    """

    settled: frozenset[int]
    hopeless: Mapping[int, DiscardReason] = field(default_factory=dict)
    cuts: Mapping[int, int] = field(default_factory=dict)
    check_at: Mapping[int, int] = field(default_factory=dict)


def assess(
    rule: SelectionRule,
    running: Sequence[Candidate],
    finished: Sequence[Candidate],
    deliver_early: bool,
    deadline: int | None = None,
    bound: int | None = None,
) -> Verdict:
    assessment = rule.begin(deliver_early)
    assessment.deadline, assessment.bound = deadline, bound
    for candidate in (*running, *finished):
        assessment.add(candidate)
    hopeless = assessment.hopeless()
    for index in hopeless:
        assessment.remove(index)
    waits = len(hopeless) < len(running)
    return Verdict(
        settled=frozenset(assessment.newly_settled() if waits else rule.select(finished, deadline)),
        hopeless=hopeless,
        cuts=assessment.cuts(),
        check_at=assessment.check_at(),
    )


# --- choosing ---------------------------------------------------------------


@cheap
@given(RULES, st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=10), LIMITS, RANDOMS)
def test_a_rule_selects_what_its_definition_says(
    rule: Rule, ends: list[tuple[int, bool]], limit: int | None, random: Random
) -> None:
    draws = random.sample(range(100), len(ends))
    fates = {i: Fate(length, valid, draw) for i, ((length, valid), draw) in enumerate(zip(ends, draws, strict=True))}
    finished = [ended(i, f.length, valid=f.valid, tail_draw=f.tail_draw) for i, f in fates.items()]
    random.shuffle(finished)
    assert rule.select(finished, limit) == chosen(rule, fates, limit)


def test_the_shortest_are_short_and_truncated_ones_fill() -> None:
    finished = [ended(0, 9), ended(1, 2, valid=False), ended(2, 4), ended(3, 1, valid=False)]
    assert Shortest(2).select(finished) == {0: SelectedAs.SHORT, 2: SelectedAs.SHORT}
    assert Shortest(3).select(finished) == {0: SelectedAs.SHORT, 2: SelectedAs.SHORT, 3: SelectedAs.FILL}


def test_ties_go_to_the_earlier_index() -> None:
    assert Shortest(1).select([ended(2, 4), ended(1, 4), ended(3, 4)]) == {1: SelectedAs.SHORT}
    assert LongestTail(0, 1).select([ended(2, 4), ended(1, 4)]) == {2: SelectedAs.LONG}


def test_the_longest_are_long_and_truncated_ones_fill() -> None:
    finished = [ended(0, 9), ended(1, 2), ended(2, 4), ended(3, 99, valid=False)]
    assert LongestTail(1, 1).select(finished) == {1: SelectedAs.SHORT, 0: SelectedAs.LONG}
    assert LongestTail(1, 3).select(finished) == {
        1: SelectedAs.SHORT,
        2: SelectedAs.LONG,
        0: SelectedAs.LONG,
        3: SelectedAs.FILL,
    }
    assert LongestTail(1, 0).select(finished) == {1: SelectedAs.SHORT}


def test_the_tail_is_sampled_from_all_but_the_shortest() -> None:
    finished = [
        ended(0, 9, tail_draw=0.1),
        ended(1, 2, tail_draw=0.9),
        ended(2, 4, tail_draw=0.3),
        ended(3, 99, valid=False, tail_draw=0.2),
    ]
    assert SampledTail(1, 1).select(finished) == {1: SelectedAs.SHORT, 0: SelectedAs.LONG}
    assert SampledTail(1, 2).select(finished) == {1: SelectedAs.SHORT, 0: SelectedAs.LONG, 3: SelectedAs.LONG_TRUNCATED}


def test_a_sampled_tail_with_too_few_valid_ones_samples_all_other_places() -> None:
    finished = [
        ended(0, 9, tail_draw=0.9),
        ended(1, 8, valid=False, tail_draw=0.1),
        ended(2, 5, valid=False, tail_draw=0.8),
    ]
    assert SampledTail(2, 0).select(finished) == {0: SelectedAs.SHORT, 1: SelectedAs.FILL}


def test_in_order_selects_the_first_however_they_finished() -> None:
    finished = [ended(2, 1), ended(0, 9, valid=False), ended(1, 5)]
    assert InOrder(2).select(finished) == {0: SelectedAs.FILL, 1: SelectedAs.SHORT}


@pytest.mark.parametrize(
    ("rule", "short", "size"),
    [
        (InOrder(3), 3, 3),
        (Shortest(3), 3, 3),
        (LongestTail(3, 1), 3, 4),
        (SampledTail(3, 1), 3, 4),
        (CutTail(3, 1), 3, 4),
    ],
)
def test_a_rule_has_its_size_and_its_number_of_shortest(rule: Rule, short: int, size: int) -> None:
    assert (rule.num_shortest, rule.size) == (short, size)


@pytest.mark.parametrize(
    ("rule", "valid", "truncated"),
    [
        (InOrder(1), DiscardReason.MIDDLE, DiscardReason.MIDDLE),
        (Shortest(1), DiscardReason.LONGER_THAN_NEEDED, DiscardReason.TRUNCATED),
        (LongestTail(1, 1), DiscardReason.MIDDLE, DiscardReason.TRUNCATED),
        (SampledTail(1, 1), DiscardReason.MIDDLE, DiscardReason.TRUNCATED),
        (CutTail(1, 1), DiscardReason.MIDDLE, DiscardReason.TRUNCATED),
    ],
)
def test_the_rule_gives_the_reason_of_a_discarded_candidate(
    rule: Rule, valid: DiscardReason, truncated: DiscardReason
) -> None:
    assert rule.discard_reason(ended(0, 3)) is valid
    assert rule.discard_reason(ended(0, 3, valid=False)) is truncated


# --- survivors of pruning ---------------------------------------------------


def test_all_survivors_are_selected_and_none_is_settled_before_the_last() -> None:
    finished = [ended(0, 5), ended(1, 5), ended(2, 5, valid=False)]
    everyone = dict.fromkeys(range(3), SelectedAs.SURVIVOR)
    assert AllSurvivors(2).select(finished) == everyone
    assert assess(AllSurvivors(2), [], finished, deliver_early=True).settled == everyone.keys()
    going = running(3, 3)
    assert not assess(AllSurvivors(2), [going], finished, deliver_early=True).settled


def test_sampled_survivors_are_those_of_the_lowest_draws() -> None:
    finished = [ended(0, 5, tail_draw=0.9), ended(1, 5, tail_draw=0.1), ended(2, 5, valid=False, tail_draw=0.2)]
    assert SampledSurvivors(2).select(finished) == {1: SelectedAs.SURVIVOR, 2: SelectedAs.SURVIVOR}
    assert SampledSurvivors(2).discard_reason(ended(0, 5)) is DiscardReason.MIDDLE
    assert SampledSurvivors(2).num_shortest == 2


# --- being certain ----------------------------------------------------------


def test_a_candidate_that_reaches_the_threshold_is_hopeless() -> None:
    done = [ended(1, 5), ended(2, 7)]
    verdict = assess(Shortest(2), [running(0, 6), running(3, 6), running(4, 5)], done, deliver_early=False)
    assert verdict.hopeless == {3: DiscardReason.LONGER_THAN_NEEDED}
    assert verdict.check_at == {0: 7, 4: 6}


def test_in_order_extra_candidates_run_until_enough_earlier_ones_have_finished() -> None:
    assert not assess(InOrder(1), [running(0, 3), running(2, 3)], [], deliver_early=False).hopeless
    verdict = assess(InOrder(1), [running(0, 3), running(2, 3)], [ended(1, 9, valid=False)], deliver_early=False)
    assert verdict.hopeless == {2: DiscardReason.LONGER_THAN_NEEDED}
    assert verdict.settled == frozenset()


def test_a_candidate_that_lost_the_tail_is_stopped() -> None:
    done = [ended(0, 2, tail_draw=0.9), ended(1, 5, tail_draw=0.1)]
    verdict = assess(
        SampledTail(1, 1), [running(2, 5, tail_draw=0.2), running(3, 0, tail_draw=0.2)], done, deliver_early=False
    )
    assert verdict.hopeless == {2: DiscardReason.TAIL_PRUNED}


def test_passing_any_of_the_shortest_can_decide_the_tail() -> None:
    """Candidate 4 wins only if both 2 and 3 come in before both that finished."""
    done = [ended(0, 5, tail_draw=0.8), ended(1, 9, tail_draw=0.9)]
    losing = running(4, 9, tail_draw=0.3)
    before = assess(
        SampledTail(2, 1),
        [running(2, 3, tail_draw=0.1), running(3, 0, tail_draw=0.2), losing],
        done,
        deliver_early=False,
    )
    after = assess(
        SampledTail(2, 1),
        [running(2, 4, tail_draw=0.1), running(3, 0, tail_draw=0.2), losing],
        done,
        deliver_early=False,
    )
    assert not before.hopeless
    assert after.hopeless == {4: DiscardReason.TAIL_PRUNED}
    assert before.check_at[2] == 4


def test_a_sampled_candidate_is_settled_if_it_is_valid_or_enough_others_are() -> None:
    going = [running(3, 0, tail_draw=0.7), running(4, 0, tail_draw=0.8), running(5, 0, tail_draw=0.9)]
    valid = ended(0, 6, tail_draw=0.1)
    truncated = ended(1, 9, valid=False, tail_draw=0.1)
    assert assess(SampledTail(2, 1), going, [valid], deliver_early=True).settled == {0}
    assert assess(SampledTail(2, 1), going, [truncated], deliver_early=True).settled == set()
    assert assess(SampledTail(1, 1), going, [ended(2, 7), truncated], deliver_early=True).settled == {1}


def test_candidates_that_only_fill_up_are_not_cut() -> None:
    done = [ended(0, 2), ended(1, 5, valid=False), ended(2, 6, valid=False)]
    assert assess(CutTail(2, 1), [], done, deliver_early=False, deadline=1) == Verdict(frozenset({0, 1, 2}))


def test_a_sampled_candidate_beyond_the_deadline_waits_for_contenders() -> None:
    """Candidate 1 is sampled. Where it ends depends on 3, which may still be shorter than the second shortest."""
    done = [ended(0, 2, tail_draw=0.9), ended(1, 9, tail_draw=0.1), ended(2, 6, tail_draw=0.8)]
    rule, going = CutTail(1, 1), running(3, 4, tail_draw=0.2)
    waiting = assess(rule, [going], done, deliver_early=False, deadline=3)
    assert waiting == Verdict(frozenset({0}), check_at={3: 5})
    certain = assess(rule, [replace(going, tokens=5)], done, deliver_early=False, deadline=3)
    assert certain == Verdict(frozenset({0, 1}), {3: DiscardReason.TAIL_PRUNED}, cuts={1: 6})


def test_a_candidate_that_lost_the_tail_runs_until_the_deadline_is_known() -> None:
    done = [ended(0, 2, tail_draw=0.9), ended(1, 9, tail_draw=0.2)]
    going = [running(2, 4, tail_draw=0.1), running(3, 4, tail_draw=0.8)]
    assert not assess(CutTail(1, 1), going, done, deliver_early=False, deadline=20).hopeless
    assert assess(SampledTail(1, 1), going, done, deliver_early=False).hopeless == {3: DiscardReason.TAIL_PRUNED}
    done.append(ended(4, 4, tail_draw=0.7))
    verdict = assess(CutTail(1, 1), going, done, deliver_early=False, deadline=20)
    assert (verdict.hopeless, verdict.check_at) == ({3: DiscardReason.TAIL_PRUNED}, {2: 20})


def test_a_candidate_that_may_be_short_or_cut_is_not_settled_beyond_the_deadline() -> None:
    """Candidate 0 belongs either way, but with its first tokens only if two others come in before it."""
    going, drawn = [running(1, 0, tail_draw=0.5), running(2, 0, tail_draw=0.6)], [ended(0, 9, tail_draw=0.1)]
    assert assess(CutTail(1, 1), going, drawn, deliver_early=True).settled == {0}
    assert assess(CutTail(1, 1), going, drawn, deliver_early=True, deadline=9).settled == {0}
    assert assess(CutTail(1, 1), going, drawn, deliver_early=True, deadline=8).settled == set()


def test_a_candidate_that_is_surely_short_is_settled_beyond_the_deadline_too() -> None:
    going = [running(1, 9), running(2, 9)]
    assert assess(CutTail(1, 1), going, [ended(0, 9)], deliver_early=True, deadline=3).settled == {0}


States = list[tuple[str, int]]


def situations(
    of: st.SearchStrategy[RuleT], most: int = 5, max_tokens: int = 3, spare: int = 0
) -> st.SearchStrategy[tuple[RuleT, States]]:
    """A rule, and at most ``most`` candidates, enough for a group and ``spare`` more."""
    tokens = st.just(0) | st.integers(0, max_tokens)
    state = st.tuples(st.sampled_from(["running", "running", "stop", "stop", "length"]), tokens)
    return of.filter(lambda rule: rule.size <= most).flatmap(
        lambda rule: st.tuples(st.just(rule), st.lists(state, min_size=min(most, rule.size + spare), max_size=most))
    )


def candidates(states: States, random: Random) -> tuple[list[Candidate], list[Candidate]]:
    """Those that run and those that have finished, with random tail draws."""
    going, done = [], []
    draws = random.sample(range(100), len(states))
    for i, ((state, tokens), draw) in enumerate(zip(states, draws, strict=True)):
        if state == "running":
            going.append(running(i, tokens, tail_draw=draw))
        else:
            done.append(ended(i, tokens + 1, valid=state == "stop", tail_draw=draw))
    return going, done


def known(going: Sequence[Candidate], done: Sequence[Candidate]) -> tuple[Known, Open]:
    ends = tuple((c.index, Fate(c.tokens, c.valid, c.tail_draw)) for c in done)
    return ends, tuple((c.index, c.tokens, c.tail_draw) for c in going)


@cheap
@given(situations(WITHOUT_DEADLINE), st.booleans(), RANDOMS)
def test_hopeless_candidates_are_those_that_no_future_selects(
    situation: tuple[Rule, States], early: bool, random: Random
) -> None:
    rule, (going, done) = situation[0], candidates(situation[1], random)
    some, every = possible(rule, *known(going, done))
    verdict = assess(rule, going, done, early)
    assert verdict.hopeless.keys() == {c.index for c in going} - some
    assert verdict.settled <= every


@thoroughly
@given(situations(CUT_TAILS, spare=2), st.booleans(), st.sampled_from([None, 1, 2, 3]), RANDOMS)
def test_verdicts_of_a_cutting_rule_hold_in_every_future(
    situation: tuple[CutTail, States], early: bool, limit: int | None, random: Random
) -> None:
    rule, (going, done) = situation[0], candidates(situation[1], random)
    verdict = assess(rule, going, done, early, limit)
    outcomes: dict[object, object] = {}
    some: set[int] = set()
    for fates in futures(rule, *known(going, done), limit):
        group, cuts = chosen(rule, fates).keys(), cut_lengths(rule, fates, limit)
        some |= group
        assert verdict.settled <= group
        assert verdict.cuts.items() <= cuts.items()
        assert verdict.settled & cuts.keys() <= verdict.cuts.keys()
        # No candidate is stopped whose length could change anything.
        others = tuple(fate.length for i, fate in sorted(fates.items()) if i not in verdict.hopeless)
        outcome = frozenset(group), frozenset(cuts.items())
        assert outcomes.setdefault(others, outcome) == outcome
    unselected = {c.index for c in going} - some
    ahead = [sum(d.valid and d.sort_key < c.sort_key for d in done) for c in going]
    behind = {c.index for c, before in zip(going, ahead, strict=True) if before >= rule.size}
    certain = len(verdict.settled) == rule.size
    assert verdict.hopeless.keys() == (unselected if certain else unselected & behind)


@cheap
@given(situations(RULES, most=8, max_tokens=8), st.booleans(), LIMITS, RANDOMS)
def test_no_verdict_changes_before_its_check(
    situation: tuple[Rule, States], early: bool, limit: int | None, random: Random
) -> None:
    rule, (going, done) = situation[0], candidates(situation[1], random)
    now = assess(rule, going, done, early, limit)
    assert now.check_at.keys() <= {c.index for c in going}
    assert all(now.check_at[c.index] > c.tokens for c in going if c.index in now.check_at)
    silent = [replace(c, tokens=random.randint(c.tokens, now.check_at.get(c.index, 20) - 1)) for c in going]
    then = assess(rule, silent, done, early, limit)
    assert acted_on(rule, now, early) == acted_on(rule, then, early)


def acted_on(rule: Rule, verdict: Verdict, early: bool) -> Sequence[object]:
    settled = verdict.settled if early else len(verdict.settled) == rule.size
    return settled, verdict.hopeless, verdict.cuts


# --- kept up to date --------------------------------------------------------


@cheap
@given(cases(WITH_FAILURES, most=40, max_length=20, max_spare=6, cut=True))
def test_an_assessment_kept_up_to_date_equals_a_new_one(case: Case) -> None:
    assert_kept(case.world(), case.early)


@given(scored(cases(WITH_FAILURES, most=20, max_length=12, max_spare=3), refill=True))
def test_also_of_candidates_that_are_pruned_and_replaced(case: ScoredCase) -> None:
    assert_kept(case.world(), case.case.early)


def assert_kept(world: World, early: bool) -> None:
    group = world.group
    for _ in world.moments():
        if not group.is_open or group.outcome is not None:
            continue
        alive = [c for c in group.candidates if c.alive]
        running, finished = [c for c in alive if c.running], [c for c in alive if not c.running]
        verdict = assess(world.rule, running, finished, early, group.deadline, group.bound)
        assert not verdict.hopeless, "not stopped yet"
        assert group.check_at == verdict.check_at
        assert not early or verdict.settled <= world.delivered.keys(), "not delivered yet"


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("rule", [SampledTail(1, 2), CutTail(1, 2)], ids=lambda rule: type(rule).__name__)
def test_a_certain_candidate_is_not_settled_again_when_new_ones_can_come_before_it(
    rule: SampledTail | CutTail, early: bool
) -> None:
    group = Group(rng=np.random.default_rng(0), max_replacements=2, deliver_early=early)
    group.open(rule, 3)
    group.handle(*(Started(i) for i in range(3)), Progress(1, 5), Progress(2, 5))
    assert group.handle(Finished(0, 3, FinishReason.STOP)) == [Deliver(0)] * early
    assert group.handle(Lost(1)) == [Start((3,))]
    assert group.handle(Started(3), Finished(3, 2, FinishReason.STOP)) == [Deliver(3)] * early
    group.handle(Finished(2, 7, FinishReason.STOP))
    assert group.outcome is Outcome.COMPLETED
    assert [c.selected_as is not None for c in group.candidates] == [True, False, True, True]
