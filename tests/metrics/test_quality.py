import math

from prometheus_client import CollectorRegistry

from darts_server.metrics.quality import FIGURES, OF, QualityMetrics, QualitySources
from darts_server.types import PruningStatus


def made(status: PruningStatus = PruningStatus.COLD) -> tuple[QualityMetrics, CollectorRegistry]:
    registry = CollectorRegistry()

    def figure(of: str, name: str) -> float | None:
        return 0.5 if (of, name) == ("score", "auc") else None

    sources = QualitySources(lambda: status, figure, lambda: 0.25)
    return QualityMetrics("tiny", sources, registry), registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "tiny", **labels})


def test_the_status_is_one_of_all_that_there_are() -> None:
    _, registry = made(PruningStatus.TRAINER_LOST)
    shown = {status: value(registry, "darts_quality_status", status=status) for status in PruningStatus}
    assert shown == {status: float(status is PruningStatus.TRAINER_LOST) for status in PruningStatus}


def test_figures_that_are_not_known_are_nan() -> None:
    _, registry = made()
    for of in OF:
        for name in FIGURES:
            shown = value(registry, f"darts_quality_{name}", of=of)
            assert shown is not None
            assert shown == 0.5 if (of, name) == ("score", "auc") else math.isnan(shown)
    assert value(registry, "darts_quality_loss") == 0.25


def test_what_happens_is_counted_and_all_counters_are_there_from_the_start() -> None:
    metrics, registry = made()
    assert value(registry, "darts_pruning_draws_total", fate="pruned") == 0
    metrics.trajectory_scored(usable=True)
    metrics.trajectory_scored(usable=False)
    metrics.trajectory_drawn(kept=True)
    metrics.trajectory_drawn(kept=False)
    metrics.trajectory_probed(told=True)
    metrics.trajectory_probed(told=False)
    metrics.label_learned()
    metrics.flights_forgotten(3)
    for name, label in (("quality_scores", "usable"), ("probe_states", "told")):
        for boolean in ("true", "false"):
            assert value(registry, f"darts_{name}_total", **{label: boolean}) == 1
    assert [value(registry, "darts_pruning_draws_total", fate=fate) for fate in ("kept", "pruned")] == [1, 1]
    assert value(registry, "darts_quality_labels_total") == 1
    assert value(registry, "darts_quality_forgotten_total") == 3


def test_training_goes_on_to_be_counted_when_another_process_begins_at_0() -> None:
    metrics, registry = made()
    for steps, seconds, divergences in ((50, 0.5, 0), (100, 1.0, 1), (100, 1.0, 1), (50, 0.25, 0)):
        metrics.trained(steps, seconds, divergences)
    assert value(registry, "darts_quality_training_steps_total") == 150
    assert value(registry, "darts_quality_training_seconds_total") == 1.25
    assert value(registry, "darts_quality_divergences_total") == 1
