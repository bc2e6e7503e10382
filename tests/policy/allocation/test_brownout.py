import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.allocation.brownout import Brownout, reduce_candidates, share_left

START, END = 100, 300
queues = st.lists(st.integers(0, 500), max_size=30)


def line(waiting: int, start: float = START) -> float:
    return min(max((END - (START - start) - waiting) / (END - START), 0), 1)


@given(queues)
def test_redundancy_is_full_while_no_more_than_start_wait(waiting: list[int]) -> None:
    brownout = Brownout(START, END)
    assert {brownout.update(min(each, START)) for each in waiting} <= {1.0}


@given(queues)
def test_the_scale_stays_between_its_falling_and_its_rising_line(waiting: list[int]) -> None:
    brownout = Brownout(START, END)
    for each in waiting:
        assert line(each, start=START / 2) <= brownout.update(each) <= line(each)


@given(queues)
def test_the_scale_changes_no_more_than_its_lines_require(waiting: list[int]) -> None:
    brownout = Brownout(START, END)
    for each in waiting:
        before = brownout.scale
        after = brownout.update(each)
        assert after in (before, line(each), line(each, start=START / 2))
        assert before == after or not line(each, start=START / 2) <= before <= line(each)


def test_redundancy_falls_linearly_and_is_full_again_when_half_of_start_wait() -> None:
    brownout = Brownout(START, END)
    assert [brownout.update(waiting) for waiting in (100, 200, 300, 900)] == [1, 0.5, 0, 0]
    assert [brownout.update(waiting) for waiting in (300, 250, 150, 50)] == [0, 0, 0.5, 1]


def test_small_changes_of_the_queue_do_not_make_the_scale_flicker() -> None:
    brownout = Brownout(START, END)
    assert {brownout.update(waiting) for waiting in (200, 190, 200, 160, 199)} == {0.5}


@pytest.mark.parametrize("end", [START, 50, 0])
def test_an_end_at_the_start_switches_brownout_off(end: int) -> None:
    brownout = Brownout(START, end)
    assert [brownout.update(waiting) for waiting in (0, 100, 10_000)] == [1, 1, 1]


@given(st.integers(1, 64), st.integers(0, 64), st.floats(0, 1))
def test_a_reduced_group_has_at_least_its_size_and_at_most_its_candidates(size: int, extra: int, scale: float) -> None:
    assert size <= reduce_candidates(size + extra, size, scale) <= size + extra


def test_full_half_and_no_redundancy() -> None:
    assert [reduce_candidates(12, 8, scale) for scale in (1.0, 0.5, 0.0)] == [12, 10, 8]


def test_brownout_starts_at_its_share_of_the_queue_but_not_below_the_capacity() -> None:
    assert [Brownout.for_queue(400, 50, 0.5).update(waiting) for waiting in (200, 300)] == [1, 0.5]
    assert [Brownout.for_queue(400, 200, 0.25).update(waiting) for waiting in (200, 300)] == [1, 0.5]
    assert Brownout.for_queue(400, 50, 1).update(10_000) == 1
    assert Brownout.for_queue(400, 500, 0).update(10_000) == 1


@pytest.mark.parametrize(
    ("capacity", "unfinished", "own", "share"),
    [
        (None, 1000, 0, 1.0),
        (100, 100, 10, 1.0),  # nothing queues
        (100, 300, 300, 1.0),  # only its own queue
        (100, 130, 100, 0.7),
        (100, 300, 200, 0.0),
        (100, 300, 50, 0.0),
        (100, 101, 102, 1.0),  # one of its own has just ended in the engine
    ],
)
def test_a_batch_has_the_share_of_the_engine_that_others_do_not_fill(
    capacity: int | None, unfinished: int, own: int, share: float
) -> None:
    assert share_left(capacity, unfinished, own) == pytest.approx(share)
