"""Survival: the paper's formula, delta and the keep ratio."""

import math
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


@given(prunings(), st.lists(st.tuples(CHANCES, st.integers(0, 4)), max_size=20))
def test_a_weight_counts_as_that_many_qualities(pruning: Pruning, weighted: list[tuple[float, int]]) -> None:
    weighted = [(0.5, 1), (0.4, 1), *weighted]
    repeated = [q for q, w in weighted for _ in range(w)]
    by_weight = pruning.fit([q for q, _ in weighted], [w for _, w in weighted])
    assert abs(math.fsum(map(by_weight.survival, repeated)) - pruning.keep_ratio * len(repeated)) < 1e-9


def test_a_constant_score_prunes_at_the_keep_ratio() -> None:
    for q in (0.0, 0.3, 1.0):
        assert Pruning(keep_ratio=0.6).fit([q] * 5).survival(q) == pytest.approx(0.6)


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
@pytest.mark.parametrize("share", [0.2, 0.35, 0.5, 0.65, 0.8])
def test_the_share_of_survivors_is_the_keep_ratio(share: float) -> None:
    q, _ = population(share, 20_000)
    assert survivors(Pruning(), q).mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("share", [0.65, 0.8])
def test_if_most_are_right_fewer_survivors_are(share: float) -> None:
    q, right = population(share, 20_000)
    kept = survivors(Pruning(), q)
    assert 0.5 < right[kept].mean() < right.mean() - 0.015


def test_if_most_are_wrong_even_more_survivors_are() -> None:
    q, right = population(0.3, 20_000)
    assert right[survivors(Pruning(), q)].mean() < right.mean() - 0.015


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
        {"balance_strength": math.inf},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Pruning(**wrong)


@pytest.mark.parametrize(
    ("qualities", "weights"),
    [([], None), ([1.5], None), ([math.nan], None), ([0.5], [1, 1]), ([0.5], [-1]), ([0.5], [0]), ([0.5], [math.inf])],
)
def test_qualities_and_weights_out_of_range_are_refused(qualities: list[float], weights: list[float] | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        Pruning().fit(qualities, weights)
