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
