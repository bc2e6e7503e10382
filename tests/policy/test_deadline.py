"""Deadlines of cohorts and of groups that come one at a time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.deadline import (
    MIN_GROUPS,
    WINDOW,
    CohortDeadline,
    Deadline,
    RecentCompletionLengths,
    place_of_need,
)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=80), st.floats(0.1, 1.0))
def test_the_deadline_is_the_quantile_of_the_lengths(needed: list[int], quantile: float) -> None:
    deadline = Deadline(quantile=quantile).from_lengths(needed, len(needed))
    enough = [n for n in needed if sum(m <= n for m in needed) >= math.ceil(quantile * len(needed) - 1e-9)]
    assert deadline == min(enough)


@given(st.lists(st.integers(1, 1000), max_size=64), st.integers(1, 64))
def test_unknown_lengths_count_as_longer(known: list[int], unknown: int) -> None:
    groups = len(known) + unknown
    deadline = Deadline().from_lengths(known, groups)
    assert deadline == (
        Deadline().from_lengths([*known, *[10**9] * unknown], groups) if len(known) >= 0.9 * groups else None
    )


def test_rounding_of_floats_does_not_raise_the_rank() -> None:
    assert Deadline(quantile=0.55).from_lengths(range(1, 101), 100) == 55


def test_the_deadline_is_multiplied_and_never_0() -> None:
    assert Deadline(factor=1.5).from_lengths([100] * 10, 10) == 150
    assert Deadline().from_lengths([0] * 10, 10) == 1
    assert Deadline().from_lengths([], 0) is None


# --- a cohort ----------------------------------------------------------------


def test_a_given_deadline_is_known_from_the_start_and_stays() -> None:
    cohort = CohortDeadline(None, 10, tokens=70)
    assert cohort.tokens == 70
    for group in range(10):
        cohort.report_need(group, 10)
    assert [cohort.tokens, cohort.pending_cut_length] == [70, None]


def test_groups_that_can_only_be_longer_than_the_cut_length_do_not_count() -> None:
    cohort = CohortDeadline(Deadline(), 10)
    for group in range(8):
        cohort.report_need(group, 20)
    assert cohort.pending_cut_length == 40
    cohort.report_minimum(8, 41)
    assert cohort.tokens is None
    cohort.report_minimum(9, None)
    assert cohort.tokens == 20


def test_earlier_groups_set_the_deadline_of_a_cohort_without_needs() -> None:
    cohort = CohortDeadline(Deadline(recent=20), 10)
    assert cohort.pending_cut_length == 160
    for group in range(10):
        assert cohort.tokens is None
        cohort.report_minimum(group, 161 if group % 2 else None)
    assert [cohort.tokens, cohort.pending_cut_length] == [80, None]


def test_a_removed_group_counts_only_if_it_has_reported_its_need() -> None:
    cohort = CohortDeadline(Deadline(), 10)
    for group in range(8):
        cohort.report_need(group, 20)
    cohort.remove(0)
    assert cohort.tokens is None
    cohort.remove(8)
    assert cohort.tokens is None
    cohort.remove(9)
    assert cohort.tokens == 20


def test_an_added_group_counts_like_the_others() -> None:
    cohort = CohortDeadline(Deadline(), 10)
    for group in range(8):
        cohort.report_need(group, 20)
    cohort.add_group()
    cohort.report_need(8, 20)
    assert cohort.tokens is None, "9 of 11 groups are less than the quantile"
    cohort.report_need(9, 30)
    assert cohort.tokens == 30


@given(
    st.lists(
        st.tuples(st.sampled_from(["need", "minimum", "none", "remove"]), st.integers(0, 9), st.integers(1, 60)),
        max_size=60,
    ),
    st.sampled_from([0.3, 0.5, 0.75, 0.9, 1.0]),
    st.sampled_from([None, 4]),
)
def test_the_deadline_follows_from_the_reports(
    reports: list[tuple[str, int, int]], quantile: float, recent: int | None
) -> None:
    rule = Deadline(quantile, recent=recent)
    cohort = CohortDeadline(rule, 10)
    needs: list[int] = []
    # Minimums of the groups that still may report.
    minimums: dict[int, int | None] = dict.fromkeys(range(10), 0)
    reported: set[int] = set()
    for what, group, tokens in reports:
        if what == "need" and group in minimums:
            cohort.report_need(group, tokens)
            needs.append(tokens)
            reported.add(group)
            del minimums[group]
        elif what in ("minimum", "none") and group in minimums:
            minimums[group] = tokens if what == "minimum" else None
            cohort.report_minimum(group, minimums[group])
        elif what == "remove" and (group in minimums or group in reported):
            cohort.remove(group)
            minimums.pop(group, None)
        expected = rule.from_lengths(needs, len(needs) + len(minimums))
        others = None if expected is not None else rule.from_known_lengths(needs, len(minimums))
        cut_length = None if others is None else rule.cut_length_of(others)
        if cut_length is not None and all(minimum is None or minimum > cut_length for minimum in minimums.values()):
            expected = others
            cut_length = None
        assert [cohort.tokens, cohort.pending_cut_length] == [expected, cut_length]
        if expected is not None:
            return


def test_a_group_with_few_candidates_reports_the_same_share_of_them() -> None:
    assert [place_of_need(8, candidates, 12.0) for candidates in (8, 9, 12, 16)] == [6, 6, 8, 8]
    assert place_of_need(1, 1, 12.0) == 1


# --- recent lengths ----------------------------------------------------------


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
def test_cut_groups_count_as_longer_and_make_the_deadline_later_if_they_are_many(
    lengths: list[int], tokens: int | None
) -> None:
    assert RecentCompletionLengths(lengths).deadline(Deadline()) == tokens


def test_if_hardly_any_group_is_complete_before_its_cut_length_there_is_no_deadline() -> None:
    recent = RecentCompletionLengths([10] * WINDOW)
    cut_lengths = []
    while (tokens := recent.deadline(Deadline())) is not None:
        cut_lengths.append(Deadline().cut_length_of(tokens))
        recent.add(0)
    assert cut_lengths == sorted(cut_lengths)
    assert cut_lengths[-1] == 80
    assert len(cut_lengths) == WINDOW - MIN_GROUPS + 1


def test_the_quantile_leaves_out_cut_groups() -> None:
    assert RecentCompletionLengths([10] * 8 + [40] * 8 + [0] * 50).quantile(Deadline(factor=2.0)) == 40
    assert RecentCompletionLengths([10] * 7 + [0] * 50).quantile(Deadline()) is None
