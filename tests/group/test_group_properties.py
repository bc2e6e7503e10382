"""Properties of every group, in worlds that try everything an engine can do, against brute force."""

from dataclasses import replace

from hypothesis import assume, event, example, given
from hypothesis import strategies as st

from darts_server.group.candidate import State
from darts_server.group.events import DeadlineSet, Failed, Finished, Lost, Progress, Scored, Started
from darts_server.group.sampled_tail import CutTail, SampledTail
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs
from tests.group.cases import (
    CUT_TAILS,
    RULES,
    WITH_DEADLINE,
    WITH_FAILURES,
    WITH_THE_END_OF_THE_ENGINE,
    WITHOUT_DEADLINE,
    WITHOUT_FAILURES,
    cases,
    thoroughly,
)
from tests.group.oracle import Fate, Fates, chosen, cut_lengths, deadline, has_cut_length, possible
from tests.group.world import Case, Ending, Peek, Truth, World

DECIDED_BY_THE_BOUND = Case(
    CutTail(1, 1), 3, [Truth(1), Truth(1, delay=2), Truth(2)], early=True, seed=0, order=0, limits={0: 1}, slack=0
)
DELIVERED_BEFORE_THE_DEADLINE = Case(
    CutTail(1, 1),
    7,
    [Truth(2), Truth(4), Truth(2, delay=2), Truth(4), Truth(1), Truth(1, Ending.FAILED), Truth(5), Truth(1)],
    early=True,
    seed=1,
    order=130,
    peek=Peek.NOW_AND_THEN,
    replacements=4,
    limits={3: 1},
)


def is_small(case: Case) -> bool:
    """Whether all futures can be tried."""
    return max(case.candidates, len(case.additions)) <= 5


# --- the selection ----------------------------------------------------------


@thoroughly
@given(cases(WITHOUT_FAILURES))
def test_the_rule_selects_from_the_true_lengths(case: Case) -> None:
    world = case.world().run()
    assert world.selection == chosen(case.rule, world.fates())
    assert_ended_well(case, world)


@thoroughly
@given(cases(WITHOUT_FAILURES, of=WITH_DEADLINE, surplus=2, cut=True))
def test_with_a_deadline_the_rule_selects_from_the_true_lengths(case: Case) -> None:
    world = case.world().run()
    assert_exact(case, world, world.fates())
    assert_ended_well(case, world)
    event("cut" if world.cuts else "not cut")
    event("pruned" if any(s.reason is DiscardReason.TAIL_PRUNED for s in world.stopped.values()) else "not pruned")


@given(cases(WITHOUT_FAILURES, of=WITHOUT_DEADLINE), cases(WITHOUT_FAILURES, most=12))
def test_the_group_does_not_depend_on_timing(case: Case, other: Case) -> None:
    assert case.world().run().selection == at_another_time(case, other).world().run().selection


@thoroughly
@given(cases(WITHOUT_FAILURES, of=WITH_DEADLINE, surplus=2), cases(WITHOUT_FAILURES, most=12), st.integers(1, 4))
def test_with_a_deadline_set_at_the_start_the_group_does_not_depend_on_timing(
    case: Case, other: Case, limit: int
) -> None:
    case = replace(case, limits={0: limit})
    here = case.world().run()
    there = at_another_time(case, other).world().run()
    assert (here.selection, here.cuts) == (there.selection, there.cuts)
    event("cut" if here.cuts else "not cut")


def at_another_time(case: Case, other: Case) -> Case:
    """Return the same truths, started, run and reported as in ``other``."""
    truths = zip(case.truths, [*other.truths, *case.truths], strict=False)
    return replace(
        case,
        truths=[replace(ours, delay=theirs.delay, speed=theirs.speed) for ours, theirs in truths],
        order=other.order,
        peek=other.peek,
        at_once=other.early,
        early=other.early,
        additions=other.additions[: case.candidates],
        opening=other.opening,
    )


@thoroughly
@given(cases(WITH_FAILURES, max_replacements=6, most=6, cut=True))
def test_with_failures_the_rule_selects_from_the_remaining_candidates(case: Case) -> None:
    world = case.world().run()
    if world.selection is not None:
        assert_exact(case, world, {i: fate for i, fate in world.fates().items() if i not in world.gone})
    restarted = len(world.runs) > world.in_all
    event("restarted" if restarted else "not restarted")
    event("delivered and restarted" if world.delivered and restarted else "not so")
    event("cut" if world.cuts else "not cut")


def assert_exact(case: Case, world: World, fates: Fates) -> None:
    """Assert that the group is the rule's choice, where a cut candidate counts as truncated."""
    group = chosen(case.rule, fates, world.limit)
    cuts = {
        i: end
        for i, end in cut_lengths(case.rule, fates, world.limit, world.cut_length).items()
        if i not in world.whole
    }
    at_cut_length = dict.fromkeys(world.cuts.keys() - cuts.keys(), world.cut_length)
    assert world.cuts == cuts | at_cut_length
    assert all(case.truths[i].length > end for i, end in world.cuts.items())
    selected_as = SelectedAs.LONG if isinstance(case.rule, CutTail) else SelectedAs.FILL
    assert world.selection == group | {i: selected_as for i in world.cuts if i in group}


# --- stopping ---------------------------------------------------------------


@thoroughly
@given(cases(WITHOUT_FAILURES, of=WITHOUT_DEADLINE, most=5, max_length=5).filter(is_small))
def test_a_candidate_is_stopped_when_no_future_selects_it_and_not_before(case: Case) -> None:
    world = case.world()
    for _ in world.moments():
        if world.group.is_open:
            some, _ = outlook(case, world)
            assert world.known.keys() == some & (world.known.keys() | world.stopped.keys())


@thoroughly
@given(cases(WITHOUT_FAILURES, of=WITH_DEADLINE, most=5, max_length=5, cut=True).filter(is_small))
def test_with_a_deadline_no_candidate_is_stopped_that_some_future_selects(case: Case) -> None:
    world = case.world()
    for _ in world.moments():
        some, _ = outlook(case, world)
        assert not world.stopped.keys() & some
    event("stopped" if world.stopped else "not stopped")


@given(cases([Ending.STOP], most=5, max_length=5).filter(is_small))
def test_a_trajectory_is_delivered_when_every_future_selects_it_and_not_before(case: Case) -> None:
    """With a sampled tail some trajectories are delivered later, and never earlier."""
    world = replace(case, early=True, peek=Peek.EVERYTHING).world()
    for _ in world.moments():
        if world.selection is None and world.group.is_open:
            _, every = outlook(case, world)
            assert world.delivered.keys() <= every
            late = isinstance(case.rule, SampledTail | CutTail)
            assert late or world.delivered.keys() == every & world.finished.keys()


def outlook(case: Case, world: World) -> tuple[frozenset[int], frozenset[int]]:
    tokens = world.known | {i: stopped.known for i, stopped in world.stopped.items()}
    running = ((i, known, world.draw(i)) for i, known in sorted(tokens.items()))
    ended = ((i, fate) for i, fate in sorted(world.finished.items(), key=lambda f: f[0]))
    return possible(case.rule, tuple(ended), tuple(running), world.limit, world.cut_length)


@thoroughly
@given(cases(WITH_THE_END_OF_THE_ENGINE, of=RULES, max_replacements=3), st.booleans())
def test_reports_only_at_the_checks_give_the_same_decisions(case: Case, cut: bool) -> None:
    case = replace(case, at_once=True, limits={2: 4} if cut else {})
    checked = replace(case, peek=Peek.CHECKS).world().run()
    all_reported = replace(case, peek=Peek.EVERYTHING).world().run()
    assert sights(checked) == sights(all_reported)


def sights(world: World) -> object:
    """Leave out deliveries of the last step: whether they precede completion depends on how events are split up."""
    delivered = {i: step for i, step in world.delivered.items() if step < world.step}
    stopped = {i: (stop.step, stop.tokens, stop.reason) for i, stop in world.stopped.items()}
    return stopped, world.cuts, delivered, world.step, world.selection


# --- delivering -------------------------------------------------------------


@given(cases(WITH_THE_END_OF_THE_ENGINE, max_replacements=6, cut=True))
def test_delivered_trajectories_stay_in_the_group(case: Case) -> None:
    world = replace(case, early=True).world().run()
    assert world.selection is None or world.delivered.keys() <= world.selection.keys()


@given(cases(WITH_THE_END_OF_THE_ENGINE, max_replacements=6, cut=True))
def test_nothing_is_delivered_early_unless_requested(case: Case) -> None:
    assert not replace(case, early=False).world().run().delivered


# --- ending -----------------------------------------------------------------


@thoroughly
@given(cases(WITH_THE_END_OF_THE_ENGINE, max_replacements=6), st.booleans())
def test_every_group_ends_and_every_candidate_ends_once(case: Case, cut: bool) -> None:
    world = replace(case, limits={1: 6} if cut else {}).world().run()
    assert_ended_well(case, world)
    event(str(world.group.outcome))


def assert_ended_well(case: Case, world: World) -> None:
    group = world.group
    assert len(group.candidates) == len(world.runs) <= world.in_all + case.replacements
    assert not world.known
    assert not group.check_at
    assert (world.selection is None) != (world.gave_up is None)
    for candidate in group.candidates:
        assert not candidate.is_running
        assert (candidate.state is State.SELECTED) == (candidate.selected_as is not None) == (candidate.reason is None)
        assert candidate.state in (State.SELECTED, State.DISCARDED)
        assert (candidate.reason is DiscardReason.FAILED) == (candidate.index in world.failed)
        if candidate.index in world.stopped:
            assert candidate.reason is world.stopped[candidate.index].reason
    if world.selection is not None:
        assert_completed(case, world)
    else:
        assert_given_up(case, world)
        assert_delivered_stay(case, world)


def assert_completed(case: Case, world: World) -> None:
    assert world.selection is not None
    assert world.group.outcome is Outcome.COMPLETED
    assert len(world.selection) == case.rule.size
    assert list(world.selection) == sorted(world.selection)
    assert world.selection == {c.index: c.selected_as for c in world.group.candidates if c.selected_as is not None}
    for i in world.selection:
        candidate = world.group.candidates[i]
        assert Fate(candidate.tokens, candidate.is_valid, candidate.tail_draw) == world.finished[i]
        assert candidate.cut == (i in world.cuts)


def assert_given_up(case: Case, world: World) -> None:
    assert world.group.outcome is Outcome.FAILED
    left = len(world.runs) - len(world.gone)
    unused = world.in_all + case.replacements - len(world.runs)
    if world.group.is_open:
        assert case.rule.size - left > unused or world.broken
        assert case.rule.size > left
    else:
        assert world.broken


def assert_delivered_stay(case: Case, world: World) -> None:
    """Assert that delivered trajectories of an incomplete group are selected as among the finished candidates."""
    ends = chosen(case.rule, world.finished, world.limit) | dict.fromkeys(world.cuts, SelectedAs.LONG)
    selected = {c.index: c.selected_as for c in world.group.candidates if c.state is State.SELECTED}
    assert selected == {i: ends[i] for i in world.delivered}


@given(cases(WITH_FAILURES, max_replacements=6, cut=True), st.integers(0, 12))
def test_a_cancelled_group_stops_everything_and_ignores_events(case: Case, moment: int) -> None:
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
    for i in reasons.keys() - stopped - failed:
        assert reasons[i] is (None if i in world.delivered else DiscardReason.CANCELLED)
    assert_delivered_stay(case, world)
    assert_late_events_change_nothing(world, sorted(running))


def assert_late_events_change_nothing(world: World, running: list[int]) -> None:
    before = [repr(c) for c in world.group.candidates]
    outcome = world.group.outcome
    for i in running:
        started = [Started(i)] if not world.runs[i].started else []
        for word in (Finished(i, 3, FinishReason.STOP), Lost(i), Failed(i, RuntimeError(), retryable=False)):
            assert world.group.handle(*started, Progress(i, 2), Scored(i, 0.5), word) == []
    assert world.group.handle(DeadlineSet(1)) == []
    assert world.group.cancel() == []
    assert [repr(c) for c in world.group.candidates] == before
    assert world.group.outcome is outcome
    assert not world.group.check_at


# --- limits -----------------------------------------------------------------


@thoroughly
@given(cases(WITH_FAILURES, of=CUT_TAILS, cut=True, max_replacements=6))
@example(DECIDED_BY_THE_BOUND)
@example(DELIVERED_BEFORE_THE_DEADLINE)
def test_a_cut_candidate_is_in_the_tail_with_its_first_tokens(case: Case) -> None:
    world = case.world().run()
    for i, tokens in world.cuts.items() if world.selection is not None else ():
        candidate = world.group.candidates[i]
        assert candidate.cut
        assert (candidate.tokens, candidate.finish_reason) == (tokens, FinishReason.LENGTH)
        if tokens != world.cut_length:
            assert candidate.selected_as is SelectedAs.LONG
        else:
            # It was cut at the cut length before it was known to be in the group.
            assert candidate.selected_as is SelectedAs.LONG or candidate.reason is DiscardReason.TRUNCATED


@thoroughly
@given(cases(WITH_FAILURES, of=WITH_DEADLINE, max_replacements=6), st.integers(1, 6), st.integers(0, 4))
def test_no_candidate_runs_beyond_the_cut_length(case: Case, limit: int, slack: int) -> None:
    assume(has_cut_length(case.rule))
    world = replace(case, peek=Peek.CHECKS, limits={0: limit}, slack=slack).world().run()
    for i, run in enumerate(world.runs):
        # Nothing is decided before the group is open.
        most = max(limit + slack + run.truth.speed - 1, world.at_opening.get(i, 0))
        assert run.tokens <= most or run.born == world.step
        candidate = world.group.candidates[i]
        assert candidate.tokens <= limit + slack or candidate.selected_as is None or i in world.finished_before
    everyone = [c for c in world.group.candidates if c.selected_as is not None]
    event("all truncated" if everyone and not any(c.is_valid for c in everyone) else "some valid")


@given(cases(WITH_FAILURES, of=WITHOUT_DEADLINE, max_replacements=6), st.integers(0, 20), st.integers(1, 8))
def test_a_deadline_does_not_affect_a_rule_without_deadlines(case: Case, moment: int, limit: int) -> None:
    world = case.world()
    for passed, _ in enumerate(world.moments()):
        if passed == moment:
            world.report(DeadlineSet(limit))
    assert sights(world) == sights(case.world().run())


@given(
    cases(WITH_FAILURES, of=WITH_DEADLINE, max_replacements=6),
    st.integers(1, 8),
    st.lists(st.integers(1, 8), max_size=3),
)
def test_only_the_first_deadline_counts(case: Case, first: int, others: list[int]) -> None:
    world = case.world()
    same = case.world()
    for limit in (first, *others):
        world.report(DeadlineSet(limit))
    same.report(DeadlineSet(first))
    assert sights(world.run()) == sights(same.run())


@given(cases(WITH_THE_END_OF_THE_ENGINE, max_replacements=3, cut=True))
def test_the_completion_length_is_the_length_at_the_completion_place(case: Case) -> None:
    world = case.world()
    for _ in world.moments():
        if world.group.is_open:
            place = case.rule.completion_place
            assert world.group.selector.nth_shortest_length(place) == deadline(world.finished, place, 0)
