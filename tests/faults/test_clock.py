"""Nothing goes by the time of day."""

from faults.clock import looks_at_the_wall_clock


def test_nothing_but_what_tells_it_asks_for_the_time_of_day() -> None:
    assert list(looks_at_the_wall_clock()) == []
