"""Deadlines from the groups before: for groups that come one at a time, and for cohorts without one of their own."""

import pytest

from darts_server.policy.deadline import MIN_GROUPS, Deadline
from darts_server.policy.recent_lengths import WINDOW, RecentCompletionLengths

RULE = Deadline()


def test_recent_groups_stand_in_for_a_cohort_once_there_are_enough() -> None:
    needs = RecentCompletionLengths()
    for tokens in range(1, MIN_GROUPS):
        needs.add(tokens)
    assert needs.deadline(Deadline()) is None
    needs.add(MIN_GROUPS)
    assert needs.deadline(Deadline(quantile=1.0)) == MIN_GROUPS
    for _ in range(WINDOW):
        needs.add(7)
    assert needs.deadline(Deadline(quantile=1.0)) == 7, "older ones are forgotten"
    assert RecentCompletionLengths(needs.state).deadline(Deadline()) == 7


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ([10] * 8 + [40] * 8 + [0], 40),
        ([10] * 6 + [0] * 2, 10),
        ([10] * 6 + [0] * 3, None),
        ([10] * 12 + [0] * 8, 20),
        ([10] * 12 + [0] * 30, 40),
        ([0] * 50 + [10] * 7, None),
    ],
)
def test_groups_that_were_cut_count_as_longer_and_if_many_were_the_deadline_is_later(
    lengths: list[int], tokens: int | None
) -> None:
    assert RecentCompletionLengths(lengths).deadline(RULE) == tokens


def test_if_hardly_any_group_is_complete_before_its_bound_all_show_their_lengths_again() -> None:
    recent = RecentCompletionLengths([10] * WINDOW)
    bounds = []
    while (tokens := recent.deadline(RULE)) is not None:
        bounds.append(RULE.bound_of(tokens))
        recent.add(0)
    assert bounds == sorted(bounds)
    assert bounds[-1] == 80
    assert len(bounds) == WINDOW - MIN_GROUPS + 1


def test_what_groups_needed_is_known_without_those_that_were_cut() -> None:
    assert RecentCompletionLengths([10] * 8 + [40] * 8 + [0] * 50).quantile(Deadline(stretch=2.0)) == 40
    assert RecentCompletionLengths([10] * 7 + [0] * 50).quantile(RULE) is None
