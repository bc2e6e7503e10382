"""Prometheus collectors. They live on the default registry, so that vLLM's ``/metrics`` shows them too.

Every metric has the one label ``model_name``, beside its own.
"""

from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from darts_server.types import GroupRecord

LENGTH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
CANDIDATE_BUCKETS = (2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 128, 256)
SECONDS_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)


class Metrics:
    """Implements the observer protocol of the rollout room."""

    def __init__(
        self, model_name: str, registry: CollectorRegistry = REGISTRY, tracked: Callable[[], float] | None = None
    ) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, ("model_name", *labels), buckets=buckets, registry=registry)

        self._model = model_name
        self._groups = counter("darts_groups", "Groups that ended, by outcome.", "outcome")
        self._started = counter("darts_candidates_started", "Candidates started.")
        self._ended = counter(
            "darts_candidates_ended", "Candidates that ended: 'selected', or why they were discarded.", "reason"
        )
        self._tokens = counter(
            "darts_tokens", "Tokens of all candidates (generated), of returned ones, of the others (wasted).", "kind"
        )
        self._candidates = histogram("darts_candidates_per_group", "Candidates started for a group.", CANDIDATE_BUCKETS)
        if tracked is not None:
            prompts = Gauge("darts_prompts_tracked", "Prompts with statistics.", ("model_name",), registry=registry)
            prompts.labels(model_name).set_function(tracked)
        self._duration = histogram(
            "darts_group_duration_seconds", "From a group's first candidate to its end.", SECONDS_BUCKETS
        )
        self._tail_wait = histogram(
            "darts_tail_wait_seconds", "From the finish of the K-th trajectory to the completed group.", SECONDS_BUCKETS
        )
        self._length = histogram(
            "darts_trajectory_length_tokens",
            "Generated tokens of every candidate (stopped ones as far as they came) and of the returned ones.",
            tuple(map(float, LENGTH_BUCKETS)),
            "kind",
        )

    def candidates_started(self, count: int) -> None:
        self._started.labels(self._model).inc(count)

    def group_ended(self, record: GroupRecord) -> None:
        self._groups.labels(self._model, record.outcome).inc()
        self._candidates.labels(self._model).observe(len(record.candidates))
        self._duration.labels(self._model).observe(record.ended_at - record.started_at)
        if record.tail_wait is not None:
            self._tail_wait.labels(self._model).observe(record.tail_wait)
        self._count_tokens(record)
        for candidate in record.candidates:
            self._ended.labels(self._model, candidate.reason or "selected").inc()
            self._length.labels(self._model, "generated").observe(candidate.tokens)
            if candidate.end is not None:
                self._length.labels(self._model, "returned").observe(candidate.tokens)

    def _count_tokens(self, record: GroupRecord) -> None:
        generated, returned = record.generated_tokens, record.returned_tokens
        for kind, tokens in {"generated": generated, "returned": returned, "wasted": generated - returned}.items():
            self._tokens.labels(self._model, kind).inc(tokens)
