"""What all our metrics have in common: the model's name, and a registry."""

from collections.abc import Callable, Iterable
from math import nan

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Collectors:
    """Makes collectors with the label ``model_name``."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model = model_name
        self._registry = registry

    def _counter(self, name: str, text: str, label: str | None = None, values: Iterable[str] = ()) -> Counter:
        """It is there from the start, at 0: a rate over its first step from nothing would miss that."""
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
    """What a gauge shows of a value that may not be known."""

    def ask() -> float:
        known = value()
        return nan if known is None else known

    return ask
