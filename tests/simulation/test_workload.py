"""Workloads: what is resampled looks like what was seen, and presets look like what they were fitted to."""

import numpy as np
import pytest

from darts_server.simulation.presets import PRESETS
from darts_server.simulation.workload import Quantiles, TracedPrompt, TracedWorkload

SEEN = np.random.default_rng(5)


def traced(prompts: list[list[int]], max_tokens: int = 10_000) -> TracedWorkload:
    return TracedWorkload([TracedPrompt(10 + i, tuple(lengths)) for i, lengths in enumerate(prompts)], max_tokens, 0)


def draw(
    workload: TracedWorkload, number: int, count: int, attempt: int = 0
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]] = workload.lengths(
        number, count, np.random.default_rng(number), attempt
    )
    return lengths


def test_the_first_candidates_are_the_traces() -> None:
    workload = traced([[5, 6], [7, 8], [9, 1]])
    rows = [draw(workload, number, 4)[:2].tolist() for number in range(3)]
    assert sorted(rows) == [[5, 6], [7, 8], [9, 1]]
    assert sorted(workload.prompt_tokens(number) for number in range(3)) == [10, 11, 12]
    assert draw(workload, 0, 1).tolist() == rows[0][:1]


def test_a_prompt_that_comes_again_or_is_started_again_is_resampled() -> None:
    workload = traced([[100, 200, 400]])
    assert draw(workload, 0, 3).tolist() == [100, 200, 400]
    assert draw(workload, 1, 3).tolist() != [100, 200, 400]
    assert draw(workload, 0, 3, attempt=1).tolist() != [100, 200, 400]


def test_resampled_candidates_keep_mean_and_spread_of_prompts_with_like_neighbours() -> None:
    prompts = np.exp(np.log(500) + 0.5 * SEEN.standard_normal((40, 8)))
    workload = traced([[int(x) for x in row] for row in prompts])
    drawn = np.log([draw(workload, number, 64, attempt=1) for number in range(40)])
    seen = np.log(prompts)
    assert drawn.mean() == pytest.approx(seen.mean(), abs=0.02)
    assert drawn.std(axis=1).mean() == pytest.approx(np.sqrt(seen.var(axis=1, ddof=1).mean()), rel=0.1)
    long_share = (drawn > np.log(1_200)).mean(), (seen > np.log(1_200)).mean()
    assert long_share[0] == pytest.approx(long_share[1], rel=0.35)


def test_a_prompt_alone_is_resampled_from_its_own_samples_with_their_variance() -> None:
    lengths = [100, 150, 220, 330, 500, 800]
    drawn = np.log(draw(traced([lengths]), 1, 20_000))
    assert drawn.mean() == pytest.approx(np.log(lengths).mean(), abs=0.02)
    assert drawn.var() == pytest.approx(np.log(lengths).var(ddof=1), rel=0.05)


def test_one_sample_is_resampled_as_it_is() -> None:
    assert draw(traced([[300]]), 1, 5).tolist() == [300] * 5


def test_the_share_of_truncated_ones_is_kept() -> None:
    prompts = np.minimum(np.exp(np.log(700) + 0.4 * SEEN.standard_normal((40, 8))), 1_000).astype(int)
    workload = traced(prompts.tolist(), max_tokens=1_000)
    drawn = np.asarray([draw(workload, number, 64, attempt=1) for number in range(40)])
    assert drawn.max() == 1_000
    assert (drawn == 1_000).mean() == pytest.approx((prompts == 1_000).mean(), abs=0.03)


def test_quantiles_are_linear_in_logarithms() -> None:
    shape = Quantiles((0.0, 0.5, 1.0), (1, 10, 1_000))
    assert shape.at(np.asarray([0.0, 0.25, 0.5, 0.75, 1.0])).tolist() == pytest.approx([1, 10**0.5, 10, 100, 1_000])


@pytest.mark.parametrize(
    ("name", "mean", "median", "truncated"),
    [("dapo-32b", 580, 463, 0.0), ("deepcoder-14b-16k", 9_800, 11_100, 0.15), ("search-r1-7b", 205, 152, 0.0)],
)
def test_presets_have_the_lengths_that_they_were_fitted_to(
    name: str, mean: float, median: float, truncated: float
) -> None:
    workload = PRESETS[name].workload
    lengths = np.asarray([workload.lengths(i, 8, np.random.default_rng(i)) for i in range(1_500)])
    assert lengths.mean() == pytest.approx(mean, rel=0.08)
    assert np.median(lengths) == pytest.approx(median, rel=0.08)
    assert (lengths >= workload.max_tokens).mean() == pytest.approx(truncated, abs=0.03)
    assert workload.prompt_tokens(3) == workload.prompt_tokens(3) != workload.prompt_tokens(4)
