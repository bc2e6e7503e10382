"""Prometheus collectors of refused requests."""

from prometheus_client import REGISTRY, CollectorRegistry

from darts_server.metrics.collectors import Collectors

REASONS = ("key", "permission", "body", "queue", "quota", "shutdown")


class AccessMetrics(Collectors):
    """Count refused requests by reason."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._refused = self._counter(
            "darts_requests_refused",
            "Refused requests by reason: key (missing or wrong), permission, body (too large or incomplete), queue "
            "(too many candidates wait), quota (of a key), shutdown (the server is stopping, or its engine failed).",
            "reason",
            REASONS,
        )

    def refused(self, reason: str) -> None:
        self._refused.labels(self._model, reason).inc()
