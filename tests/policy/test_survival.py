"""Survival: the paper's formula, delta and the keep ratio."""

import math
from fractions import Fraction
from math import comb, inf, isfinite
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.group.failure_weights import weight_factor
from darts_server.policy.survival import Pruning

CHANCES = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1)
QUALITIES = st.lists(CHANCES, min_size=1, max_size=60)


@st.composite
def prunings(draw: st.DrawFn) -> Pruning:
    least = draw(st.floats(0.01, 0.5))
    keep = draw(st.floats(least, 1))
    return Pruning(
        keep_ratio=keep,
        balance_strength=draw(st.floats(0, 3) | st.just(100.0)),
        min_survival=least,
        max_survival=draw(st.floats(keep, 1)),
    )


def transcribed(pruning: Pruning, q: float, delta: float, rho: float) -> float:
    """The paper's formula."""
    pull = pruning.keep_ratio + delta + pruning.balance_strength * (rho - q)
    return min(max(pull, pruning.min_survival), pruning.max_survival)


@given(prunings(), CHANCES, CHANCES, QUALITIES)
def test_survival_is_what_the_paper_says_with_any_rho(
    pruning: Pruning, q: float, rho: float, recent: list[float]
) -> None:
    curve = pruning.fit(recent)
    delta = curve.shift - pruning.balance_strength * rho
    assert curve.survival(q) == pytest.approx(transcribed(pruning, q, delta, rho), abs=1e-9)


@given(prunings(), QUALITIES)
def test_delta_meets_the_keep_ratio_exactly(pruning: Pruning, recent: list[float]) -> None:
    curve = pruning.fit(recent)
    assert abs(math.fsum(map(curve.survival, recent)) - pruning.keep_ratio * len(recent)) < 1e-9


def test_those_that_are_likely_right_are_pruned_more() -> None:
    curve = Pruning(keep_ratio=0.5, balance_strength=0.5).fit([0.2, 0.4, 0.6, 0.8])
    assert [curve.survival(q) for q in (0.2, 0.4, 0.6, 0.8)] == pytest.approx([0.65, 0.55, 0.45, 0.35])


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_survival": 0.0},
        {"min_survival": 0.6},
        {"max_survival": 0.4},
        {"max_survival": 1.1},
        {"keep_ratio": math.nan},
        {"balance_strength": math.inf},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Pruning(**wrong)


# --- where candidates failed ------------------------------------------------


def exact(survivals: list[float], started: int) -> float:
    sums = [Fraction(1)]
    for survival in survivals:
        both = zip([*sums, Fraction(0)], [Fraction(0), *sums], strict=True)
        sums = [whole + less / Fraction(survival) for whole, less in both]
    estimate = sum(each / comb(started - 1, k) for k, each in enumerate(sums))
    return float(estimate * Fraction(started - len(survivals), started))


@pytest.mark.parametrize(("failed", "started"), [(1, 2), (3, 4), (7, 8), (60, 300), (100, 1200)])
@pytest.mark.parametrize("certain", [0.0, 0.6, 1.0])
def test_it_is_exact_for_groups_of_any_size(failed: int, started: int, certain: float) -> None:
    rng = Random(failed)
    survivals = [1.0 if rng.random() < certain else rng.uniform(0.3, 1) for _ in range(failed)]
    assert weight_factor(survivals, started) == pytest.approx(exact(survivals, started), rel=1e-9)


def test_groups_whose_binomial_coefficients_exceed_the_range_of_floats_have_it_too() -> None:
    with pytest.raises(OverflowError):
        float(comb(2047, 600))
    factor = weight_factor([0.1] + [1.0] * 599, 2048)
    assert isfinite(factor)
    assert 1 < factor < 1.01
    assert weight_factor([0.01] * 1500, 2048) == inf


def test_with_a_keep_ratio_of_one_all_survive() -> None:
    curve = Pruning(keep_ratio=1.0).fit([0.1, 0.5, 0.9])
    assert [curve.survival(q) for q in (0.0, 0.5, 1.0)] == [1.0, 1.0, 1.0]
