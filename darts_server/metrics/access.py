"""Prometheus collectors of requests that were not let in."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter

REASONS = ("key", "rights", "body", "queue", "quota", "ending")


class AccessMetrics:
    """Counts requests that were not let in."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        text = (
            "Requests that were refused, by reason: key (none, or a wrong one), rights, body (too large or not whole), "
            "queue (too much waits), quota (of a key), ending (the server stops, or its engine failed)."
        )
        self._model = model_name
        self._refused = Counter("darts_requests_refused", text, ("model_name", "reason"), registry=registry)
        for reason in REASONS:
            self._refused.labels(model_name, reason)

    def refused(self, reason: str) -> None:
        self._refused.labels(self._model, reason).inc()
