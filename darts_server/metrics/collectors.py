"""Our metrics are in Prometheus' default registry, so vLLM's ``/metrics`` serves them.

Every metric has the label ``model_name``.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from itertools import product
from typing import TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from darts_server.records import UpdateRecord
from darts_server.types import UpdateOutcome

ValueT = TypeVar("ValueT")

LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25)
PHASE_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
BOOLEANS = (True, False)
REFUSALS = ("key", "permission", "body", "queue", "quota", "shutdown")

Reads = Mapping[str, Callable[..., float | None]]
"""Functions by metric that are called at each scrape with the values of the labels. ``None`` means unknown."""
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
Described = Mapping[str, tuple[str, Mapping[str, Iterable[str | int]]]]
"""Help text and labels by metric. Each label has all its values."""

ENGINE_GAUGES: Described = {
    "darts_engines_up": ("Engines that take requests.", {}),
    "darts_history_bytes": ("Bytes of the answers that are kept for drafts, see --history-bytes.", {}),
    "darts_history_prompts": ("Prompts that have answers that are kept for drafts.", {}),
}
DRAFT_SOURCES = ("prompt", "all")
ENGINE_TOTALS: Described = {
    "darts_engines_lost_total": ("Lost engines. Their candidates were restarted on other engines.", {}),
    "darts_decode_steps_total": ("Decode steps. vllm:iteration_tokens_total counts several steps as one.", {}),
    "darts_draft_tokens_total": (
        "Tokens that --speculate auto drafted, by the counts that proposed them: of the same prompt (the answer, other "
        "answers, earlier epochs), or of all prompts.",
        {"source": DRAFT_SOURCES},
    ),
    "darts_draft_accepted_tokens_total": ("Drafted tokens that were right.", {"source": DRAFT_SOURCES}),
}


def hide_creation_times() -> None:
    """Export no creation times of series, vLLM's included: they are a third of all lines."""
    disable_created_metrics()  # type: ignore[no-untyped-call]


class ReadMetric(Collector):
    """A gauge or a counter that reads its values at each scrape, and has no sample for an unknown value.

    The client's own Gauge would export NaN, and its Counter cannot read.
    """

    def __init__(self, empty: GaugeMetricFamily | CounterMetricFamily, registry: CollectorRegistry) -> None:
        self.reads: dict[tuple[str, ...], Callable[[], float | None]] = {}
        """Functions by the values of the labels, the model's name first."""
        self._empty = empty
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return [self._empty]

    def collect(self) -> Iterable[Metric]:
        # A copy, because `describe` returns the family without samples.
        family = copy(self._empty)
        family.samples = []
        for labels, read in self.reads.items():
            value = read()
            if value is not None:
                family.add_metric(labels, value)
        return [family]


class Collectors:
    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._model = model_name
        self._registry = registry

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(
            name,
            text,
            ("model_name",),
            registry=self._registry,
        ).labels(self._model)

    def _counters(
        self,
        name: str,
        text: str,
        label: str,
        values: Iterable[ValueT],
    ) -> dict[ValueT, Counter]:
        counter = Counter(
            name,
            text,
            ("model_name", label),
            registry=self._registry,
        )
        # All counters are exported from the start, at 0: otherwise `rate` would miss the first increment.
        return {value: counter.labels(self._model, _label_value(value)) for value in values}

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        # Gauges and histograms appear with their first value, not from the start.
        return Gauge(
            name,
            text,
            ("model_name", *labels),
            registry=self._registry,
        )

    def _create_read_metrics(self, described: Described, reads: Reads, family: Family = GaugeMetricFamily) -> None:
        for name, (text, labels) in described.items():
            metric = ReadMetric(family(name, text, labels=("model_name", *labels)), self._registry)
            for values in product(*labels.values()):
                metric.reads[self._model, *map(str, values)] = partial(reads[name], *values)

    def _histogram(
        self,
        name: str,
        text: str,
        buckets: tuple[float, ...],
        *labels: str,
    ) -> Histogram:
        return Histogram(
            name,
            text,
            ("model_name", *labels),
            buckets=buckets,
            registry=self._registry,
        )


def _label_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


class ServingMetrics(Collectors):
    def __init__(self, model_name: str, reads: Reads, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._create_read_metrics(ENGINE_GAUGES, reads)
        self._create_read_metrics(ENGINE_TOTALS, reads, CounterMetricFamily)
        lag = self._histogram(
            "darts_event_loop_lag_seconds",
            "Delay of a timer of the event loop, ten times a second. From 0.25 s on, the log has the stack.",
            LAG_BUCKETS,
        )
        self.loop_lagged: Callable[[float], None] = lag.labels(model_name).observe


class AccessMetrics(Collectors):
    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._refused_requests = self._counters(
            "darts_requests_refused",
            "Refused requests by reason: key (missing or wrong), permission, body (too large or incomplete), queue "
            "(too many candidates wait), quota (of a key), shutdown (the server is stopping, or its engine failed).",
            "reason",
            REFUSALS,
        )

    def refused(self, reason: str) -> None:
        self._refused_requests[reason].inc()


class WeightMetrics(Collectors):
    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._updates = self._counters("darts_weight_updates", "Weight updates by outcome.", "outcome", UpdateOutcome)
        self._seconds = self._histogram(
            "darts_weight_update_seconds", "Duration of each phase of a weight update.", PHASE_BUCKETS, "phase"
        )
        self._version = self._gauge("darts_weight_version", "Version of the weights that are served.")
        self._version.labels(model_name).set(0)

    def update_ended(self, record: UpdateRecord) -> None:
        self._updates[record.outcome].inc()
        self._version.labels(self._model).set(record.version)
        for phase, seconds in record.seconds.items():
            self._seconds.labels(self._model, phase).observe(seconds)
