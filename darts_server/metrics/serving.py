"""Prometheus collectors of the API process."""

from prometheus_client import REGISTRY, CollectorRegistry

from darts_server.metrics.collectors import Collectors

LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25)


class ServingMetrics(Collectors):
    """Measure the event loop."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._lag = self._histogram(
            "darts_event_loop_lag_seconds",
            "Delay of a timer of the event loop, ten times a second. The log says what held it for 0.25 s or more.",
            LAG_BUCKETS,
        ).labels(model_name)

    def loop_lagged(self, seconds: float) -> None:
        self._lag.observe(seconds)
