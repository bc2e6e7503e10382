from typing import Any

from prometheus_client import CollectorRegistry

from darts_server.metrics.quality import METRICS, PREDICTIONS, QualityMetrics
from darts_server.types import PruningStatus
from tests.metrics.test_rollouts import value


def create(status: PruningStatus = PruningStatus.COLD) -> tuple[QualityMetrics, CollectorRegistry]:
    registry = CollectorRegistry()

    reads: dict[str, Any] = {f"darts_quality_{name}": lambda _: None for name in METRICS}
    reads["darts_quality_auc"] = lambda prediction: 0.5 if prediction == "score" else None
    reads |= {"darts_quality_loss": lambda: 0.25, "darts_quality_status": lambda each: each is status}
    return QualityMetrics("tiny", reads, registry), registry


def test_only_the_current_status_is_1() -> None:
    _, registry = create(PruningStatus.TRAINER_LOST)
    shown = {status: value(registry, "darts_quality_status", status=status) for status in PruningStatus}
    assert shown == {status: float(status is PruningStatus.TRAINER_LOST) for status in PruningStatus}


def test_metrics_without_a_value_have_no_sample() -> None:
    _, registry = create()
    for prediction in PREDICTIONS:
        for name in METRICS:
            shown = value(registry, f"darts_quality_{name}", prediction=prediction)
            assert shown == (0.5 if (prediction, name) == ("score", "auc") else None)
    assert value(registry, "darts_quality_loss") == 0.25


def test_events_are_counted_and_all_counters_exist_from_the_start() -> None:
    metrics, registry = create()
    assert value(registry, "darts_pruning_decisions_total", outcome="pruned") == 0
    for yes in (True, False):
        metrics.trajectory_scored(usable=yes)
        metrics.pruning_decided(kept=yes)
        metrics.hidden_state_expected(received=yes)
    metrics.label_learned()
    metrics.pending_labels_dropped(3)
    for name, label in (("quality_scores", "usable"), ("probe_states", "received")):
        for boolean in ("true", "false"):
            assert value(registry, f"darts_{name}_total", **{label: boolean}) == 1
    outcomes = [value(registry, "darts_pruning_decisions_total", outcome=outcome) for outcome in ("kept", "pruned")]
    assert outcomes == [1, 1]
    assert value(registry, "darts_quality_labels_total") == 1
    assert value(registry, "darts_quality_labels_dropped_total") == 3


def test_training_counters_keep_growing_when_a_new_process_starts_at_0() -> None:
    metrics, registry = create()
    for steps, seconds, divergences in ((50, 0.5, 0), (100, 1.0, 1), (100, 1.0, 1), (50, 0.25, 0)):
        metrics.trained(steps, seconds, divergences)
    assert value(registry, "darts_quality_training_steps_total") == 150
    assert value(registry, "darts_quality_training_seconds_total") == 1.25
    assert value(registry, "darts_quality_divergences_total") == 1
