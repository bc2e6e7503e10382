"""The selection rules alone: their selections, and their certain decisions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.group.candidate import Candidate, State
from darts_server.group.events import Deliver, Finished, Lost, Progress, Start, Started
from darts_server.group.group import Group
from darts_server.group.sampled_tail import CutTail, SampledTail
from darts_server.group.selection import AllSurvivors, DualEnd, InOrder, SampledSurvivors, SelectionRule, Selector
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs
from tests.group.cases import CUT_TAILS, RULES, WITH_FAILURES, WITHOUT_DEADLINE, cases, scored, thoroughly
from tests.group.oracle import Fate, Known, Open, Rule, chosen, cut_lengths, futures, possible
from tests.group.world import Case

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
    """The answers of a selector. ``certain``: its deliveries or, once nothing runs, its selection."""

    certain: frozenset[int]
    stops: Mapping[int, DiscardReason] = field(default_factory=dict)
    cuts: Mapping[int, int] = field(default_factory=dict)
    check_at: Mapping[int, int] = field(default_factory=dict)


def selector_of(
    rule: SelectionRule, candidates: Iterable[Candidate], deliver_early: bool = False, deadline: int | None = None
) -> Selector:
    selector = rule.selector_type(rule, deliver_early)
    selector.deadline = deadline
    for candidate in candidates:
        selector.update(candidate)
    return selector


def assess(
    rule: SelectionRule,
    running: Sequence[Candidate],
    finished: Sequence[Candidate],
    early: bool = False,
    deadline: int | None = None,
    cut_length: int | None = None,
) -> Verdict:
    selector = selector_of(rule, (*running, *finished), early, deadline)
    selector.cut_length = cut_length
    stops = selector.stops()
    for index in stops:
        selector.update(replace(selector.candidates[index], state=State.DISCARDED))
    waits = len(stops) < len(running)
    certain = frozenset(selector.take_deliveries() if waits else selector.select())
    return Verdict(certain, stops, selector.cuts(), selector.compute_checks())


# --- selecting ---------------------------------------------------------------


@thoroughly
@given(RULES, st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=10), LIMITS, RANDOMS)
def test_a_rule_selects_as_its_definition_says(
    rule: Rule, ends: list[tuple[int, bool]], limit: int | None, random: Random
) -> None:
    draws = random.sample(range(100), len(ends))
    fates = {i: Fate(length, valid, draw) for i, ((length, valid), draw) in enumerate(zip(ends, draws, strict=True))}
    finished = [ended(i, f.length, valid=f.valid, tail_draw=f.tail_draw) for i, f in fates.items()]
    random.shuffle(finished)
    assert selector_of(rule, finished, deadline=limit).select() == chosen(rule, fates, limit)


SHORT, LONG, FILL, SURVIVOR = SelectedAs.SHORT, SelectedAs.LONG, SelectedAs.FILL, SelectedAs.SURVIVOR
MIXED = [ended(0, 9), ended(1, 2, valid=False), ended(2, 4), ended(3, 1, valid=False)]
ONE_TRUNCATED = [
    ended(0, 9, tail_draw=0.1),
    ended(1, 2, tail_draw=0.9),
    ended(2, 4, tail_draw=0.3),
    ended(3, 99, valid=False, tail_draw=0.2),
]
FEW_VALID = [
    ended(0, 9, tail_draw=0.9),
    ended(1, 8, valid=False, tail_draw=0.1),
    ended(2, 5, valid=False, tail_draw=0.8),
]


@pytest.mark.parametrize(
    ("rule", "finished", "selection"),
    [
        (InOrder(2), [ended(2, 1), ended(0, 9, valid=False), ended(1, 5)], {0: SHORT, 1: SHORT}),
        (DualEnd(3), MIXED, {0: SHORT, 2: SHORT, 3: FILL}),
        (DualEnd(1), [ended(2, 4), ended(1, 4), ended(3, 4)], {1: SHORT}),
        (DualEnd(1, 3), ONE_TRUNCATED, {1: SHORT, 2: LONG, 0: LONG, 3: FILL}),
        (SampledTail(1, 2), ONE_TRUNCATED, {1: SHORT, 0: LONG, 3: SelectedAs.LONG_TRUNCATED}),
        (SampledTail(2, 0), FEW_VALID, {0: SHORT, 1: FILL}),
        (AllSurvivors(1), FEW_VALID, {0: SURVIVOR, 1: SURVIVOR, 2: SURVIVOR}),
        (SampledSurvivors(2), FEW_VALID, {1: SURVIVOR, 2: SURVIVOR}),
    ],
    ids=str,
)
def test_rules_select_in_small_groups(rule: Rule, finished: list[Candidate], selection: dict[int, SelectedAs]) -> None:
    assert selector_of(rule, finished).select() == selection


@pytest.mark.parametrize(
    ("rule", "size", "valid", "truncated"),
    [
        (InOrder(3), 3, DiscardReason.MIDDLE, DiscardReason.MIDDLE),
        (DualEnd(3), 3, DiscardReason.LONGER_THAN_NEEDED, DiscardReason.TRUNCATED),
        (DualEnd(3, 1), 4, DiscardReason.MIDDLE, DiscardReason.TRUNCATED),
        (SampledTail(3, 1), 4, DiscardReason.MIDDLE, DiscardReason.TRUNCATED),
        (CutTail(3, 1), 4, DiscardReason.MIDDLE, DiscardReason.TRUNCATED),
        (SampledSurvivors(3), 3, DiscardReason.MIDDLE, DiscardReason.MIDDLE),
    ],
    ids=str,
)
def test_a_rule_has_its_size_and_the_reasons_of_discarded_candidates(
    rule: Rule, size: int, valid: DiscardReason, truncated: DiscardReason
) -> None:
    assert (rule.num_shortest, rule.size, rule.completion_place) == (3, size, size)
    assert rule.discard_reason(ended(0, 3)) is valid
    assert rule.discard_reason(ended(0, 3, valid=False)) is truncated


# --- being certain ----------------------------------------------------------


def test_a_candidate_that_reaches_the_threshold_is_stopped() -> None:
    done = [ended(1, 5), ended(2, 7)]
    verdict = assess(DualEnd(2), [running(0, 6), running(3, 6), running(4, 5)], done)
    assert verdict.stops == {3: DiscardReason.LONGER_THAN_NEEDED}
    assert verdict.check_at == {0: 7, 4: 6}
    assert assess(DualEnd(2), [running(0, 6), running(4, 1)], done).check_at == {0: 7, 4: 6}
    early = assess(DualEnd(2), [running(0, 6), running(4, 1)], done, early=True)
    assert early.check_at == {0: 7, 4: 4}, "then also where it falls behind the first"
    assert assess(DualEnd(3), [running(0, 8), running(4, 1)], done, early=True).check_at == {4: 4}


def test_falling_behind_any_of_the_shortest_can_decide_the_tail() -> None:
    """Candidate 4 wins only if both 2 and 3 are shorter than both finished candidates."""
    done = [ended(0, 5, tail_draw=0.8), ended(1, 9, tail_draw=0.9)]
    losing = running(4, 9, tail_draw=0.3)
    third = running(3, 0, tail_draw=0.2)
    before, after = (
        assess(SampledTail(2, 1), [running(2, tokens, tail_draw=0.1), third, losing], done) for tokens in (3, 4)
    )
    assert not before.stops
    assert after.stops == {4: DiscardReason.TAIL_PRUNED}
    assert before.check_at[2] == 4


def test_without_places_for_the_shortest_every_candidate_competes_for_the_tail() -> None:
    going = [running(1, 0, tail_draw=0.1), running(2, 0, tail_draw=0.8)]
    verdict = assess(SampledTail(0, 1), going, [ended(0, 5, tail_draw=0.4)])
    assert verdict.stops == {2: DiscardReason.TAIL_PRUNED}


def test_a_sampled_candidate_beyond_the_deadline_is_cut_once_the_completion_length_is_final() -> None:
    """Candidate 1 is sampled. Its length depends on 3, which may still be shorter than the second shortest."""
    done = [ended(0, 2, tail_draw=0.9), ended(1, 9, tail_draw=0.1), ended(2, 6, tail_draw=0.8)]
    rule = CutTail(1, 1)
    going = running(3, 4, tail_draw=0.2)
    assert assess(rule, [going], done, deadline=3) == Verdict(frozenset({0}), check_at={3: 5})
    certain = assess(rule, [replace(going, tokens=5)], done, deadline=3)
    assert certain == Verdict(frozenset({0, 1}), {3: DiscardReason.TAIL_PRUNED}, cuts={1: 6})
    only_fill = [ended(0, 2), ended(1, 5, valid=False), ended(2, 6, valid=False)]
    assert assess(CutTail(2, 1), [], only_fill, deadline=1) == Verdict(frozenset({0, 1, 2}))


@pytest.mark.parametrize(("deadline", "certain"), [(None, {0}), (9, {0}), (8, set())])
def test_a_candidate_that_may_be_short_or_cut_is_not_certain(deadline: int | None, certain: set[int]) -> None:
    """Candidate 0 is in the group in any case, but is cut if two others are shorter."""
    going = [running(1, 0, tail_draw=0.5), running(2, 0, tail_draw=0.6)]
    drawn = [ended(0, 9, tail_draw=0.1)]
    assert assess(CutTail(1, 1), going, drawn, early=True, deadline=deadline).certain == certain
    surely_short = assess(CutTail(1, 1), [running(1, 9), running(2, 9)], [ended(0, 9)], early=True, deadline=3)
    assert surely_short.certain == {0}


States = list[tuple[str, int]]


def situations(
    of: st.SearchStrategy[RuleT], most: int = 5, max_tokens: int = 3, more: int = 0
) -> st.SearchStrategy[tuple[RuleT, States]]:
    """Return a rule with at most ``most`` candidates, enough for a group and ``more``."""
    tokens = st.just(0) | st.integers(0, max_tokens)
    state = st.tuples(st.sampled_from(["running", "running", "stop", "stop", "length"]), tokens)
    return of.filter(lambda rule: rule.size <= most).flatmap(
        lambda rule: st.tuples(st.just(rule), st.lists(state, min_size=min(most, rule.size + more), max_size=most))
    )


def candidates(states: States, random: Random) -> tuple[list[Candidate], list[Candidate]]:
    """Return running and finished candidates with random tail draws."""
    going = []
    done = []
    draws = random.sample(range(100), len(states))
    for i, ((state, tokens), draw) in enumerate(zip(states, draws, strict=True)):
        if state == "running":
            going.append(running(i, tokens, tail_draw=draw))
        else:
            done.append(ended(i, tokens + 1, valid=state == "stop", tail_draw=draw))
    return going, done


def known(going: Sequence[Candidate], done: Sequence[Candidate]) -> tuple[Known, Open]:
    ends = tuple((c.index, Fate(c.tokens, c.is_valid, c.tail_draw)) for c in done)
    return ends, tuple((c.index, c.tokens, c.tail_draw) for c in going)


@thoroughly
@given(situations(WITHOUT_DEADLINE), st.booleans(), RANDOMS)
def test_candidates_are_stopped_if_no_future_selects_them(
    situation: tuple[Rule, States], early: bool, random: Random
) -> None:
    rule = situation[0]
    going, done = candidates(situation[1], random)
    some, every = possible(rule, *known(going, done))
    verdict = assess(rule, going, done, early)
    assert verdict.stops.keys() == {c.index for c in going} - some
    assert verdict.certain <= every


@thoroughly
@given(situations(CUT_TAILS, more=2), st.booleans(), st.sampled_from([None, 1, 2, 3]), RANDOMS)
def test_verdicts_of_a_cutting_rule_hold_in_every_future(
    situation: tuple[CutTail, States], early: bool, limit: int | None, random: Random
) -> None:
    rule = situation[0]
    going, done = candidates(situation[1], random)
    verdict = assess(rule, going, done, early, limit)
    outcomes: dict[object, object] = {}
    some: set[int] = set()
    for fates in futures(rule, *known(going, done), limit):
        group = chosen(rule, fates).keys()
        cuts = cut_lengths(rule, fates, limit)
        some |= group
        assert verdict.certain <= group
        assert verdict.cuts.items() <= cuts.items()
        assert verdict.certain & cuts.keys() <= verdict.cuts.keys()
        # The length of a stopped candidate changes nothing.
        others = tuple(fate.length for i, fate in sorted(fates.items()) if i not in verdict.stops)
        outcome = frozenset(group), frozenset(cuts.items())
        assert outcomes.setdefault(others, outcome) == outcome
    unselected = {c.index for c in going} - some
    ahead = [sum(d.is_valid and (d.tokens, d.index) < (c.tokens + 1, c.index) for d in done) for c in going]
    behind = {c.index for c, before in zip(going, ahead, strict=True) if before >= rule.size}
    is_complete = len(verdict.certain) == rule.size
    assert verdict.stops.keys() == (unselected if is_complete else unselected & behind)


@thoroughly
@given(situations(RULES, most=8, max_tokens=8), st.booleans(), LIMITS, RANDOMS)
def test_no_verdict_changes_before_its_check(
    situation: tuple[Rule, States], early: bool, limit: int | None, random: Random
) -> None:
    rule = situation[0]
    going, done = candidates(situation[1], random)
    now = assess(rule, going, done, early, limit)
    assert now.check_at.keys() <= {c.index for c in going}
    assert all(now.check_at[c.index] > c.tokens for c in going if c.index in now.check_at)
    silent = [replace(c, tokens=random.randint(c.tokens, now.check_at.get(c.index, 20) - 1)) for c in going]
    then = assess(rule, silent, done, early, limit)
    assert acted_on(rule, now, early) == acted_on(rule, then, early)


def acted_on(rule: Rule, verdict: Verdict, early: bool) -> Sequence[object]:
    certain = verdict.certain if early else len(verdict.certain) == rule.size
    return certain, verdict.stops, verdict.cuts


# --- kept up to date --------------------------------------------------------


def test_a_running_candidate_sorts_with_one_token_more() -> None:
    selector = selector_of(DualEnd(2), [running(0, 3), ended(1, 3)])
    assert (selector.running_by_length, selector.valid_by_length) == ([(4, 0)], [(3, 1)])


@given(scored(cases(WITH_FAILURES, most=20, max_length=12, max_replacements=6, cut=True)))
def test_a_group_does_at_once_everything_that_its_rule_says(case: Case) -> None:
    world = case.world()
    early = case.early
    group = world.group
    for _ in world.moments():
        if not group.is_open or group.outcome is not None:
            continue
        alive = [c for c in group.candidates if c.is_alive]
        running = [c for c in alive if c.is_running]
        finished = [c for c in alive if not c.is_running]
        verdict = assess(case.rule, running, finished, early, group.deadline, group.cut_length)
        assert not verdict.stops, "not stopped yet"
        assert group.check_at == verdict.check_at
        assert not early or verdict.certain <= world.delivered.keys(), "not delivered yet"


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("rule", [SampledTail(1, 2), CutTail(1, 2)], ids=lambda rule: type(rule).__name__)
def test_a_certain_candidate_becomes_uncertain_when_new_candidates_can_be_shorter(
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


def test_no_survivor_is_certain_before_the_last_has_finished() -> None:
    assert not assess(AllSurvivors(2), [running(3, 3)], FEW_VALID, early=True).certain


def test_in_order_extra_candidates_run_until_enough_earlier_candidates_have_finished() -> None:
    assert not assess(InOrder(1), [running(0, 3), running(2, 3)], []).stops
    verdict = assess(InOrder(1), [running(0, 3), running(2, 3)], [ended(1, 9, valid=False)])
    assert verdict.stops == {2: DiscardReason.LONGER_THAN_NEEDED}
    assert verdict.certain == frozenset()


def test_a_sampled_candidate_is_certain_if_it_is_valid_or_enough_others_are_valid() -> None:
    going = [running(3, 0, tail_draw=0.7), running(4, 0, tail_draw=0.8), running(5, 0, tail_draw=0.9)]
    valid = ended(0, 6, tail_draw=0.1)
    truncated = ended(1, 9, valid=False, tail_draw=0.1)
    assert assess(SampledTail(2, 1), going, [valid], early=True).certain == {0}
    assert assess(SampledTail(2, 1), going, [truncated], early=True).certain == set()
    assert assess(SampledTail(1, 1), going, [ended(2, 7), truncated], early=True).certain == {1}
