import pytest

from darts_server.observers import GroupObserver, GroupObservers


class Counting(GroupObserver):
    def __init__(self) -> None:
        self.started = 0

    def candidates_started(self, count: int) -> None:
        self.started += count


class Failing(GroupObserver):
    def candidates_started(self, count: int) -> None:
        raise OverflowError("too large")


def test_an_observer_that_fails_is_logged_once_and_counted_and_the_others_are_notified(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before, after = Counting(), Counting()
    observers = GroupObservers([before, Failing()])
    observers.add(after)
    for _ in range(5):
        observers.candidates_started(3)
    assert before.started == after.started == 15
    assert observers.failures == 5
    assert caplog.text.count("Failing failed") == 1
    assert "OverflowError: too large" in caplog.text
