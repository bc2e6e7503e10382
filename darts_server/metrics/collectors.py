"""Base class of our metrics, and those of the server itself: its event loop, refused requests, weight updates.

They use Prometheus' default registry, so vLLM's ``/metrics`` serves them. Every metric has the label ``model_name``
besides its own.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from itertools import product

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from darts_server.records import UpdateRecord
from darts_server.types import UpdateOutcome

LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25)
PHASE_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
BOOLEANS = ("true", "false")
REFUSALS = ("key", "permission", "body", "queue", "quota", "shutdown")

Reads = Mapping[str, Callable[..., float | None]]
"""By metric, what is called at each scrape with the values of its labels; it returns ``None`` while that is unknown."""
Gauges = Mapping[str, tuple[str, Mapping[str, Iterable[str | int]]]]
"""By name, the text and the labels of gauges, with all values of these."""

ENGINE_GAUGES: Gauges = {
    "darts_engines_up": ("Engines that take requests.", {}),
}
ENGINE_TOTALS = {
    "darts_engines_lost_total": "Engines that were lost; their candidates were started again elsewhere.",
    "darts_decode_steps_total": "Decode steps; vllm:iteration_tokens_total has several as one.",
}


def hide_creation_times() -> None:
    """Export no times at which series were created, also of vLLM's metrics: they are a third of all lines."""
    disable_created_metrics()  # type: ignore[no-untyped-call]


class ReadMetric(Collector):
    """A gauge or a counter that reads its values at each scrape, and has no sample for one that is unknown.

    The client's own Gauge would export NaN for it, and its Counter cannot read.

    ``reads``: by the values of the labels, the model's name first.
    """

    def __init__(self, empty: GaugeMetricFamily | CounterMetricFamily, registry: CollectorRegistry) -> None:
        self.reads: dict[tuple[str, ...], Callable[[], float | None]] = {}
        self._empty = empty
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return [self._empty]

    def collect(self) -> Iterable[Metric]:
        family = copy(self._empty)
        family.samples = []
        for labels, read in self.reads.items():
            value = read()
            if value is not None:
                family.add_metric(labels, value)
        return [family]


class Collectors:
    """Create collectors with the label ``model_name``."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._model = model_name
        self._registry = registry

    def _counter(self, name: str, text: str, label: str | None = None, values: Iterable[str] = ()) -> Counter:
        """Create a counter that is exported from the start, at 0: `rate` would miss a first step from nothing."""
        labels = () if label is None else (label,)
        counter = Counter(name, text, ("model_name", *labels), registry=self._registry)
        for value in [()] if label is None else [(value,) for value in values]:
            counter.labels(self._model, *value)
        return counter

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, ("model_name", *labels), registry=self._registry)

    def _read_gauges(self, gauges: Gauges, reads: Reads) -> None:
        """Create gauges that read their values at each scrape."""
        for name, (text, labels) in gauges.items():
            gauge = ReadMetric(GaugeMetricFamily(name, text, labels=("model_name", *labels)), self._registry)
            for values in product(*labels.values()):
                gauge.reads[self._model, *map(str, values)] = partial(reads[name], *values)

    def _read_totals(self, totals: Mapping[str, str], reads: Reads) -> None:
        """Create counters that read their values at each scrape."""
        for name, text in totals.items():
            counter = ReadMetric(CounterMetricFamily(name, text, labels=("model_name",)), self._registry)
            counter.reads[self._model,] = reads[name]

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, ("model_name", *labels), buckets=buckets, registry=self._registry)


class ServingMetrics(Collectors):
    """Measure the event loop, and read what engines do.

    ``reads``: by name, the values of `ENGINE_GAUGES` and `ENGINE_TOTALS`.
    """

    def __init__(self, model_name: str, reads: Reads, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._read_gauges(ENGINE_GAUGES, reads)
        self._read_totals(ENGINE_TOTALS, reads)
        lag = self._histogram(
            "darts_event_loop_lag_seconds",
            "Delay of a timer of the event loop, ten times a second. The log says what held it for 0.25 s or more.",
            LAG_BUCKETS,
        )
        self.loop_lagged: Callable[[float], None] = lag.labels(model_name).observe


class AccessMetrics(Collectors):
    """Count refused requests by reason."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._refused = self._counter(
            "darts_requests_refused",
            "Refused requests by reason: key (missing or wrong), permission, body (too large or incomplete), queue "
            "(too many candidates wait), quota (of a key), shutdown (the server is stopping, or its engine failed).",
            "reason",
            REFUSALS,
        )

    def refused(self, reason: str) -> None:
        self._refused.labels(self._model, reason).inc()


class WeightMetrics(Collectors):
    """Measure weight updates."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._updates = self._counter("darts_weight_updates", "Weight updates by outcome.", "outcome", UpdateOutcome)
        self._seconds = self._histogram(
            "darts_weight_update_seconds", "Duration of each phase of a weight update.", PHASE_BUCKETS, "phase"
        )
        self._version = self._gauge("darts_weight_version", "Version of the weights that are served.")
        self._version.labels(model_name).set(0)

    def update_ended(self, record: UpdateRecord) -> None:
        self._updates.labels(self._model, record.outcome).inc()
        self._version.labels(self._model).set(record.version)
        for phase, seconds in record.seconds.items():
            self._seconds.labels(self._model, phase).observe(seconds)
