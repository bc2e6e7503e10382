"""Prometheus collectors of requests that were not let in."""

from prometheus_client import REGISTRY, CollectorRegistry

from darts_server.metrics.collectors import Collectors

REASONS = ("key", "rights", "body", "queue", "quota", "ending")


class AccessMetrics(Collectors):
    """Counts requests that were not let in."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._refused = self._counter(
            "darts_requests_refused",
            "Requests that were refused, by reason: key (none, or a wrong one), rights, body (too large or not whole), "
            "queue (too much waits), quota (of a key), ending (the server stops, or its engine failed).",
            "reason",
            REASONS,
        )

    def refused(self, reason: str) -> None:
        self._refused.labels(self._model, reason).inc()
