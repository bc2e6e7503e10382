from fractions import Fraction
from math import comb, inf, isfinite
from random import Random

import pytest

from darts_server.policy.pruning.failures import weight_factor


@pytest.mark.parametrize("started", [2, 5, 12])
def test_failures_before_any_checkpoint_change_nothing(started: int) -> None:
    for failed in range(started):
        assert weight_factor([1.0] * failed, started) == pytest.approx(1, abs=1e-12)


def test_a_failure_after_a_checkpoint_raises_the_weights_of_the_others() -> None:
    assert weight_factor([0.5], 2) == pytest.approx((1 + 2 / 1) * 1 / 2, abs=1e-12)
    assert weight_factor([0.5, 0.25], 4) == pytest.approx((1 + (2 + 4) / 3 + 2 * 4 / 3) * 2 / 4, abs=1e-12)
    assert weight_factor([0.5] * 3, 100) < weight_factor([0.5] * 3, 10)


def exact(survivals: list[float], started: int) -> float:
    sums = [Fraction(1)]
    for survival in survivals:
        both = zip([*sums, Fraction(0)], [Fraction(0), *sums], strict=True)
        sums = [whole + less / Fraction(survival) for whole, less in both]
    estimate = sum(each / comb(started - 1, k) for k, each in enumerate(sums))
    return float(estimate * Fraction(started - len(survivals), started))


@pytest.mark.parametrize(("failed", "started"), [(1, 2), (3, 4), (7, 8), (60, 300), (100, 1200)])
@pytest.mark.parametrize("certain", [0.0, 0.6])
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
