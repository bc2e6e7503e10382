import numpy as np
import pytest

from darts_server.quality.features import Single
from darts_server.quality.replay import ReplayBuffer


def buffer(
    capacity: int = 100, half_life: float = 10.0, max_weight: float | None = 10.0, seed: int = 0
) -> ReplayBuffer:
    rng = np.random.default_rng(seed)
    return ReplayBuffer(1, capacity=capacity, half_life=half_life, max_weight=max_weight, rng=rng)


def number(n: float) -> Single:
    return np.asarray([n], dtype=np.float32)


@pytest.mark.parametrize("added", [40, 100, 250])
def test_newer_examples_are_sampled_more_often_and_old_ones_are_dropped(added: int) -> None:
    replay = buffer()
    for n in range(added):
        replay.add(number(n), n % 2, 1.0)
    sampled = replay.sample(50_000).features[:, 0]
    assert len(replay) == min(added, 100)
    assert sampled.min() >= added - 100
    newest, older = (float((sampled == n).mean()) for n in (added - 1, added - 11))
    assert newest / older == pytest.approx(2, rel=0.15)


def test_features_targets_and_weights_stay_together() -> None:
    replay = buffer(capacity=3, half_life=100.0)
    for n, survival in enumerate([1.0, 0.5, 0.25, 0.5]):
        replay.add(number(n), n / 4, survival)
    batch = replay.sample(200)
    weights = {1.0: 2 / (8 / 3), 2.0: 4 / (8 / 3), 3.0: 2 / (8 / 3)}
    assert {float(x) for x in batch.features[:, 0]} == set(weights)
    assert (batch.targets == batch.features[:, 0] / 4).all()
    assert batch.weights.tolist() == pytest.approx([weights[float(x)] for x in batch.features[:, 0]])


def test_without_correction_all_examples_weigh_the_same() -> None:
    replay = buffer(max_weight=None)
    replay.add(number(0), 1.0, 0.1)
    replay.add(number(1), 0.0, 1.0)
    assert replay.sample(10).weights.tolist() == [1.0] * 10
    assert replay.prior == pytest.approx(0.5)


def test_the_prior_is_weighted_and_never_0_or_1() -> None:
    replay = buffer()
    assert replay.prior == 0.5
    assert replay.is_one_class
    replay.add(number(0), 1.0, 1.0)
    assert replay.prior == pytest.approx(2 / 3)
    assert replay.is_one_class
    replay.add(number(1), 0.0, 0.5)
    assert replay.prior == pytest.approx((2 / 3 + 1) / 4)
    assert not replay.is_one_class


def test_equal_seeds_sample_equal_batches() -> None:
    one, other, third = buffer(seed=1), buffer(seed=1), buffer(seed=2)
    for replay in (one, other, third):
        for n in range(50):
            replay.add(number(n), n % 2, 1.0)
    assert one.sample(9).features.tolist() == other.sample(9).features.tolist() != third.sample(9).features.tolist()
