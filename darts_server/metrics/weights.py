"""Prometheus collectors of weight updates."""

from prometheus_client import REGISTRY, CollectorRegistry

from darts_server.metrics.collectors import Collectors
from darts_server.records import UpdateRecord
from darts_server.types import UpdateOutcome

PHASE_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class WeightMetrics(Collectors):
    """Implements the observer protocol of the weights room."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._updates = self._counter("darts_weight_updates", "Weight updates by outcome.", "outcome", UpdateOutcome)
        self._seconds = self._histogram(
            "darts_weight_update_seconds", "Duration of each phase of a weight update.", PHASE_BUCKETS, "phase"
        )
        self._version = self._gauge("darts_weight_version", "Version of the weights that are served.")
        self._version.labels(model_name).set(0)

    def update_announced(self, version: int) -> None:
        """Count nothing: an update is counted when it ends."""

    def update_ended(self, record: UpdateRecord) -> None:
        self._updates.labels(self._model, record.outcome).inc()
        self._version.labels(self._model).set(record.version)
        for phase, seconds in record.seconds.items():
            self._seconds.labels(self._model, phase).observe(seconds)
