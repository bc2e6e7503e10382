import pytest

from darts_server.policy.pruning.calibration import Label
from darts_server.quality.evaluation import WINDOW, Evaluation, ScoreMetrics


def test_without_labels_there_are_no_metrics() -> None:
    assert Evaluation(None).metrics() == ScoreMetrics(0, None, None, None)


def test_metrics_are_over_the_last_labels() -> None:
    evaluation = Evaluation(None)
    for _ in range(WINDOW):
        evaluation.add(Label(0.9, 0.0))
    for i in range(WINDOW):
        evaluation.add(Label(0.8 if i % 2 else 0.2, float(i % 2)))
    metrics = evaluation.metrics()
    assert (metrics.labels, metrics.auc) == (WINDOW, 1.0)
    assert (metrics.brier, metrics.calibration_error) == pytest.approx((0.04, 0.2))


def test_survivors_are_weighted_for_the_pruned_ones() -> None:
    """Two in three correct ones and all wrong ones survive: weighted, the Brier score is that of all."""
    plain, corrected = Evaluation(None), Evaluation(10.0)
    for evaluation in (plain, corrected):
        for label in [Label(0.5, 1.0, 2 / 3)] * 2 + [Label(0.6, 0.0)] * 3:
            evaluation.add(label)
    assert plain.metrics().brier == pytest.approx((2 * 0.25 + 3 * 0.36) / 5)
    assert corrected.metrics().brier == pytest.approx((3 * 0.25 + 3 * 0.36) / 6)
