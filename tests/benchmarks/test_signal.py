"""The rules that the benchmark of signal compares."""

import numpy as np
import pytest

from benchmarks.signal import SIZE, informative, max_variance, measure_gradient, off, report_skipping, report_stages


@pytest.mark.parametrize("right", [0, 1, 3, 8, 15, 16])
def test_the_sample_has_the_gradient_of_all_candidates_on_average(right: int) -> None:
    rewards = np.array([1.0] * right + [0.0] * (16 - right))
    rng = np.random.default_rng(0)
    samples = np.array([informative(rewards, rng) for _ in range(4000)])
    assert {int((sample != 0).sum()) for sample in samples} == ({0} if right in (0, 16) else {SIZE})
    assert samples.mean(axis=0) == pytest.approx(off(rewards, rng), abs=0.01)


@pytest.mark.parametrize(("right", "kept"), [(1, 1), (3, 3), (8, 4), (15, 7)])
def test_the_subset_with_the_largest_variance_is_as_even_as_possible(right: int, kept: int) -> None:
    rewards = np.array([1.0] * right + [0.0] * (16 - right))
    coefficients = max_variance(rewards, np.random.default_rng(0))
    assert ((coefficients > 0).sum(), (coefficients < 0).sum()) == (kept, SIZE - kept)


def test_only_the_subset_is_biased() -> None:
    biases = {rule: measure_gradient(0.1, 16, rule, 2000, 0)[1] for rule in (off, informative, max_variance)}
    assert abs(biases[off]) < 0.1
    assert abs(biases[informative]) < 0.1
    assert biases[max_variance] > 0.4


def test_allocation_by_known_pass_rates_finds_most_groups_with_signal() -> None:
    rows = [row.split(" | ") for row in report_stages(1).splitlines()[2:]]
    assert len(rows) == 3
    for _, eight, sixteen, true, *learned, _ in rows:
        assert float(eight) < float(sixteen) < max(map(float, learned)) < float(true)
    assert "| late | 60 | 0.2 |" in report_skipping(1)
