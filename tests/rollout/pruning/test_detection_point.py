import numpy as np
import pytest

from darts_server.policy.pruning.survival import Pruning
from darts_server.rollout.pruning.detection_point import FIT_INTERVAL, MAX_CURVES, SurvivalEstimator


def test_survival_follows_the_recent_qualities_and_the_number_of_curves_is_bounded() -> None:
    estimator, rng = SurvivalEstimator(), np.random.default_rng(0)
    assert estimator.survival(0.3, Pruning()) == pytest.approx(0.5), "the first is kept with the keep ratio"
    qualities = rng.random(2000)
    survivals = [estimator.survival(float(q), Pruning(keep_ratio=0.4)) for q in qualities]
    assert np.mean(survivals[-1000:]) == pytest.approx(0.4, abs=0.02)
    recent = np.asarray(estimator._recent)
    expected = Pruning(keep_ratio=0.4).fit(recent).survival(float(qualities[-1]))
    assert survivals[-1] == pytest.approx(expected, abs=0.02)
    for i in range(3 * MAX_CURVES):
        estimator.survival(0.5, Pruning(keep_ratio=0.3 + i / 1000))
    assert len(estimator._curves) == MAX_CURVES
    assert len(recent) > FIT_INTERVAL
