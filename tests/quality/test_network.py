import numpy as np
import pytest
import torch

from darts_server.quality.network import Network
from darts_server.quality.replay import Batch


def batch(width: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(16, width)).astype(np.float32)
    return Batch(x, (x[:, 0] > 0).astype(np.float32), np.ones(16, dtype=np.float32))


def network(seed: int = 0) -> Network:
    return Network(5, 7, learning_rate=1e-2, weight_decay=0.0, seed=seed)


def test_scores_in_numpy_equal_those_of_the_trained_network() -> None:
    net = network()
    for i in range(20):
        net.fit(batch(5, i).features, batch(5, i))
    a = {name: torch.from_numpy(x) for name, x in net.weights().arrays.items()}
    for x in batch(5, 99).features:
        hidden = torch.relu(a["hidden_weight"] @ torch.from_numpy(x) + a["hidden_bias"])
        expected = torch.sigmoid(a["out_weight"] @ hidden + a["out_bias"]).item()
        assert net.weights().score(x) == pytest.approx(expected, abs=1e-6)


def test_the_loss_starts_at_that_of_guessing_and_falls() -> None:
    net, one = network(), batch(5, 0)
    losses = [net.fit(one.features, one) for _ in range(100)]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6)
    assert losses[-1] < 0.2


def test_weights_scale_the_loss() -> None:
    one = batch(5, 0)
    double = Batch(one.features, one.targets, 2 * one.weights)
    assert network().fit(one.features, double) == pytest.approx(2 * network().fit(one.features, one))


def test_copied_weights_do_not_change_with_the_network() -> None:
    net, one = network(), batch(5, 0)
    before = net.weights()
    chance = before.score(one.features[0])
    for _ in range(10):
        net.fit(one.features, one)
    assert before.score(one.features[0]) == chance != net.weights().score(one.features[0])


def test_moments_must_be_loaded_to_continue_a_training_exactly() -> None:
    continued, fresh, saved, one = network(), network(1), network(2), batch(5, 0)
    for _ in range(5):
        saved.fit(one.features, one)
    continued.load(saved.weights(), moments=True)
    fresh.load(saved.weights(), moments=False)
    for net in (continued, fresh, saved):
        net.fit(one.features, one)
    arrays = [net.weights().arrays["hidden_weight"] for net in (continued, fresh, saved)]
    assert (arrays[0] == arrays[2]).all()
    assert (arrays[1] != arrays[2]).any()


def test_the_global_generator_of_torch_is_not_used() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    network()
    assert torch.equal(torch.rand(3), expected)
