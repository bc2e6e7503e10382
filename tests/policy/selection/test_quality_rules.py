"""The rule that returns the M whose expected share of right ones is nearest the target."""

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from darts_server.policy.candidate import Candidate, State
from darts_server.policy.selection.quality_rules import AllSurvivors, Balanced
from darts_server.types import DiscardReason, FinishReason, SelectedAs
from tests.policy.cases import WITHOUT_FAILURES, cases
from tests.policy.scored import BALANCED, ScoredCase, scored


def ended(index: int, quality: float | None, tokens: int = 5, valid: bool = True) -> Candidate:
    reason = FinishReason.STOP if valid else FinishReason.LENGTH
    return Candidate(
        index,
        tail_draw=0.5,
        state=State.FINISHED,
        tokens=tokens,
        finish_reason=reason,
        finish_position=index,
        quality=quality,
    )


def running(index: int) -> Candidate:
    return Candidate(index, tail_draw=0.5, state=State.RUNNING, tokens=3)


def test_candidates_with_the_mean_nearest_the_target_are_selected_whatever_their_length() -> None:
    finished = [ended(0, 0.9, 1), ended(1, 0.8, 2), ended(2, 0.1, 90), ended(3, 0.9, 3)]
    assert Balanced(2, 0.5).select(finished) == {0: SelectedAs.BALANCED, 2: SelectedAs.BALANCED}
    assert Balanced(2, 1.0).select(finished) == {0: SelectedAs.BALANCED, 3: SelectedAs.BALANCED}


def test_of_equal_choices_the_earliest_are_selected_whatever_the_order_of_finishing() -> None:
    finished = [ended(3, 0.5), ended(1, 0.5), ended(2, 0.5)]
    assert Balanced(2, 0.5).select(finished) == {1: SelectedAs.BALANCED, 2: SelectedAs.BALANCED}


@pytest.mark.parametrize("unknown", [None, 0.75])
def test_an_unscored_candidate_counts_as_the_mean_of_the_others(unknown: float | None) -> None:
    finished = [ended(0, 1.0), ended(1, 0.5), ended(2, unknown)]
    assert Balanced(1, 0.75).select(finished) == {2: SelectedAs.BALANCED}


def test_without_any_score_the_earliest_are_selected() -> None:
    finished = [ended(0, None), ended(1, None), ended(2, None)]
    assert Balanced(2, 0.9).select(finished) == {0: SelectedAs.BALANCED, 1: SelectedAs.BALANCED}


def test_truncated_candidates_only_fill_up_shortest_first() -> None:
    truncated = [ended(0, 0.5, 9, valid=False), ended(1, 0.5, 8, valid=False)]
    assert Balanced(2, 0.5).select([*truncated, ended(2, 1.0), ended(3, 1.0)]).keys() == {2, 3}
    assert Balanced(2, 0.5).select([*truncated, ended(2, 1.0)]) == {2: SelectedAs.BALANCED, 1: SelectedAs.FILL}


def test_nothing_is_hopeless_and_needed_candidates_are_settled_at_once() -> None:
    rule = Balanced(2, 0.5)
    assert not rule.assess([running(2)], [ended(0, 0.5), ended(1, 0.5)], deliver_early=True).settled
    assert not rule.assess([running(2)], [ended(0, 0.5), ended(1, 0.5)], deliver_early=True).hopeless
    assert rule.assess([running(2)], [ended(0, 0.5)], deliver_early=True).settled == {0}
    assert rule.assess([running(2)], [ended(0, 0.5, valid=False)], deliver_early=True).settled == {0}
    both = [ended(0, 0.5), ended(1, 0.5, valid=False)]
    assert rule.assess([running(2)], both, deliver_early=True).settled == {0}
    assert rule.assess([], both, deliver_early=True).settled == {0, 1}


def test_candidates_not_selected_are_discarded_as_middle_or_truncated() -> None:
    assert Balanced(1, 0.5).discard_reason(ended(0, 0.5)) is DiscardReason.MIDDLE
    assert Balanced(1, 0.5).discard_reason(ended(0, 0.5, valid=False)) is DiscardReason.TRUNCATED
    assert Balanced(3, 0.5).num_shortest == 3


def test_all_survivors_are_selected_and_none_is_settled_before_the_last() -> None:
    finished = [ended(0, 0.5), ended(1, None), ended(2, 0.5, valid=False)]
    everyone = dict.fromkeys(range(3), SelectedAs.SURVIVOR)
    assert AllSurvivors(2).select(finished) == everyone
    assert AllSurvivors(2).assess([], finished, deliver_early=True).settled == everyone.keys()
    assert not AllSurvivors(2).assess([running(3)], finished, deliver_early=True).settled


@given(scored(cases(WITHOUT_FAILURES, of=BALANCED, max_length=6)), st.booleans())
def test_only_pruning_stops_candidates_and_delivered_ones_stay(case: ScoredCase, early: bool) -> None:
    world = case.world().run()
    assert world.stopped.keys() == world.pruned
    assert world.delivered.keys() <= (world.selection or {}).keys()
    event("delivered early" if any(step < world.step for step in world.delivered.values()) else "not early")
