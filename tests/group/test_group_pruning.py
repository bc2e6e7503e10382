"""Groups with scored candidates: which candidates are pruned, and the selection of each rule."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from darts_server.group.events import (
    Decision,
    Deliver,
    Finished,
    Keep,
    Scored,
    Start,
    Started,
    Stop,
)
from darts_server.group.group import Group, count_sampling_pool, selection_weights
from darts_server.group.selection import DualEnd
from darts_server.types import DiscardReason, FinishReason
from tests.group.cases import (
    CUT_TAILS,
    RULES,
    SAMPLED_SURVIVORS,
    SURVIVORS,
    WITH_DEADLINE,
    WITH_FAILURES,
    WITH_THE_END_OF_THE_ENGINE,
    WITHOUT_DEADLINE,
    WITHOUT_FAILURES,
    cases,
    scored,
    thoroughly,
)
from tests.group.oracle import Fate, chosen
from tests.group.test_group_properties import assert_exact, assert_given_up
from tests.group.world import Case, Draws, World, running

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH

# --- properties -------------------------------------------------------------


@thoroughly
@given(scored(cases(WITHOUT_FAILURES, of=WITHOUT_DEADLINE | SAMPLED_SURVIVORS)))
def test_the_rule_selects_from_candidates_that_were_not_pruned(case: Case) -> None:
    world = case.world().run()
    assert world.selection == chosen(case.rule, left(world))
    assert len(world.selection or {}) == case.rule.size
    assert not world.pruned & (world.selection or {}).keys()
    event("pruned" if world.pruned else "none pruned")


@thoroughly
@given(scored(cases(WITHOUT_FAILURES, of=WITH_DEADLINE, surplus=2, cut=True)))
def test_with_a_deadline_the_rule_selects_from_candidates_that_were_not_pruned(case: Case) -> None:
    world = case.world().run()
    assert_exact(case, world, left(world))
    assert not world.pruned & (world.selection or {}).keys()
    event("pruned" if world.pruned else "none pruned")
    event("cut" if world.cuts else "not cut")


@given(scored(cases(WITH_FAILURES, of=SURVIVORS, max_replacements=6)))
def test_all_survivors_are_returned_and_one_candidate_is_always_left(case: Case) -> None:
    world = case.world().run()
    if world.selection is not None:
        survivors = set(range(len(world.runs))) - world.pruned - world.failed.keys()
        assert world.selection.keys() == survivors
        assert survivors
        assert world.stopped.keys() == world.pruned
    assert not world.delivered
    event("as many as its size, or more" if len(world.selection or {}) >= case.rule.size else "fewer")


@given(scored(cases(WITHOUT_FAILURES, of=SAMPLED_SURVIVORS)))
def test_a_sample_of_survivors_stops_only_pruned_candidates_and_has_their_weights(case: Case) -> None:
    world = case.world().run()
    assert world.stopped.keys() == world.pruned
    assert not world.delivered
    survivors = len(world.runs) - len(world.pruned)
    assert count_sampling_pool(world.group) == survivors
    for index, weight in selection_weights(world.group).items():
        assert weight == pytest.approx(survivors / case.rule.size / world.kept.get(index, 1.0), abs=1e-9)


def left(world: World) -> dict[int, Fate]:
    return {i: fate for i, fate in world.fates().items() if i not in world.gone}


@thoroughly
@given(
    scored(
        cases(WITH_THE_END_OF_THE_ENGINE, of=RULES | SAMPLED_SURVIVORS | CUT_TAILS, max_replacements=6, cut=True),
    )
)
def test_every_group_ends_with_exactly_its_size_and_every_candidate_ends_once(case: Case) -> None:
    world = case.world().run()
    assert not world.known
    for candidate in world.group.candidates:
        assert (candidate.selected_as is None) != (candidate.reason is None)
        assert (candidate.reason is DiscardReason.PRUNED) == (candidate.index in world.pruned)
        if candidate.index not in world.pruned:
            assert candidate.survival == pytest.approx(world.kept.get(candidate.index, 1.0))
    if world.selection is not None:
        assert len(world.selection) == case.rule.size
        assert world.delivered.keys() <= world.selection.keys()
        assert world.cuts.keys() <= world.selection.keys()
        assert not world.pruned & world.selection.keys()
    elif len(world.runs) <= world.in_all + case.replacements and not world.pruned:
        assert_given_up(case, world)
    event("refilled" if len(world.runs) > world.in_all + case.replacements else "not refilled")
    event(str(world.group.outcome))


@given(scored(cases(WITHOUT_FAILURES, of=WITHOUT_DEADLINE)), st.booleans())
def test_without_pruning_scores_do_not_change_the_group(case: Case, draws: bool) -> None:
    """Survival is 1 for all candidates, or there is no generator for it."""
    survivals = [[replace(score, survival=1.0) if draws else score for score in scores] for scores in case.scores]
    world = replace(case, scores=survivals, chances=0 if draws else None).world().run()
    unscored = replace(case, scores=(), chances=None).world().run()
    assert not world.pruned
    assert set(world.kept.values()) <= {1.0}
    assert world.selection == unscored.selection
    assert [c.tail_draw for c in world.group.candidates] == [c.tail_draw for c in unscored.group.candidates]


@given(
    st.lists(st.sampled_from([0.1, 0.4, 0.6, 0.9]), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(0, 1000),
    st.booleans(),
)
def test_scores_are_decided_in_their_order_and_pruning_leaves_the_size(
    survivals: list[float], size: int, seed: int, at_once: bool
) -> None:
    size = min(size, len(survivals))
    group = running(DualEnd(size), len(survivals), np.random.default_rng(seed))
    scores = [Scored(i, 0.5, p) for i, p in enumerate(survivals)]
    decisions = group.handle(*scores) if at_once else [d for score in scores for d in group.handle(score)]
    assert [d for d in decisions if not isinstance(d, Deliver)] == kept_or_pruned(survivals, size, seed)


def kept_or_pruned(survivals: list[float], size: int, seed: int) -> list[Decision]:
    """Decide about each candidate in turn. Pruning leaves ``size`` candidates, and the rest is kept for certain."""
    surplus = len(survivals) - size
    decisions = list[Decision]()
    for i, (survival, draw) in enumerate(
        zip(survivals, np.random.default_rng(seed).random(len(survivals)), strict=True)
    ):
        probability = survival if surplus else 1.0
        is_kept = draw < probability
        decisions.append(Keep(i, probability) if is_kept else Stop(i, DiscardReason.PRUNED))
        surplus -= not is_kept
    return decisions


# --- one by one -------------------------------------------------------------


def finish(group: Group, **lengths: int) -> list[Decision]:
    return group.handle(*(Finished(int(name[1:]), tokens, STOP) for name, tokens in lengths.items()))


def test_survival_multiplies_and_one_random_number_serves_all_scores() -> None:
    group = running(DualEnd(2), 3, Draws(0.3, 0.9, 0.9))
    assert group.handle(Scored(0, 0.5, 0.8)) == [Keep(0, 0.8)]
    assert group.handle(Scored(0, 0.5, 0.5)) == [Keep(0, 0.5)]
    assert group.candidates[0].survival == 0.4
    assert group.handle(Scored(0, 0.5, 0.7)) == [Stop(0, DiscardReason.PRUNED)]


def test_truncated_candidates_do_not_allow_to_prune_a_candidate_that_may_be_valid() -> None:
    group = running(DualEnd(2), 4, Draws(0.9, 0.9, 0.9, 0.9))
    group.handle(Finished(0, 9, LENGTH), Finished(1, 9, LENGTH))
    assert group.handle(Scored(2, 0.2, 0.5)) == [Keep(2, 1.0)]


def test_a_candidate_that_finished_with_its_score_is_not_pruned() -> None:
    group = running(DualEnd(2), 3, Draws(0.9, 0.9, 0.9))
    assert group.handle(Scored(0, 0.2, 0.0), Finished(0, 4, STOP)) == []
    assert (group.candidates[0].quality, group.candidates[0].survival) == (0.2, 1.0)


def test_scores_before_the_opening_are_decided_at_the_opening() -> None:
    group = Group(rng=np.random.default_rng(0), survival_rng=Draws(0.9, 0.9, 0.9))
    group.add_candidate()
    assert group.handle(Started(0), Scored(0, 0.2, 0.5)) == []
    assert group.open(DualEnd(1), 2) == [Start((1,)), Stop(0, DiscardReason.PRUNED)]
