"""Survival: the paper's formula, delta, the keep ratio, and the pull towards rho."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from darts_server.policy.pruning.calibration import inverse_propensity_weights
from darts_server.policy.pruning.survival import Pruning, SurvivalCurve

CHANCES = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1)
QUALITIES = st.lists(CHANCES, min_size=1, max_size=60)


@st.composite
def prunings(draw: st.DrawFn) -> Pruning:
    least = draw(st.floats(0.01, 0.5))
    keep = draw(st.floats(least, 1))
    return Pruning(
        keep_ratio=keep,
        target_positive_ratio=draw(CHANCES),
        balance_strength=draw(st.floats(0, 3) | st.just(100.0)),
        min_survival=least,
        max_survival=draw(st.floats(keep, 1)),
    )


def transcribed(pruning: Pruning, q: float, delta: float) -> float:
    """The paper's formula."""
    pull = pruning.keep_ratio + delta + pruning.balance_strength * (pruning.target_positive_ratio - q)
    return min(max(pull, pruning.min_survival), pruning.max_survival)


@given(prunings(), CHANCES, QUALITIES)
def test_survival_is_what_the_paper_says(pruning: Pruning, q: float, recent: list[float]) -> None:
    curve = pruning.fit(recent)
    assert curve.survival(q) == pytest.approx(transcribed(pruning, q, curve.shift), abs=1e-12)


@given(prunings(), QUALITIES, st.booleans())
def test_delta_meets_the_keep_ratio_exactly(pruning: Pruning, recent: list[float], aimed: bool) -> None:
    curve = replace(pruning, aimed=aimed).fit(recent)
    assert abs(math.fsum(map(curve.survival, recent)) - pruning.keep_ratio * len(recent)) < 1e-9


@given(prunings(), st.lists(st.tuples(CHANCES, st.integers(0, 4)), max_size=20), st.booleans())
def test_a_weight_counts_as_that_many_qualities(
    pruning: Pruning, weighted: list[tuple[float, int]], aimed: bool
) -> None:
    pruning = replace(pruning, aimed=aimed)
    weighted = [(0.5, 1), (0.4, 1), *weighted]
    repeated = [q for q, w in weighted for _ in range(w)]
    by_weight = pruning.fit([q for q, _ in weighted], [w for _, w in weighted])
    assert abs(math.fsum(map(by_weight.survival, repeated)) - pruning.keep_ratio * len(repeated)) < 1e-9
    assert by_weight.slope == pytest.approx(pruning.fit(repeated).slope)


def test_without_qualities_delta_is_zero() -> None:
    for aimed in (False, True):
        assert Pruning(aimed=aimed).fit([]).survival(0.7) == pytest.approx(0.4)


@pytest.mark.parametrize("aimed", [False, True])
def test_a_constant_score_prunes_at_the_keep_ratio(aimed: bool) -> None:
    for q in (0.0, 0.3, 1.0):
        assert Pruning(keep_ratio=0.6, aimed=aimed).fit([q] * 5).survival(q) == pytest.approx(0.6)


# --- on synthetic scores ----------------------------------------------------


def population(share_of_right: float, count: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Calibrated chances and what came of them."""
    rng = np.random.default_rng(round(100 * share_of_right))
    q = rng.beta(4 * share_of_right, 4 * (1 - share_of_right), count)
    return q, rng.random(count) < q


def survivors(pruning: Pruning, q: NDArray[np.float64]) -> NDArray[np.bool_]:
    curve = pruning.fit(q)
    rng = np.random.default_rng(7)
    return np.asarray(rng.random(q.size) < [curve.survival(x) for x in q])


@pytest.mark.untraced
@pytest.mark.parametrize("aimed", [False, True])
@pytest.mark.parametrize("share", [0.2, 0.35, 0.5, 0.65, 0.8])
def test_the_share_of_survivors_is_the_keep_ratio(share: float, aimed: bool) -> None:
    q, _ = population(share, 20_000)
    assert survivors(Pruning(aimed=aimed), q).mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("share", [0.65, 0.8])
def test_if_most_are_right_survivors_are_pulled_towards_rho(share: float) -> None:
    q, right = population(share, 20_000)
    kept = survivors(Pruning(), q)
    assert 0.5 < right[kept].mean() < right.mean() - 0.015


@given(prunings(), QUALITIES, CHANCES)
def test_in_the_papers_form_rho_cancels_out(pruning: Pruning, recent: list[float], rho: float) -> None:
    one, other = pruning.fit(recent), replace(pruning, target_positive_ratio=rho).fit(recent)
    assert [one.survival(q) for q in recent] == pytest.approx([other.survival(q) for q in recent], abs=1e-9)


def test_if_most_are_wrong_the_papers_form_pulls_away_from_rho() -> None:
    q, right = population(0.3, 20_000)
    assert right[survivors(Pruning(), q)].mean() < right.mean() - 0.015


@pytest.mark.untraced
@pytest.mark.parametrize("rho", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("share", [0.2, 0.35, 0.5, 0.65, 0.8])
def test_the_aimed_form_pulls_towards_rho_and_not_past_it(share: float, rho: float) -> None:
    q, _ = population(share, 20_000)
    kept = survivors(Pruning(aimed=True, target_positive_ratio=rho), q)
    before, after = q.mean() - rho, q[kept].mean() - rho
    assert abs(after) < 0.01 or (abs(after) < abs(before) - 0.015 and after * before > 0)


def test_far_above_rho_the_aimed_form_is_the_papers() -> None:
    q, _ = population(0.9, 1000)
    assert Pruning(aimed=True).fit(q) == replace(Pruning().fit(q), pruning=Pruning(aimed=True))


@pytest.mark.untraced
def test_fitted_to_each_group_the_aimed_form_has_more_reward_variance_than_random_pruning() -> None:
    """500 prompts of all difficulties, groups of 16 of which 8 stay; variance of rewards within a group."""
    rng = np.random.default_rng(0)
    q = 1 / (1 + np.exp(-rng.normal(0, 1.2, (500, 1)) - 1.5 * rng.normal(size=(500, 16))))
    right = rng.random(q.shape) < q
    draws = rng.random(q.shape)

    def variance(pruning: Pruning) -> float:
        survivals = np.asarray([[curve.survival(x) for x in row] for row, curve in ((r, pruning.fit(r)) for r in q)])
        kept = draws < survivals
        shares = (right & kept).sum(axis=1) / np.maximum(kept.sum(axis=1), 1)
        return float((shares * (1 - shares)).mean())

    at_random = variance(Pruning(balance_strength=0.0))
    assert variance(Pruning(aimed=True)) > at_random + 0.005
    assert variance(Pruning()) < at_random + 0.001


def test_delta_of_survivors_alone_misses_the_keep_ratio_and_weights_correct_it() -> None:
    """Strong pull, nine in ten right. The survivors' q are lower, so a delta over them prunes too many."""
    pruning = Pruning(balance_strength=2.0)
    q, _ = population(0.9, 20_000)
    curve = pruning.fit(q)
    p = np.asarray([curve.survival(x) for x in q])
    kept = np.random.default_rng(3).random(q.size) < p

    def rate(curve: SurvivalCurve) -> float:
        return float(np.mean([curve.survival(x) for x in q]))

    assert rate(pruning.fit(q[kept])) < 0.5 - 0.05
    assert rate(pruning.fit(q[kept], inverse_propensity_weights(p[kept]))) == pytest.approx(0.5, abs=0.02)


# --- what is refused --------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_survival": 0.0},
        {"min_survival": 0.6},
        {"max_survival": 0.4},
        {"max_survival": 1.1},
        {"keep_ratio": math.nan},
        {"target_positive_ratio": -0.1},
        {"balance_strength": math.inf},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Pruning(**wrong)


@pytest.mark.parametrize(
    ("qualities", "weights"),
    [([1.5], None), ([math.nan], None), ([0.5], [1, 1]), ([0.5], [-1]), ([0.5], [0]), ([0.5], [math.inf])],
)
def test_qualities_and_weights_out_of_range_are_refused(qualities: list[float], weights: list[float] | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        Pruning().fit(qualities, weights)
