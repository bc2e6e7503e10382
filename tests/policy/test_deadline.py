"""Deadlines: quantiles over what is known, and how lost answers hold them back."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.deadline import (
    MIN_GROUPS,
    MIN_RIGHT,
    STRETCH_UP,
    WINDOW,
    Deadline,
    DeadlineLosses,
    RecentCompletionLengths,
)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=80), st.floats(0.1, 1.0))
def test_the_deadline_is_the_smallest_length_that_the_quantiles_share_does_not_exceed(
    needed: list[int], quantile: float
) -> None:
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


def test_the_deadline_is_stretched_then_clipped_to_floor_and_ceiling() -> None:
    needed = [100] * 10
    assert Deadline(floor=150).from_lengths(needed, 10) == 150
    assert Deadline(ceiling=50).from_lengths(needed, 10) == 50
    assert Deadline(stretch=1.5).from_lengths(needed, 10) == 150
    assert Deadline(stretch=1.5, ceiling=120).from_lengths(needed, 10) == 120
    assert Deadline().from_lengths([], 0) is None


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


def test_there_is_no_share_with_few_right_answers() -> None:
    losses = DeadlineLosses().with_group(MIN_RIGHT - 1, MIN_RIGHT - 1, 0.02)
    assert losses.share is None
    assert losses.stretch == 1.0


def test_the_stretch_grows_while_too_much_is_lost_and_shrinks_after() -> None:
    """Right answers have log-normal lengths; the deadline would be their median, and 2 % of them may be lost."""
    rng = np.random.default_rng(3)
    losses, shares = DeadlineLosses(), []
    for group in range(3000):
        lengths = rng.lognormal(5, 0.5, 8)
        losses = losses.with_group(8, int((lengths > math.exp(5) * losses.stretch).sum()), 0.02)
        if group > 1000:
            shares.append(losses.share)
    settled = math.exp(0.5 * 2.054)  # where 2 % of a standard normal are beyond
    # It comes back slowly, so it stays on the safe side of the bound.
    assert 0.9 * settled < losses.stretch < 1.6 * settled
    assert 0.003 < np.mean([s for s in shares if s is not None]) < 0.02
    for _ in range(1000):
        losses = losses.with_group(8, 0, 0.02)
    assert losses.stretch == 1.0


def test_the_stretch_changes_in_steps_up_to_a_maximum() -> None:
    losses = DeadlineLosses().with_group(MIN_RIGHT, MIN_RIGHT, 0.02)
    assert losses.stretch == pytest.approx(STRETCH_UP)
    for _ in range(1000):
        losses = losses.with_group(8, 8, 0.02)
    assert losses.stretch == 16


@pytest.mark.parametrize("state", [{"right": -1}, {"right": 1, "lost": 2}, {"stretch": 0.5}, {"right": math.nan}])
def test_a_state_out_of_range_is_refused(state: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="losses must hold"):
        DeadlineLosses(**state)
