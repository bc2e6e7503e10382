"""Prometheus collectors of pruning by quality: scores, draws, labels, and the head's training."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry

from darts_server.metrics.collectors import Collectors, or_nan
from darts_server.types import PruningStatus

OF = ("score", "chance")
FIGURES = {
    "auc": "Chance that a right trajectory is above a wrong one",
    "brier": "Brier score",
    "calibration_error": "Expected calibration error",
}


@dataclass(frozen=True, slots=True)
class QualitySources:
    """What is asked for its present value whenever metrics are scraped; ``None`` from one means not known yet.

    ``status``: of pruning. ``figure``: one of `FIGURES` of one of `OF`. ``loss``: of the last training, in nats.
    """

    status: Callable[[], PruningStatus]
    figure: Callable[[str, str], float | None]
    loss: Callable[[], float | None]


class QualityMetrics(Collectors):
    """Implements the observer of pruning."""

    def __init__(
        self, model_name: str, sources: QualitySources | None = None, registry: CollectorRegistry = REGISTRY
    ) -> None:
        super().__init__(model_name, registry)
        self._trained = (0, 0.0, 0)
        self._make()
        if sources is not None:
            self._show(sources)

    def trajectory_scored(self, *, usable: bool) -> None:
        self._scores.labels(self._model, str(usable).lower()).inc()

    def trajectory_drawn(self, *, kept: bool) -> None:
        self._draws.labels(self._model, "kept" if kept else "pruned").inc()

    def trajectory_probed(self, *, told: bool) -> None:
        self._states.labels(self._model, str(told).lower()).inc()

    def label_learned(self) -> None:
        self._labels.labels(self._model).inc()

    def flights_forgotten(self, count: int) -> None:
        self._forgotten.labels(self._model).inc(count)

    def trained(self, steps: int, seconds: float, divergences: int) -> None:
        """How much was trained since the trainer's start, and how often that went wrong. Called in any thread."""
        now = steps, seconds, divergences
        new = any(x < before for x, before in zip(now, self._trained, strict=True))  # another process: all at 0 again
        before = (0, 0.0, 0) if new else self._trained
        self._trained = now
        for counter, x, known in zip((self._steps, self._seconds, self._divergences), now, before, strict=True):
            counter.labels(self._model).inc(x - known)

    def _make(self) -> None:
        booleans = ("true", "false")
        self._scores = self._counter(
            "darts_quality_scores",
            "Scores of running trajectories, by whether they were made of finite numbers.",
            "usable",
            booleans,
        )
        self._draws = self._counter(
            "darts_pruning_draws",
            "Scored trajectories that could be pruned, by what became of them.",
            "fate",
            ("kept", "pruned"),
        )
        self._states = self._counter(
            "darts_probe_states",
            "Hidden states of trajectories that came to a detection point, by whether the engine told them.",
            "told",
            booleans,
        )
        self._labels = self._counter("darts_quality_labels", "Scored trajectories whose rewards were learned from.")
        self._forgotten = self._counter(
            "darts_quality_forgotten",
            "Scored trajectories that were forgotten for want of memory, before a reward came.",
        )
        self._steps = self._counter("darts_quality_training_steps", "Training steps of the quality head.")
        self._seconds = self._counter("darts_quality_training_seconds", "Seconds that the quality head was trained.")
        self._divergences = self._counter("darts_quality_divergences", "Trainings of the head that were undone.")

    def _show(self, sources: QualitySources) -> None:
        for name, text in FIGURES.items():
            what = "of scores, and of the chances they are calibrated to, by labels that came later"
            gauge = self._gauge(f"darts_quality_{name}", f"{text} {what}.", "of")
            for of in OF:
                gauge.labels(self._model, of).set_function(or_nan(partial(sources.figure, of, name)))
        gauge = self._gauge("darts_quality_loss", "Mean loss of the quality head's last good training, in nats.")
        gauge.labels(self._model).set_function(or_nan(sources.loss))
        gauge = self._gauge(
            "darts_quality_status", "1 at the present status of pruning; it prunes while that is 'ready'.", "status"
        )
        for status in PruningStatus:
            gauge.labels(self._model, status).set_function(partial(_is, sources.status, status))


def _is(asked: Callable[[], PruningStatus], status: PruningStatus) -> float:
    return float(asked() is status)
