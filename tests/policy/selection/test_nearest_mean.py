"""The balanced choice, against all subsets."""

import math
import time
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.selection.nearest_mean import choose_of_two_values, grid_resolution, select_nearest_mean

COARSE = st.integers(0, 16).map(lambda n: n / 16)


@given(st.lists(COARSE, min_size=1, max_size=9), st.integers(1, 5), COARSE)
def test_on_the_grid_the_choice_is_the_best_subset_and_of_equals_the_earliest(
    qualities: list[float], size: int, target: float
) -> None:
    subsets = list(combinations(range(len(qualities)), min(size, len(qualities))))
    wanted = Fraction(target) * size

    def gap(subset: tuple[int, ...]) -> Fraction:
        return abs(sum((Fraction(qualities[i]) for i in subset), Fraction(0)) - wanted)

    chosen = select_nearest_mean(qualities, size, target)
    if len(qualities) <= size:
        assert chosen == tuple(range(len(qualities)))
    else:
        assert chosen == min(subsets, key=lambda subset: (gap(subset), subset))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.integers(1, 5), st.floats(0, 1))
def test_off_the_grid_the_choice_is_within_the_grid_of_the_best(
    qualities: list[float], size: int, target: float
) -> None:
    size = min(size, len(qualities))

    def gap(subset: tuple[int, ...]) -> float:
        return abs(math.fsum(qualities[i] for i in subset) / size - target)

    chosen = select_nearest_mean(qualities, size, target)
    assert len(set(chosen)) == size
    best = min(gap(subset) for subset in combinations(range(len(qualities)), size))
    assert gap(chosen) <= best + 1 / grid_resolution(size, len(qualities)) + 1e-12


@pytest.mark.parametrize(("size", "candidates", "bits"), [(8, 16, 14), (16, 64, 13), (64, 128, 9), (1, 2, 14)])
def test_the_grid_is_as_fine_as_documented(size: int, candidates: int, bits: int) -> None:
    assert grid_resolution(size, candidates) == 2**bits


@pytest.mark.parametrize(("size", "candidates"), [(8, 16), (32, 64), (64, 128)])
def test_large_groups_meet_the_target_within_the_grid_and_in_time(size: int, candidates: int) -> None:
    """Bounded in memory by the grid; the time allows for slow machines, it is some ten milliseconds."""
    qualities = np.random.default_rng(0).random(candidates).tolist()
    began = time.process_time()
    chosen = select_nearest_mean(qualities, size, 0.5)
    assert time.process_time() - began < 2
    assert len(set(chosen)) == size
    assert np.mean([qualities[i] for i in chosen]) == pytest.approx(0.5, abs=1 / 64 if size == 8 else 1 / 500)


def test_an_unreachable_target_is_approached_as_far_as_possible() -> None:
    assert select_nearest_mean([0.9, 0.8, 0.2, 0.1], 2, 0.5) == (0, 3)
    assert select_nearest_mean([0.9, 0.9, 0.9, 0.1], 2, 0.0) == (0, 3)
    assert select_nearest_mean([0.1] * 6, 3, 1.0) == (0, 1, 2)


def test_of_equally_near_sums_above_and_below_the_earlier_candidates_win() -> None:
    assert select_nearest_mean([0.0, 0.75, 0.25], 2, 0.25) == (0, 1)
    assert select_nearest_mean([0.0, 0.25, 0.75], 2, 0.25) == (0, 1)


def test_a_grid_for_very_large_sizes_is_at_least_one() -> None:
    assert grid_resolution(1000, 2000) == 1
    assert grid_resolution(64, 100_000) > 0


@given(st.lists(st.integers(0, 1), min_size=2, max_size=9), st.data())
def test_of_qualities_that_are_0_or_1_the_choice_is_the_best_subset_and_of_equals_the_earliest(
    units: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(units) - 1))
    wanted = Fraction(data.draw(st.integers(0, 4 * size)), 4)
    subsets = combinations(range(len(units)), size)
    best = min(subsets, key=lambda subset: (abs(sum(units[i] for i in subset) - wanted), subset))
    assert choose_of_two_values(units, size, wanted) == best


def test_very_large_groups_are_selected_without_tables() -> None:
    qualities = [0.0] * 1000 + [1.0] * 1000
    began = time.process_time()
    assert select_nearest_mean(qualities, 1000, 0.25) == (*range(750), *range(1000, 1250))
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("qualities", "size", "target"), [([0.5], 0, 0.5), ([1.5], 1, 0.5), ([math.nan], 1, 0.5), ([0.5], 1, -1.0)]
)
def test_values_out_of_range_are_refused(qualities: list[float], size: int, target: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        select_nearest_mean(qualities, size, target)
