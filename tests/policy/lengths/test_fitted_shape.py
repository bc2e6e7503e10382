"""The fitted shape of lengths, far out in its tail."""

import math
from typing import Any

import pytest

from darts_server.policy.lengths.fitted_shape import FittedShape
from darts_server.policy.lengths.stats import PromptStats


@pytest.mark.parametrize("tokens", [100, 300, 1_000, 10_000, 1_000_000])
def test_a_candidate_in_the_far_tail_is_expected_to_finish_within_the_mean_wait(tokens: int) -> None:
    """Beyond 30 standard deviations, where the normal's density and survival both underflow, too."""
    first, second = FittedShape(mean=2.0, std=0.1, wait=5.0).moments_beyond(tokens)
    assert tokens < first <= tokens + 5
    assert first**2 <= second <= (tokens + 5) ** 2 + 5**2


def test_one_candidate_far_beyond_all_others_widens_the_shape() -> None:
    narrow, wide = FittedShape.fit([10] * 5, []), FittedShape.fit([10] * 5, [100_000])
    assert narrow.std < wide.std < math.inf
    assert narrow.mean < wide.mean < math.inf


@pytest.mark.parametrize(
    "wrong", [{"mean_ema": math.nan}, {"std_ema": -1.0}, {"groups": math.inf}, {"candidates": "8"}]
)
def test_statistics_that_are_not_finite_numbers_are_rejected(wrong: dict[str, Any]) -> None:
    right = {"std_ema": 1.0, "mean_ema": 2.0, "groups": 3, "candidates": 8, "weight_version": None}
    with pytest.raises(ValueError, match=r"must be a (whole )?number in"):
        PromptStats(**(right | wrong))
