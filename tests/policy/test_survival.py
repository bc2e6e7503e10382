"""Survival: the paper's formula, delta and the keep ratio."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.survival import BALANCE_STRENGTH, MAX_SURVIVAL, MIN_SURVIVAL, Pruning

CHANCES = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1)
QUALITIES = st.lists(CHANCES, min_size=1, max_size=60)
PRUNINGS = st.floats(MIN_SURVIVAL, MAX_SURVIVAL).map(Pruning)


@given(PRUNINGS, CHANCES, CHANCES, QUALITIES)
def test_survival_is_the_formula_of_the_paper_with_any_rho(
    pruning: Pruning, q: float, rho: float, recent: list[float]
) -> None:
    curve = pruning.fit(recent)
    delta = curve.shift - BALANCE_STRENGTH * rho
    pull = pruning.keep_ratio + delta + BALANCE_STRENGTH * (rho - q)
    assert curve.survival(q) == pytest.approx(min(max(pull, MIN_SURVIVAL), MAX_SURVIVAL), abs=1e-9)


@given(PRUNINGS, QUALITIES)
def test_delta_meets_the_keep_ratio_exactly(pruning: Pruning, recent: list[float]) -> None:
    curve = pruning.fit(recent)
    assert abs(math.fsum(map(curve.survival, recent)) - pruning.keep_ratio * len(recent)) < 1e-9


def test_likely_right_trajectories_are_pruned_more() -> None:
    curve = Pruning(keep_ratio=0.5).fit([0.2, 0.4, 0.6, 0.8])
    assert [curve.survival(q) for q in (0.2, 0.4, 0.6, 0.8)] == pytest.approx([0.65, 0.55, 0.45, 0.35])


def test_with_a_keep_ratio_of_one_all_trajectories_survive() -> None:
    curve = Pruning(keep_ratio=1.0).fit([0.1, 0.5, 0.9])
    assert [curve.survival(q) for q in (0.0, 0.5, 1.0)] == [1.0, 1.0, 1.0]
