from collections.abc import Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from darts_server.metrics.collectors import Collectors
from darts_server.types import VerifierResult

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class VerifierMetrics(Collectors):
    """``names``: all verifiers of the command line."""

    def __init__(
        self,
        model_name: str,
        names: Sequence[str] = (),
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        super().__init__(model_name, registry)
        calls = Counter(
            "darts_verifier_calls",
            "Ended calls of verifiers for one candidate, by result. Only 'reward' gave a reward.",
            ("model_name", "verifier", "result"),
            registry=registry,
        )
        self._calls = {
            (name, result): calls.labels(model_name, name, result) for name in names for result in VerifierResult
        }
        self._seconds = self._histogram(
            "darts_verifier_seconds",
            "Time from the end of a candidate to the end of a verifier's call, including the wait for a process.",
            SECONDS_BUCKETS,
            "verifier",
        )

    def called(self, name: str, result: VerifierResult, seconds: float) -> None:
        self._calls[name, result].inc()
        self._seconds.labels(self._model, name).observe(seconds)
