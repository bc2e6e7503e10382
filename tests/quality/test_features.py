import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.quality import features
from darts_server.quality.features import CLIP, Standardiser, assemble_feature


def test_a_feature_is_the_hidden_state_and_the_logarithm_of_its_position() -> None:
    feature = assemble_feature(np.asarray([1.0, -2.0], dtype=np.float16), 512)
    assert feature is not None
    assert feature.dtype == np.float32
    assert feature.tolist() == [1.0, -2.0, 9.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e39])
def test_a_feature_that_is_not_finite_in_float32_is_none(bad: float) -> None:
    assert assemble_feature(np.asarray([1.0, bad]), 512) is None


def test_shapes_and_positions_are_checked() -> None:
    with pytest.raises(ValueError, match="hidden must be a vector"):
        assemble_feature(np.zeros((1, 2)), 512)
    with pytest.raises(ValueError, match="position must be"):
        assemble_feature(np.zeros(2), 0)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.floats(-1, 1, width=32)), min_size=1, max_size=40))
def test_mean_and_variance_are_those_of_all_features(rows: list[tuple[float, float]]) -> None:
    standardiser = Standardiser.blank(2)
    for row in rows:
        standardiser = standardiser.after(np.asarray(row, dtype=np.float32))
    assert standardiser.mean == pytest.approx(np.mean(rows, axis=0), abs=1e-6)
    assert standardiser.variance == pytest.approx(np.var(rows, axis=0), rel=1e-6, abs=1e-6)


def test_constant_features_become_0_and_outliers_are_clipped() -> None:
    standardiser = Standardiser.blank(2)
    for x in (1.0, 3.0):
        standardiser = standardiser.after(np.asarray([x, 7.0], dtype=np.float32))
    assert standardiser.apply(np.asarray([[3.0, 7.0], [1e30, 9.0]], dtype=np.float32)).tolist() == [
        [1.0, 0.0],
        [CLIP, 0.0],
    ]


def test_old_features_lose_weight() -> None:
    standardiser = Standardiser(features.MEMORY, np.zeros(1), np.ones(1))
    for _ in range(5 * features.MEMORY):
        standardiser = standardiser.after(np.asarray([50.0], dtype=np.float32))
    assert standardiser.mean[0] == pytest.approx(50, abs=0.5)
    assert standardiser.count == features.MEMORY
