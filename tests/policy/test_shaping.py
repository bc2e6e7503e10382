"""What a named policy makes of one prompt."""

import pytest

from darts_server.exceptions import InvalidRequest
from darts_server.policy.selection import LongestTail, SampledTail, SelectionRule, Shortest
from darts_server.policy.shaping import Shaping, Tail


@pytest.mark.parametrize(("redundancy", "size", "candidates"), [(1.0, 8, 8), (1.5, 8, 12), (1.5, 3, 5), (1.25, 1, 1)])
def test_redundancy_is_rounded_half_up_and_never_below_the_size(redundancy: float, size: int, candidates: int) -> None:
    assert Shaping(redundancy=redundancy).candidates(size) == candidates
    assert Shaping(redundancy=0.1).candidates(size) == size


@pytest.mark.parametrize(
    ("shaping", "rule"),
    [
        (Shaping(), SampledTail(7, 1)),
        (Shaping(num_longest=2, tail=Tail.LONGEST), LongestTail(6, 2)),
        (Shaping(num_longest=0, tail=Tail.LONGEST), Shortest(8)),
        (Shaping(num_shortest=5, num_longest=3), SampledTail(5, 3)),
    ],
)
def test_the_settings_name_a_rule(shaping: Shaping, rule: SelectionRule) -> None:
    assert shaping.rule(8) == rule


def test_a_size_that_is_not_both_ends_together_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="needs n = 8, got 4"):
        Shaping(num_shortest=7, num_longest=1).rule(4)


def test_a_tail_that_leaves_no_short_place_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="raise n, or lower --num-longest"):
        Shaping(num_longest=2).rule(2)
