"""Prometheus collectors for pruning by quality: scores, decisions, labels, and the training of the quality head."""

from prometheus_client import REGISTRY, CollectorRegistry

from darts_server.metrics.collectors import BOOLEANS, Collectors, Gauges, Reads
from darts_server.observers import PruningObserver
from darts_server.types import PruningStatus

PREDICTIONS = ("score", "calibrated")
METRICS = {
    "auc": "Probability that a correct trajectory ranks above a wrong one",
    "brier": "Brier score",
    "calibration_error": "Expected calibration error",
}
_LABELS = "of raw scores and of calibrated probabilities, on labels that came later."
GAUGES: Gauges = {
    **{f"darts_quality_{name}": (f"{text}, {_LABELS}", {"prediction": PREDICTIONS}) for name, text in METRICS.items()},
    "darts_quality_loss": ("Mean loss of the quality head's last good training, in nats.", {}),
    "darts_quality_status": (
        "1 for the current status of pruning; it prunes while that is 'ready'.",
        {"status": PruningStatus},
    ),
}


class QualityMetrics(Collectors, PruningObserver):
    """Implements the observer of pruning."""

    def __init__(self, model_name: str, reads: Reads | None = None, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._last_totals = (0, 0.0, 0)
        what = "Scores of running trajectories, by whether their inputs were finite numbers."
        self._scores = self._counter("darts_quality_scores", what, "usable", BOOLEANS)
        what = "Decisions on scored trajectories that could be pruned, by outcome."
        self._decisions = self._counter("darts_pruning_decisions", what, "outcome", ("kept", "pruned"))
        what = "Hidden states expected of trajectories past a detection point, by whether the engine sent them."
        self._states = self._counter("darts_probe_states", what, "received", BOOLEANS)
        self._labels = self._counter("darts_quality_labels", "Scored trajectories whose rewards were learned from.")
        what = "Scored trajectories dropped from memory before their reward came, because memory for them was full."
        self._dropped = self._counter("darts_quality_labels_dropped", what)
        self._steps = self._counter("darts_quality_training_steps", "Training steps of the quality head.")
        self._seconds = self._counter("darts_quality_training_seconds", "Seconds spent training the quality head.")
        what = "Trainings of the quality head that were undone."
        self._divergences = self._counter("darts_quality_divergences", what)
        if reads is not None:
            self._read_gauges(GAUGES, reads)

    def trajectory_scored(self, *, usable: bool) -> None:
        self._scores.labels(self._model, str(usable).lower()).inc()

    def pruning_decided(self, *, kept: bool) -> None:
        self._decisions.labels(self._model, "kept" if kept else "pruned").inc()

    def hidden_state_expected(self, *, received: bool) -> None:
        self._states.labels(self._model, str(received).lower()).inc()

    def label_learned(self) -> None:
        self._labels.labels(self._model).inc()

    def pending_labels_dropped(self, count: int) -> None:
        self._dropped.labels(self._model).inc(count)

    def trained(self, steps: int, seconds: float, divergences: int) -> None:
        """Add the growth of the trainer process's totals to the counters. Any thread may call this."""
        totals = steps, seconds, divergences
        # A total that fell is of a new head, whose totals began at 0.
        restarted = any(now < last for now, last in zip(totals, self._last_totals, strict=True))
        before = (0, 0.0, 0) if restarted else self._last_totals
        self._last_totals = totals
        for counter, now, last in zip((self._steps, self._seconds, self._divergences), totals, before, strict=True):
            counter.labels(self._model).inc(now - last)
