"""The factor on the weights of a pruned group with failures, against exact fractions."""

from fractions import Fraction
from math import comb, inf, isfinite
from random import Random

import pytest

from darts_server.group.failure_weights import failure_weight_factor


def exact(survivals: list[float], started: int) -> float:
    sums = [Fraction(1)]
    for survival in survivals:
        both = zip([*sums, Fraction(0)], [Fraction(0), *sums], strict=True)
        sums = [whole + less / Fraction(survival) for whole, less in both]
    estimate = sum(total / comb(started - 1, k) for k, total in enumerate(sums))
    return float(estimate * Fraction(started - len(survivals), started))


@pytest.mark.parametrize(("failed", "started"), [(1, 2), (3, 4), (7, 8), (60, 300), (100, 1200)])
@pytest.mark.parametrize("certain", [0.0, 0.6, 1.0])
def test_the_factor_is_exact_for_groups_of_any_size(failed: int, started: int, certain: float) -> None:
    rng = Random(failed)
    survivals = [1.0 if rng.random() < certain else rng.uniform(0.3, 1) for _ in range(failed)]
    assert failure_weight_factor(survivals, started) == pytest.approx(exact(survivals, started), rel=1e-9)


def test_binomial_coefficients_may_exceed_the_range_of_floats() -> None:
    with pytest.raises(OverflowError):
        float(comb(2047, 600))
    factor = failure_weight_factor([0.1] + [1.0] * 599, 2048)
    assert isfinite(factor)
    assert 1 < factor < 1.01
    assert failure_weight_factor([0.01] * 1500, 2048) == inf
