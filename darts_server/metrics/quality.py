from prometheus_client import REGISTRY, CollectorRegistry

from darts_server.metrics.collectors import BOOLEANS, Collectors, Described, Reads
from darts_server.observers import PruningObserver
from darts_server.types import PruningStatus

PREDICTIONS = ("score", "calibrated")
METRICS = {
    "auc": "Probability that a correct trajectory ranks above a wrong one",
    "brier": "Brier score",
    "calibration_error": "Expected calibration error",
}
_LABELS = "of raw scores and of calibrated probabilities, on labels that came later."
GAUGES: Described = {
    **{f"darts_quality_{name}": (f"{text}, {_LABELS}", {"prediction": PREDICTIONS}) for name, text in METRICS.items()},
    "darts_quality_loss": ("Mean loss of the quality head's last good training, in nats.", {}),
    "darts_quality_status": (
        "1 for the current status of pruning. Candidates are pruned while it is 'ready'.",
        {"status": PruningStatus},
    ),
}


class QualityMetrics(Collectors, PruningObserver):
    def __init__(self, model_name: str, reads: Reads, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._last_totals = (0, 0.0, 0)
        self._scores = self._counters(
            "darts_quality_scores",
            "Scores of running trajectories, by whether their inputs were finite numbers.",
            "usable",
            BOOLEANS,
        )
        self._decisions = self._counters(
            "darts_pruning_decisions",
            "Decisions on scored trajectories that could be pruned, by outcome.",
            "outcome",
            ("kept", "pruned"),
        )
        self._hidden_states = self._counters(
            "darts_probe_states",
            "Hidden states expected at detection points, by whether the engine sent them.",
            "received",
            BOOLEANS,
        )
        self._learned_labels = self._counter(
            "darts_quality_labels", "Scored trajectories whose rewards were learned from."
        )
        self._dropped_labels = self._counter(
            "darts_quality_labels_dropped",
            "Scored trajectories that were dropped before their reward was reported, because too many were kept.",
        )
        self._training_steps = self._counter("darts_quality_training_steps", "Training steps of the quality head.")
        self._training_seconds = self._counter(
            "darts_quality_training_seconds", "Seconds spent training the quality head."
        )
        self._divergences = self._counter(
            "darts_quality_divergences",
            "Trainings of the quality head that diverged and were undone.",
        )
        self._create_read_metrics(GAUGES, reads)

    def trajectory_scored(self, *, usable: bool) -> None:
        self._scores[usable].inc()

    def pruning_decided(self, *, kept: bool) -> None:
        self._decisions["kept" if kept else "pruned"].inc()

    def hidden_state_expected(self, *, received: bool) -> None:
        self._hidden_states[received].inc()

    def label_learned(self) -> None:
        self._learned_labels.inc()

    def pending_labels_dropped(self, count: int) -> None:
        self._dropped_labels.inc(count)

    def trained(self, steps: int, seconds: float, divergences: int) -> None:
        """Add the growth of the trainer's totals. Any thread may call this method."""
        totals = (steps, seconds, divergences)
        last_totals = self._last_totals
        self._last_totals = totals
        # A smaller total is a new trainer's, whose totals began at 0.
        if any(total < last_total for total, last_total in zip(totals, last_totals, strict=True)):
            last_totals = (0, 0.0, 0)
        self._training_steps.inc(steps - last_totals[0])
        self._training_seconds.inc(seconds - last_totals[1])
        self._divergences.inc(divergences - last_totals[2])
