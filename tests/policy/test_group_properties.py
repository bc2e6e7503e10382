"""What holds for every group, in worlds that try everything an engine can do; against brute force."""

from dataclasses import replace

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from darts_server.policy.candidate import State
from darts_server.policy.events import Failed, Finished, LimitSet, Lost, Progress, Scored, Started
from darts_server.policy.selection import LongestTail, SampledTail
from darts_server.types import End, FinishReason, Outcome, StopReason
from tests.policy.cases import (
    LONGEST_TAILS,
    SAMPLED_TAILS,
    WITH_FAILURES,
    WITH_THE_END_OF_THE_ENGINE,
    WITHOUT_FAILURES,
    WITHOUT_TAIL,
    Case,
    cases,
)
from tests.policy.oracle import Fate, chosen, possible
from tests.policy.world import Ending, Peek, World

thoroughly = settings(max_examples=3 * settings().max_examples)
"""For the properties in which a mistake hides best."""

# --- the selection ----------------------------------------------------------


@thoroughly
@given(cases(WITHOUT_FAILURES))
def test_the_group_is_what_the_rule_makes_of_all_true_lengths(case: Case) -> None:
    world = case.world().run()
    assert world.selection == chosen(case.rule, world.fates())
    assert_ended_well(case, world)


@given(cases(WITHOUT_FAILURES), cases(WITHOUT_FAILURES, most=12))
def test_the_group_does_not_depend_on_timing(case: Case, other: Case) -> None:
    lives = zip(case.truths, [*other.truths, *case.truths], strict=False)
    truths = [replace(ours, delay=theirs.delay, speed=theirs.speed) for ours, theirs in lives]
    changed = replace(case, truths=truths, order=other.order, peek=other.peek, at_once=other.early, early=other.early)
    assert changed.world().run().selection == case.world().run().selection


@thoroughly
@given(cases(WITH_FAILURES, max_spare=6, most=6))
def test_with_failures_the_rule_chooses_among_those_that_remain(case: Case) -> None:
    world = case.world().run()
    if world.selection is not None:
        assert world.selection == chosen_of_those_that_remain(case, world)
    event("restarted" if len(world.runs) > case.candidates else "not restarted")
    event("delivered and restarted" if world.delivered and len(world.runs) > case.candidates else "not so")


def chosen_of_those_that_remain(case: Case, world: World) -> dict[int, End]:
    """Whoever was cut counts as truncated there, but is as long as the tail is."""
    fates = world.fates() | {i: world.finished[i] for i in world.cuts}
    ends = chosen(case.rule, {i: fate for i, fate in fates.items() if i not in world.gone})
    return {i: End.LONG if i in world.cuts else end for i, end in ends.items()}


# --- stopping ---------------------------------------------------------------


@thoroughly
@given(cases(WITHOUT_FAILURES, most=5, max_length=5).filter(lambda case: case.candidates <= 5))
def test_a_candidate_is_stopped_when_no_future_selects_it_and_not_before(case: Case) -> None:
    world = case.world()
    moments = world.moments()
    next(moments)  # open: a group decides whom to stop when it hears something
    for _ in moments:
        some, _ = futures(case, world)
        assert world.known.keys() == some & (world.known.keys() | world.stopped.keys())


@given(cases([Ending.STOP], most=5, max_length=5).filter(lambda case: case.candidates <= 5))
def test_a_trajectory_is_delivered_when_every_future_selects_it_and_not_before(case: Case) -> None:
    """With a sampled tail some are delivered later than that; never sooner."""
    world = replace(case, early=True, peek=Peek.EVERYTHING).world()
    for _ in world.moments():
        if world.selection is None:
            _, every = futures(case, world)
            assert world.delivered.keys() <= every
            assert isinstance(case.rule, SampledTail) or world.delivered.keys() == every & world.finished.keys()


def futures(case: Case, world: World) -> tuple[frozenset[int], frozenset[int]]:
    tokens = world.known | {i: stopped.known for i, stopped in world.stopped.items()}
    open_ones = ((i, known, world.draw(i)) for i, known in sorted(tokens.items()))
    return possible(case.rule, tuple(sorted(world.finished.items(), key=lambda f: f[0])), tuple(open_ones))


@given(cases(WITHOUT_FAILURES, of=st.builds(LongestTail, st.integers(0, 3), st.integers(1, 2)), max_length=20))
def test_the_longest_tail_stops_nobody(case: Case) -> None:
    assert not case.world().run().stopped


@thoroughly
@given(cases(WITH_THE_END_OF_THE_ENGINE, max_spare=3), st.booleans())
def test_alarms_show_everything_that_matters(case: Case, cut: bool) -> None:
    case = replace(case, at_once=True, limits={2: 4, 5: 3} if cut else {})
    asked = replace(case, peek=Peek.ALARMS).world().run()
    told = replace(case, peek=Peek.EVERYTHING).world().run()
    assert sights(asked) == sights(told)


def sights(world: World) -> object:
    """In the last step it may be told at once or in parts, so some may or may not be delivered before completion."""
    delivered = {i: step for i, step in world.delivered.items() if step < world.step}
    stopped = {i: (stop.step, stop.tokens, stop.reason) for i, stop in world.stopped.items()}
    return stopped, world.cuts, delivered, world.step, world.selection


# --- delivering -------------------------------------------------------------


@given(cases(WITH_THE_END_OF_THE_ENGINE, max_spare=6, cut=True))
def test_what_is_delivered_stays_in_the_group(case: Case) -> None:
    world = replace(case, early=True).world().run()
    assert world.selection is None or world.delivered.keys() <= world.selection.keys()


@given(cases(WITH_THE_END_OF_THE_ENGINE, max_spare=6, cut=True))
def test_nothing_is_delivered_early_unless_asked_for(case: Case) -> None:
    assert not replace(case, early=False).world().run().delivered


# --- ending -----------------------------------------------------------------


@thoroughly
@given(cases(WITH_THE_END_OF_THE_ENGINE, max_spare=6), st.booleans())
def test_every_group_ends_and_every_candidate_ends_once(case: Case, cut: bool) -> None:
    world = replace(case, limits={1: 6, 4: 3} if cut else {}).world().run()
    assert_ended_well(case, world)
    event(str(world.group.outcome))


def assert_ended_well(case: Case, world: World) -> None:
    group = world.group
    assert len(group.candidates) == len(world.runs) <= case.candidates + case.spare
    assert not world.known
    assert not group.alarms
    assert (world.selection is None) != (world.gave_up is None)
    for candidate in group.candidates:
        assert not candidate.running
        assert (candidate.state is State.SELECTED) == (candidate.end is not None) == (candidate.reason is None)
        assert candidate.state in (State.SELECTED, State.DISCARDED)
        assert (candidate.reason is StopReason.FAILED) == (candidate.index in world.failed)
        if candidate.index in world.stopped:
            assert candidate.reason is world.stopped[candidate.index].reason
    if world.selection is not None:
        assert_completed(case, world)
    else:
        assert_given_up(case, world)


def assert_completed(case: Case, world: World) -> None:
    assert world.selection is not None
    assert world.group.outcome is Outcome.COMPLETED
    assert len(world.selection) == case.rule.size
    assert list(world.selection) == sorted(world.selection)
    assert world.selection == {c.index: c.end for c in world.group.candidates if c.end is not None}
    for i in world.selection:
        candidate = world.group.candidates[i]
        assert Fate(candidate.tokens, candidate.valid, candidate.draw) == world.finished[i]
        assert candidate.cut == (i in world.cuts)


def assert_given_up(case: Case, world: World) -> None:
    assert world.group.outcome is Outcome.FAILED
    left = len(world.runs) - len(world.gone)
    unused = case.candidates + case.spare - len(world.runs)
    assert case.rule.size - left > unused or world.broken
    assert case.rule.size > left


@given(cases(WITH_FAILURES, max_spare=6, cut=True), st.integers(0, 12))
def test_a_cancelled_group_stops_everything_and_hears_nothing_more(case: Case, moment: int) -> None:
    world = case.world()
    for passed, _ in enumerate(world.moments()):
        if passed == moment:
            break
    assume(world.group.outcome is None)
    running = set(world.known)
    stopped = set(world.stopped)
    failed = set(world.failed)
    world.act(world.group.cancel())
    assert world.stopped.keys() - stopped == running
    assert not world.known
    reasons = {c.index: c.reason for c in world.group.candidates}
    assert all(reasons[i] is StopReason.CANCELLED for i in reasons.keys() - stopped - failed)
    assert_late_words_change_nothing(world, sorted(running))


def assert_late_words_change_nothing(world: World, running: list[int]) -> None:
    before = [repr(c) for c in world.group.candidates]
    outcome = world.group.outcome
    for i in running:
        started = [Started(i)] if not world.runs[i].started else []
        for word in (Finished(i, 3, FinishReason.STOP), Lost(i), Failed(i, RuntimeError(), retryable=False)):
            assert world.group.handle(*started, Progress(i, 2), Scored(i, 0.5), word) == []
    assert world.group.handle(LimitSet(1)) == []
    assert world.group.cancel() == []
    assert [repr(c) for c in world.group.candidates] == before
    assert world.group.outcome is outcome
    assert not world.group.alarms


# --- cutting ----------------------------------------------------------------


@given(cases(WITHOUT_FAILURES, of=SAMPLED_TAILS, cut=True))
def test_a_cut_changes_where_the_tail_ends_and_not_who_is_in_the_group(case: Case) -> None:
    world = case.world().run()
    whole = chosen(case.rule, world.fates())
    assert not any(whole[i] is End.SHORT for i in world.cuts)
    assert world.selection == {i: End.LONG if i in world.cuts else end for i, end in whole.items()}
    event("cut" if world.cuts else "not cut")


@thoroughly
@given(cases(WITH_FAILURES, of=SAMPLED_TAILS, cut=True, max_spare=6))
def test_a_cut_candidate_is_in_the_tail_with_exactly_its_limit(case: Case) -> None:
    world = case.world().run()
    for i, tokens in world.cuts.items() if world.selection is not None else ():
        candidate = world.group.candidates[i]
        assert candidate.cut
        assert (candidate.end, candidate.tokens, candidate.finish_reason) == (End.LONG, tokens, FinishReason.LENGTH)
    if world.selection is not None:
        assert world.selection == chosen_of_those_that_remain(case, world)


@given(cases(WITH_FAILURES, of=WITHOUT_TAIL | LONGEST_TAILS, max_spare=6, cut=True))
def test_only_a_sampled_tail_is_cut(case: Case) -> None:
    assert not case.world().run().cuts
