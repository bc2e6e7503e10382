"""Base class of our metrics: the model's name and a registry."""

from collections.abc import Callable, Iterable
from math import nan

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Collectors:
    """Create collectors with the label ``model_name``."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
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

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, ("model_name", *labels), buckets=buckets, registry=self._registry)


def or_nan(value: Callable[[], float | None]) -> Callable[[], float]:
    """Return a function for a gauge that reports NaN while the value is unknown."""

    def read() -> float:
        current = value()
        return nan if current is None else current

    return read
