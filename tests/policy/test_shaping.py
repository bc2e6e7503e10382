"""The rules and numbers of a shaping, and of the policies that have names."""

from dataclasses import replace
from typing import get_args

import pytest

from darts_server.exceptions import InvalidRequest
from darts_server.group.informative import Informative, Select
from darts_server.group.sampled_tail import CutTail, SampledTail
from darts_server.group.selection import AllSurvivors, DualEnd, InOrder, SampledSurvivors, SelectionRule
from darts_server.policy.allocation import cv_log_mean
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import BudgetKind, Shaping, Tail, build_policies
from darts_server.policy.survival import Pruning
from darts_server.settings.fields import Policy


@pytest.mark.parametrize(("redundancy", "size", "candidates"), [(1.0, 8, 8), (1.5, 8, 12), (1.5, 3, 5), (1.25, 1, 1)])
def test_redundancy_is_rounded_half_up_and_never_below_the_size(redundancy: float, size: int, candidates: int) -> None:
    assert Shaping(redundancy=redundancy).candidates(size) == candidates
    assert Shaping(redundancy=0.1).candidates(size) == size


@pytest.mark.parametrize(
    ("shaping", "rule"),
    [
        (Shaping(num_longest=2, tail=Tail.LONGEST), DualEnd(6, 2)),
        (Shaping(num_longest=0, tail=Tail.LONGEST), DualEnd(8)),
        (Shaping(num_longest=3), SampledTail(5, 3)),
        (Shaping(deadline=Deadline(), num_longest=0), DualEnd(8)),
        (Shaping(redundancy=1.0, max_redundancy=1.0, num_longest=0), InOrder(8)),
    ],
)
def test_the_options_determine_the_rule(shaping: Shaping, rule: SelectionRule) -> None:
    assert shaping.selection_rule(8) == rule
    assert not shaping.is_saturated(8, 12)


ADAPTIVE = Shaping(adaptive=True, max_redundancy=2.0)


def test_a_saturated_prompt_keeps_only_the_shortest_whatever_the_tail_of_other_prompts() -> None:
    assert replace(ADAPTIVE, tail=Tail.LONGEST).selection_rule(8, saturated=True) == DualEnd(8)


def test_a_prompt_is_saturated_with_the_maximum_of_an_adaptive_policy() -> None:
    assert [ADAPTIVE.is_saturated(8, candidates) for candidates in (8, 15, 16)] == [False, False, True]
    assert not Shaping(redundancy=2.0).is_saturated(8, 16)
    assert not replace(ADAPTIVE, max_redundancy=1.0).is_saturated(8, 8)


@pytest.mark.parametrize(("redundancy", "most"), [(2.0, 16), (1.5, 12), (1.7, 14), (0.5, 8)])
def test_a_prompt_gets_between_its_size_and_the_maximum_redundancy(redundancy: float, most: int) -> None:
    assert Shaping(adaptive=True, max_redundancy=redundancy).candidate_limits(8) == (8, most)


def test_a_policy_that_adapts_to_signal_allocates_as_an_adaptive_policy_without_saturated_prompts() -> None:
    shaping = Shaping(redundancy=1.3, max_redundancy=1.5, adapts_to_signal=True)
    assert shaping.uses_cohort
    assert shaping.candidate_limits(8) == (8, 12)
    assert shaping.mean_candidates(8, None, None) == pytest.approx(10.4)
    assert not shaping.is_saturated(8, 12)


def test_the_maximum_redundancy_limits_only_adaptive_policies_and_budgets() -> None:
    fixed = Shaping(redundancy=3.0, max_redundancy=2.0)
    assert fixed.candidate_limits(8) == (8, 24)
    assert replace(fixed, budget=BudgetKind.CV_LOG).candidate_limits(8) == (8, 16)
    assert replace(fixed, adaptive=True).candidate_limits(8) == (8, 16)


def test_the_mean_follows_the_formula_of_the_paper_once_the_spread_of_lengths_is_known() -> None:
    auto = Shaping(adaptive=True, budget=BudgetKind.CV_LOG)
    assert [auto.mean_candidates(3, None, None), auto.mean_candidates(3, 100.0, None)] == [4.5, 4.5]
    assert auto.mean_candidates(8, 75.0, 300.0) == cv_log_mean(75.0, 300.0, 8)
    assert replace(auto, max_redundancy=1.25).mean_candidates(8, 300.0, 300.0) == 10
    assert replace(auto, adaptive=False).mean_candidates(3, None, None) == 5, "a whole number where all get the same"
    assert Shaping(adaptive=True).mean_candidates(8, 300.0, 300.0) == 12


def test_groups_use_cohorts_if_they_depend_on_each_other() -> None:
    cohorts = (Shaping(adaptive=True), Shaping(deadline=Deadline()), Shaping(budget=BudgetKind.CV_LOG))
    assert [shaping.uses_cohort for shaping in (Shaping(), *cohorts)] == [False, True, True, True]


def test_a_tail_that_leaves_no_place_for_the_shortest_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="raise n, or lower --num-longest"):
        Shaping(num_longest=2).selection_rule(2)


# --- named policies ----------------------------------------------------------


BASE = Shaping(redundancy=1.5, max_redundancy=2.0)
POLICIES = build_policies(BASE, Deadline(), Pruning(), Shaping(redundancy=3.0, select=Select.MAX_VARIANCE))


def test_each_policy_of_the_settings_has_a_shaping() -> None:
    assert {*POLICIES, "off", "auto"} == set(get_args(Policy))
    assert {name for name in POLICIES if POLICIES[name].prunes} == {"arrol", "darts+arrol"}


def test_informative_selects_all_its_candidates_by_rewards() -> None:
    shaping = POLICIES["informative"]
    assert [name for name in POLICIES if POLICIES[name].needs_rewards] == ["informative"]
    assert (shaping.candidates(8), shaping.candidate_limits(8), shaping.uses_cohort) == (24, (8, 24), False)
    rule = replace(shaping, advantage_std=True).selection_rule(8)
    assert rule == Informative(8, select=Select.MAX_VARIANCE, by_std=True)
    assert "informative" not in build_policies(BASE, Deadline())
    assert build_policies(BASE, Deadline(), informative=shaping)["informative"] is shaping


def test_without_pruning_no_policy_prunes() -> None:
    plain = {name: made for name, made in POLICIES.items() if not (made.prunes or made.needs_rewards)}
    assert build_policies(BASE, Deadline()) == plain


@pytest.mark.parametrize(
    ("name", "rule", "saturated"),
    [
        ("uniform", SampledTail(7, 1), SampledTail(7, 1)),
        ("darts", SampledTail(7, 1), DualEnd(8)),
        ("darts_cut", CutTail(7, 1), CutTail(7, 1)),
        ("cap", CutTail(6, 2, 6), CutTail(6, 2, 6)),
        ("arrol", SampledSurvivors(8), SampledSurvivors(8)),
        ("darts+arrol", SampledTail(7, 1), DualEnd(8)),
    ],
)
def test_the_names_stand_for_rules(name: str, rule: object, saturated: object) -> None:
    assert POLICIES[name].selection_rule(8) == rule
    assert POLICIES[name].selection_rule(8, POLICIES[name].is_saturated(8, 16)) == saturated


@pytest.mark.parametrize(
    ("keep_ratio", "size", "candidates"), [(0.5, 8, 16), (0.25, 8, 32), (0.75, 8, 11), (0.3, 3, 10)]
)
def test_arrol_starts_enough_candidates_to_keep_its_size_after_pruning(
    keep_ratio: float, size: int, candidates: int
) -> None:
    arrol = build_policies(BASE, Deadline(), Pruning(keep_ratio=keep_ratio))["arrol"]
    assert arrol.candidates(size) == candidates
    assert not arrol.uses_cohort
    assert arrol.candidate_limits(size)[1] >= candidates


@pytest.mark.parametrize(("redundancy", "place"), [(1.0, 8), (1.25, 7), (1.5, 6), (1.6, 5), (2.0, 4), (16.0, 1)])
def test_cap_starts_as_many_candidates_as_it_returns_and_waits_for_a_share_of_them(
    redundancy: float, place: int
) -> None:
    cap = build_policies(replace(BASE, redundancy=redundancy, budget=BudgetKind.CV_LOG), Deadline())["cap"]
    assert cap.candidates(8) == cap.selection_rule(8).size == 8
    assert cap.selection_rule(8).completion_place == place
    assert (cap.uses_cohort, cap.adaptive, cap.budget) == (True, False, BudgetKind.FIXED)


def test_a_keep_ratio_of_one_scores_without_pruning() -> None:
    kept = build_policies(BASE, Deadline(), Pruning(keep_ratio=1.0))["arrol"]
    assert kept.selection_rule(8) == SampledSurvivors(8)
    assert kept.candidates(8) == 8


def test_a_group_without_a_candidate_to_prune_is_refused() -> None:
    sparing = Pruning(keep_ratio=0.9)
    policies = build_policies(replace(BASE, max_redundancy=1.0), Deadline(), sparing)
    with pytest.raises(InvalidRequest, match=r"n / keep_ratio = 4 / 0.9 comes to no more .* raise n") as arrol:
        policies["arrol"].selection_rule(4)
    with pytest.raises(InvalidRequest, match="raise --max-redundancy, which is 1") as both:
        policies["darts+arrol"].selection_rule(4)
    assert arrol.value.field == both.value.field == "n"
    assert policies["arrol"].selection_rule(8) == SampledSurvivors(8)


def test_only_arrol_returns_all_survivors_to_callers_that_take_groups_of_any_size() -> None:
    assert [name for name, shaping in POLICIES.items() if shaping.may_return_survivors] == ["arrol"]


def test_all_survivors_are_returned_under_either_policy() -> None:
    for name in ("arrol", "darts+arrol"):
        assert replace(POLICIES[name], return_survivors=True).selection_rule(8) == AllSurvivors(8)
