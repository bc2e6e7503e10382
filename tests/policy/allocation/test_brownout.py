import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.allocation.brownout import Brownout, reduce_candidates

START, END = 100, 300
queues = st.lists(st.integers(0, 500), max_size=30)


def line(waiting: int, start: float = START) -> float:
    return min(max((END - (START - start) - waiting) / (END - START), 0), 1)


@given(queues)
def test_it_does_nothing_while_no_more_than_the_start_wait(waiting: list[int]) -> None:
    brownout = Brownout(START, END)
    assert {brownout.update(min(each, START)) for each in waiting} <= {1.0}


@given(queues)
def test_the_scale_is_between_the_way_down_and_the_way_up(waiting: list[int]) -> None:
    brownout = Brownout(START, END)
    for each in waiting:
        assert line(each, start=START / 2) <= brownout.update(each) <= line(each)


@given(queues)
def test_it_changes_no_more_than_it_must(waiting: list[int]) -> None:
    brownout = Brownout(START, END)
    for each in waiting:
        before = brownout.scale
        after = brownout.update(each)
        assert after in (before, line(each), line(each, start=START / 2))
        assert before == after or not line(each, start=START / 2) <= before <= line(each)


def test_it_falls_in_a_straight_line_and_comes_back_when_half_of_the_start_wait() -> None:
    brownout = Brownout(START, END)
    assert [brownout.update(waiting) for waiting in (100, 200, 300, 900)] == [1, 0.5, 0, 0]
    assert [brownout.update(waiting) for waiting in (300, 250, 150, 50)] == [0, 0, 0.5, 1]


def test_a_queue_that_comes_and_goes_a_little_does_not_make_it_flicker() -> None:
    brownout = Brownout(START, END)
    assert {brownout.update(waiting) for waiting in (200, 190, 200, 160, 199)} == {0.5}


@pytest.mark.parametrize("end", [START, 50, 0])
def test_it_can_be_switched_off(end: int) -> None:
    brownout = Brownout(START, end)
    assert [brownout.update(waiting) for waiting in (0, 100, 10_000)] == [1, 1, 1]


@given(st.integers(1, 64), st.integers(0, 64), st.floats(0, 1))
def test_a_group_keeps_its_size_and_gets_no_more_than_it_had(size: int, extra: int, scale: float) -> None:
    assert size <= reduce_candidates(size + extra, size, scale) <= size + extra


def test_all_of_the_redundancy_half_of_it_and_none() -> None:
    assert [reduce_candidates(12, 8, scale) for scale in (1.0, 0.5, 0.0)] == [12, 10, 8]


def test_it_begins_at_its_share_of_the_queue_but_not_before_more_wait_than_run() -> None:
    assert [Brownout.for_queue(400, 50, 0.5).update(waiting) for waiting in (200, 300)] == [1, 0.5]
    assert [Brownout.for_queue(400, 200, 0.25).update(waiting) for waiting in (200, 300)] == [1, 0.5]
    assert Brownout.for_queue(400, 50, 1).update(10_000) == 1
    assert Brownout.for_queue(400, 500, 0).update(10_000) == 1
