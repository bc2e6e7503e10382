"""The deadline that groups of a cohort determine together."""

from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.cohort_deadline import CohortDeadline, place_of_need
from darts_server.policy.deadline import Deadline


def test_the_deadline_is_known_with_the_group_of_the_quantiles_rank() -> None:
    cohort = CohortDeadline(Deadline(), 10)
    for group in range(8):
        cohort.report_need(group, 10 + group)
    assert cohort.tokens is None
    cohort.report_need(8, 30)
    assert cohort.tokens == 30
    cohort.report_need(9, 99)
    assert [cohort.tokens, cohort.waits_beyond] == [30, None]


def test_a_deadline_that_does_not_depend_on_lengths_is_known_from_the_start_and_stays() -> None:
    cohort = CohortDeadline(Deadline(tokens=50, stretch=1.5, ceiling=70), 10)
    assert cohort.tokens == 70
    for group in range(10):
        cohort.report_need(group, 10)
    assert [cohort.tokens, cohort.waits_beyond] == [70, None]


def test_groups_that_can_only_be_longer_than_the_bound_do_not_count() -> None:
    cohort = CohortDeadline(Deadline(), 10)
    for group in range(8):
        cohort.report_need(group, 20)
    assert cohort.waits_beyond == 40
    cohort.report_minimum(8, 41)
    assert cohort.tokens is None
    cohort.report_minimum(9, None)
    assert cohort.tokens == 20


def test_a_deadline_of_earlier_groups_bounds_a_cohort_in_which_no_group_has_a_need() -> None:
    cohort = CohortDeadline(Deadline(recent=20), 10)
    assert cohort.waits_beyond == 160
    for group in range(10):
        assert cohort.tokens is None
        cohort.report_minimum(group, 161 if group % 2 else None)
    assert [cohort.tokens, cohort.waits_beyond] == [80, None]


def test_the_more_groups_have_a_need_the_less_the_others_are_waited_for() -> None:
    cohort = CohortDeadline(Deadline(recent=20), 16)
    limits = []
    for group in range(12):
        limits.append(cohort.waits_beyond)
        cohort.report_need(group, 5)
    assert limits == [160] * 8 + [136, 96, 70, 52]
    assert cohort.waits_beyond == 10, "they are enough without earlier groups"


def test_a_group_that_ends_without_a_need_does_not_count_and_one_with_a_need_does() -> None:
    cohort = CohortDeadline(Deadline(), 10)
    for group in range(8):
        cohort.report_need(group, 20)
    cohort.remove(0)
    assert cohort.tokens is None
    cohort.remove(8)
    assert cohort.tokens is None
    cohort.remove(9)
    assert cohort.tokens == 20


def test_without_a_rule_the_deadline_is_what_was_known() -> None:
    cohort = CohortDeadline(None, 1, tokens=7)
    cohort.report_need("a", 100)
    assert cohort.tokens == 7


def test_a_rule_may_become_known_after_the_reports() -> None:
    cohort = CohortDeadline(None, 10)
    for group in range(8):
        cohort.report_need(group, 20)
    cohort.report_minimum(8, 50)
    assert [cohort.tokens, cohort.waits_beyond] == [None, None]
    cohort.set_rule(Deadline(stretch=2.0))
    assert [cohort.tokens, cohort.waits_beyond] == [None, 80]
    cohort.report_need(9, 30)
    assert cohort.tokens == 60
    fixed = CohortDeadline(None, 10)
    fixed.set_rule(Deadline(tokens=50))
    assert fixed.tokens == 50
    few = CohortDeadline(None, 2)
    few.set_rule(None, 70)
    few.report_need(0, 10)
    assert few.tokens == 70


def test_a_group_that_starts_again_counts_again_and_with_its_last_need() -> None:
    cohort = CohortDeadline(Deadline(), 10)
    for group in range(8):
        cohort.report_need(group, 20)
    cohort.remove(0)
    cohort.remove(8)
    cohort.add(0)
    cohort.add(8)
    cohort.report_minimum(0, None)
    cohort.report_minimum(9, None)
    assert cohort.tokens is None, "group 8 may be short"
    cohort.report_need(0, 30)
    cohort.report_need(8, 10)
    assert cohort.tokens == 30


@given(
    st.lists(
        st.tuples(st.sampled_from(["need", "minimum", "none", "remove", "add"]), st.integers(0, 9), st.integers(1, 60)),
        max_size=60,
    ),
    st.sampled_from([0.3, 0.5, 0.75, 0.9, 1.0]),
    st.sampled_from([None, 4]),
)
def test_what_is_known_follows_from_the_reports(
    reports: list[tuple[str, int, int]], quantile: float, recent: int | None
) -> None:
    rule = Deadline(quantile, recent=recent)
    cohort = CohortDeadline(rule, 10)
    needs: dict[int, int] = {}
    minimums: dict[int, int | None] = dict.fromkeys(range(10), 0)
    for what, group, tokens in reports:
        counts = group in needs or group in minimums
        if what == "need" and counts:
            cohort.report_need(group, tokens)
            needs[group] = tokens
            minimums.pop(group, None)
        elif what in ("minimum", "none") and counts:
            minimum = tokens if what == "minimum" else None
            cohort.report_minimum(group, minimum)
            minimums |= {} if group in needs else {group: minimum}
        elif what == "remove" and counts:
            cohort.remove(group)
            minimums.pop(group, None)
        elif what == "add" and not counts:
            cohort.add(group)
            minimums[group] = 0
        expected = rule.of_cohort(needs.values(), minimums.values())
        assert cohort.tokens == expected
        if expected is not None:
            assert cohort.waits_beyond is None
            return
        others = rule.without_others(needs.values(), len(minimums))
        assert cohort.waits_beyond == (None if others is None else rule.bound_of(others))


def test_a_group_with_few_candidates_reports_the_same_share_of_them() -> None:
    assert [place_of_need(8, candidates, 12.0) for candidates in (8, 9, 12, 16)] == [6, 6, 8, 8]
    assert place_of_need(1, 1, 12.0) == 1


def test_a_deadline_is_awaited_while_what_groups_report_may_determine_it() -> None:
    deadline = CohortDeadline(None, 10)
    assert not deadline.is_awaited
    deadline.set_rule(Deadline())
    assert deadline.is_awaited
    for group in range(10):
        deadline.report_need(group, 5)
    assert not deadline.is_awaited


def test_groups_that_have_reported_count_without_being_there() -> None:
    deadline = CohortDeadline(Deadline(), 10)
    deadline.report_need(1, 5)
    deadline.remove(1)
    deadline.remove(2)
    assert deadline.count_without([1, 3, 4]) == 7
