"""Deadlines: quantiles over what is known, and how lost answers move them later."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.deadline import (
    MAX_FIRST_GROUPS,
    MAX_STRETCH,
    MEMORY,
    MIN_GROUPS,
    MIN_RIGHT,
    RATIO_STEP,
    WINDOW,
    Deadline,
    DeadlineLosses,
    RecentCompletionLengths,
    RightAnswer,
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


def answers(*overruns: float, weight: float = 1.0) -> list[RightAnswer]:
    return [RightAnswer(overrun, weight) for overrun in overruns]


def test_nothing_is_concluded_from_few_right_answers() -> None:
    losses = DeadlineLosses().with_answers(answers(*[3.0] * (MIN_RIGHT - 1)))
    assert losses.share(1.0) is None
    assert losses.stretch(0.02) == 1.0


@given(st.lists(st.floats(0, 40), min_size=MIN_RIGHT, max_size=200), st.floats(0, 0.5))
def test_the_stretch_is_the_smallest_that_takes_no_more_than_its_share(overruns: list[float], max_share: float) -> None:
    losses = DeadlineLosses().with_answers(answers(*overruns))
    stretch = losses.stretch(max_share)

    def lost_of(factor: float) -> float:
        return sum(o > factor for o in overruns) / len(overruns)

    assert 1 <= stretch <= MAX_STRETCH
    assert stretch == MAX_STRETCH or lost_of(stretch * RATIO_STEP * (1 + 1e-9)) <= max_share + 1e-9
    assert stretch == 1 or lost_of(stretch / RATIO_STEP / (1 + 1e-9)) > max_share - 1e-9
    share = losses.share(stretch)
    assert share is not None
    assert stretch == MAX_STRETCH or share <= max_share + 1e-9


def test_an_answer_counts_by_its_weight() -> None:
    """One in fifty returned answers is late, and stands for five: one in ten is lost."""
    losses = DeadlineLosses().with_answers([*answers(*[0.5] * 45), *answers(3.0, weight=5.0), *answers(*[0.5] * 4)])
    assert losses.share(1.0) == pytest.approx(5 / 54)
    assert losses.stretch(0.02) > 2.8
    assert losses.stretch(0.1) == 1.0


def test_old_answers_fade() -> None:
    losses = DeadlineLosses().with_answers(answers(*[8.0] * 100))
    assert losses.stretch(0.02) == pytest.approx(8, rel=0.05)
    for _ in range(1000):
        losses = losses.with_answers(answers(*[0.5] * 50))
    assert losses.stretch(0.02) == 1.0
    assert losses.right == pytest.approx(MEMORY, rel=0.01)


def test_the_stretch_has_a_maximum() -> None:
    assert DeadlineLosses().with_answers(answers(*[100.0] * 60)).stretch(0.02) == MAX_STRETCH
    assert DeadlineLosses().with_answers(answers(*[15.99] * 60)).stretch(0.0) == MAX_STRETCH


@pytest.mark.untraced
@pytest.mark.parametrize(("sigma", "between_prompts"), [(0.5, 0.3), (0.8, 0.5), (0.6, 0.0)])
def test_the_stretch_settles_within_a_tenth_in_twenty_batches_and_stays(sigma: float, between_prompts: float) -> None:
    """64 groups return the 7 shortest of 12 and a sampled one, by log-normal lengths; 60 % are right."""

    def explore(rng: np.random.Generator) -> tuple[list[RightAnswer], list[float]]:
        """Return the right answers that are returned, and the overruns of all that were generated."""
        medians = np.exp(5 + between_prompts * rng.standard_normal(64))
        lengths = np.sort(medians[:, None] * np.exp(sigma * rng.standard_normal((64, 12))))
        deadline = np.sort(lengths[:, 7])[57]
        overruns = np.where(lengths <= lengths[:, [7]], 0.0, lengths / deadline)
        right = rng.random((64, 12)) < 0.6
        sampled = rng.integers(7, 12, 64)
        returned = [
            RightAnswer(overruns[g, i], 1.0 if i < 7 else 5.0)
            for g in range(64)
            for i in (*range(7), sampled[g])
            if right[g, i]
        ]
        return returned, list(overruns[right])

    rng = np.random.default_rng(0)
    wanted = float(np.quantile([o for _ in range(300) for o in explore(rng)[1]], 0.98))
    errors = []
    for _ in range(4):
        losses = DeadlineLosses()
        for batch in range(40):
            losses = losses.with_answers(explore(rng)[0])
            if batch >= 19:
                errors.append(losses.stretch(0.02) / wanted - 1)
    assert np.mean(np.abs(errors) < 0.1) > 0.85
    assert abs(np.mean(errors)) < 0.05


@pytest.mark.parametrize(
    "state",
    [
        {"right": -1},
        {"right": math.nan},
        {"weights": [1.0]},
        {"weights": [-1.0] * 59},
        {"right": "7"},
        {"first_groups": -1},
        {"first_groups": 1.5},
        {"is_rewarded": 1},
    ],
)
def test_a_state_out_of_range_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        DeadlineLosses(**state)


def test_cohorts_explore_first_from_the_first_rewards_until_enough_answers_are_right() -> None:
    losses = DeadlineLosses()
    assert not losses.should_explore_first, "rewards may never be reported"
    losses = replace(losses, is_rewarded=True)
    assert losses.should_explore_first
    losses = losses.with_answers(answers(*[0.5] * (MIN_RIGHT - 1)))
    assert losses.should_explore_first
    assert not losses.with_answers(answers(0.5, 0.5)).should_explore_first
    assert not replace(losses, first_groups=MAX_FIRST_GROUPS).should_explore_first
