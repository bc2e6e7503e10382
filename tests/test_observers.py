import pytest

from darts_server.observers import GroupEvents


def fail(_: int) -> None:
    raise OverflowError("too large")


def test_a_failing_function_is_counted_and_logged_once_and_other_functions_are_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before: list[int] = []
    after: list[int] = []
    events = GroupEvents()
    events.candidates_started.add(before.append, fail)
    events.candidates_started.add(after.append)
    for _ in range(5):
        events.candidates_started(3)
    assert before == after == [3] * 5
    assert events.failures == 5
    assert caplog.text.count("fail failed") == 1
    assert "OverflowError: too large" in caplog.text
