"""What a named policy makes of one prompt."""

from dataclasses import replace

import pytest

from darts_server.exceptions import InvalidRequest
from darts_server.policy.deadline import Deadline
from darts_server.policy.selection.rules import SelectionRule, Shortest
from darts_server.policy.selection.tail_rules import CutTail, LongestTail, SampledTail
from darts_server.policy.shaping import BudgetKind, Shaping, Tail


@pytest.mark.parametrize(("redundancy", "size", "candidates"), [(1.0, 8, 8), (1.5, 8, 12), (1.5, 3, 5), (1.25, 1, 1)])
def test_redundancy_is_rounded_half_up_and_never_below_the_size(redundancy: float, size: int, candidates: int) -> None:
    assert Shaping(redundancy=redundancy).candidates(size) == candidates
    assert Shaping(redundancy=0.1).candidates(size) == size


@pytest.mark.parametrize(
    ("shaping", "rule"),
    [
        (Shaping(), SampledTail(7, 1)),
        (Shaping(num_longest=2, tail=Tail.LONGEST), LongestTail(6, 2)),
        (Shaping(num_longest=0, tail=Tail.LONGEST), Shortest(8)),
        (Shaping(num_shortest=5, num_longest=3), SampledTail(5, 3)),
        (Shaping(deadline=Deadline()), CutTail(7, 1)),
        (Shaping(deadline=Deadline(), num_longest=0), Shortest(8)),
    ],
)
def test_the_options_determine_the_rule(shaping: Shaping, rule: SelectionRule) -> None:
    assert shaping.selection_rule(8) == rule
    assert not shaping.is_saturated(8, 12)


ADAPTIVE = Shaping(adaptive=True, max_redundancy=2.0)


@pytest.mark.parametrize(
    ("shaping", "rule"),
    [
        (ADAPTIVE, Shortest(8)),
        (replace(ADAPTIVE, tail=Tail.LONGEST), Shortest(8)),
        (replace(ADAPTIVE, deadline=Deadline()), CutTail(7, 1)),
    ],
)
def test_a_saturated_prompt_keeps_the_shortest_alone_unless_there_is_a_deadline(
    shaping: Shaping, rule: SelectionRule
) -> None:
    assert shaping.is_saturated(8, 16)
    assert shaping.selection_rule(8, saturated=True) == rule


@pytest.mark.parametrize("candidates", [8, 15])
def test_other_prompts_of_an_adaptive_policy_keep_their_tail(candidates: int) -> None:
    assert not ADAPTIVE.is_saturated(8, candidates)
    assert ADAPTIVE.selection_rule(8) == SampledTail(7, 1)


def test_a_prompt_is_not_saturated_if_all_get_the_same_or_none_may_get_more_than_its_size() -> None:
    assert not Shaping(redundancy=2.0).is_saturated(8, 16)
    assert not replace(ADAPTIVE, max_redundancy=1.0).is_saturated(8, 8)


@pytest.mark.parametrize(("redundancy", "most"), [(2.0, 16), (1.5, 12), (1.7, 14), (0.5, 8)])
def test_a_prompt_gets_between_its_size_and_the_maximum_redundancy(redundancy: float, most: int) -> None:
    assert Shaping(adaptive=True, max_redundancy=redundancy).bounds(8) == (8, most)


def test_only_what_is_chosen_by_prompt_or_budget_is_bound_by_the_maximum_redundancy() -> None:
    fixed = Shaping(redundancy=3.0, max_redundancy=2.0)
    assert fixed.bounds(8) == (8, 24)
    assert replace(fixed, budget=BudgetKind.CV_LOG).bounds(8) == (8, 16)
    assert replace(fixed, adaptive=True).bounds(8) == (8, 16)


@pytest.mark.parametrize(
    ("shaping", "uses_cohort", "weighs_prompts"),
    [
        (Shaping(), False, False),
        (Shaping(adaptive=True), True, True),
        (Shaping(deadline=Deadline()), True, False),
        (Shaping(budget=BudgetKind.CV_LOG), True, True),
    ],
)
def test_policies_that_allocate_groups_together_use_cohorts(
    shaping: Shaping, uses_cohort: bool, weighs_prompts: bool
) -> None:
    assert shaping.uses_cohort is uses_cohort
    assert shaping.weighs_prompts is weighs_prompts


def test_a_size_other_than_shortest_plus_longest_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="needs n = 8, got 4"):
        Shaping(num_shortest=7, num_longest=1).selection_rule(4)


def test_a_tail_that_leaves_no_place_for_the_shortest_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="raise n, or lower --num-longest"):
        Shaping(num_longest=2).selection_rule(2)
