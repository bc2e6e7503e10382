import pytest

from darts_client import ConnectionFailed, TimedOut
from darts_client._health import HEALTH_SECONDS, POLL_SECONDS, Deadline


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_probe_takes_no_longer_than_is_left_but_long_enough_to_succeed() -> None:
    clock = Clock()
    deadline = Deadline(60, clock)
    assert deadline.probe_seconds() == HEALTH_SECONDS
    clock.now += 58
    assert deadline.probe_seconds() == 2
    clock.now += 2
    assert deadline.probe_seconds() == POLL_SECONDS


def test_the_last_delay_ends_at_the_deadline() -> None:
    clock = Clock()
    deadline = Deadline(10, clock)
    assert deadline.delay_after(TimedOut("slow")) == POLL_SECONDS
    clock.now += 9.75
    assert deadline.delay_after(TimedOut("slow")) == 0.25


def test_after_the_deadline_the_last_error_is_the_cause() -> None:
    clock = Clock()
    deadline = Deadline(10, clock)
    clock.now += 10
    refused = ConnectionFailed("refused")
    with pytest.raises(TimedOut, match=r"not healthy after 10 s, last answer: refused") as caught:
        deadline.delay_after(refused)
    assert caught.value.__cause__ is refused
