"""The simulation of roulette."""

import pytest

from benchmarks.roulette import LENGTHS, Path, run, simulate, simulate_cap
from darts_server.policy.pruning.roulette import Loss


def test_without_scores_a_loss_over_tokens_is_plain_sampling() -> None:
    tokens, efficiency, partial, exact, _ = simulate(LENGTHS["heavy tail: log-normal, 1.2"], None, Loss.TOKEN, 0)
    assert (tokens, efficiency, partial) == pytest.approx((1, 1, 1))
    assert exact < 0.9, "four of twelve survivors are not returned"


def test_heavy_tails_gain_with_a_loss_over_sequences() -> None:
    tokens, efficiency, _, _, with_growing_gradients = simulate(
        LENGTHS["heavier: log-normal, 1.6"], 0.85, Loss.SEQUENCE, 0
    )
    assert tokens < 0.7
    assert efficiency > 1.1
    assert with_growing_gradients < 1


def test_tokens_and_squares_of_a_path_are_expectations() -> None:
    path = Path(100.0, 1.0, [(20, 0.5, 0.8), (60, 0.5, 0.9)])
    assert path.survival == 0.25
    assert path.expected_tokens == 20 + 0.5 * 40 + 0.25 * 40
    plain = Path(100.0, 1.0, [(0, 0.5, 0.4), (0, 0.5, 0.4)])
    assert plain.with_control_variates(0.4) == pytest.approx(0.36 / 0.25)
    certain = Path(100.0, 1.0, [(100, 0.5, 1.0)])
    assert certain.with_control_variates(0.4) == pytest.approx(0.36), "the value is known, so nothing is lost"


def test_a_limit_saves_tokens_and_loses_right_answers() -> None:
    share, _, lost = simulate_cap(LENGTHS["heavy tail: log-normal, 1.2"], 0)
    assert share < 0.8
    assert lost > 0.05


def test_figures_have_standard_errors() -> None:
    assert run(lambda seed: [float(seed % 2)]) == ["0.50 ± 0.11"]
