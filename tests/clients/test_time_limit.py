import pytest

from darts_client import TimedOut
from darts_client._time_limit import TimeLimit

from .test_health import Clock


def test_without_a_limit_any_time_is_left() -> None:
    clock = Clock()
    limit = TimeLimit(None, clock)
    clock.now += 1e9
    limit.check()
    assert limit.at_most(60) == 60


def test_what_is_left_bounds_every_wait_and_its_end_is_an_error() -> None:
    clock = Clock()
    limit = TimeLimit(10, clock)
    assert limit.at_most(60) == 10
    clock.now += 9
    limit.check()
    assert limit.at_most(60) == 1
    clock.now += 1
    assert 0 < limit.at_most(60) < 0.1
    with pytest.raises(TimedOut, match="after 10 s"):
        limit.check()
