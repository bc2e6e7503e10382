"""Our metrics, from the code."""

import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from darts_server import metrics

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
TARGET_LABELS = frozenset({"job", "instance"})
"""Labels that Prometheus adds."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as ``/metrics`` shows it: ``name`` of a counter with its ``_total``, ``labels`` without `model_name`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def samples(self) -> tuple[str, ...]:
        """Names that a query may use."""
        if self.kind == "histogram":
            return tuple(f"{self.name}{suffix}" for suffix in ("_bucket", "_sum", "_count"))
        return (self.name,)


def ours() -> list[Metric]:
    """Return all metrics of our collectors."""
    registry = _Registry()
    for maker in _makers():
        given: dict[str, Any] = {"model_name": "m", "registry": registry}
        parameters = inspect.signature(maker).parameters
        if "sources" in parameters:
            kind = get_args(parameters["sources"].annotation)[0]
            given["sources"] = kind(**dict.fromkeys((field.name for field in fields(kind)), _zero))
        if "reads" in parameters:
            given["reads"] = defaultdict(lambda: _zero)
        maker(**given)
    return [metric for collector in registry.made for metric in _described(collector)]


class _Registry(CollectorRegistry):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self.made.append(collector)


def _zero(*_: object) -> Any:
    return 0.0


def _makers() -> Iterator[Any]:
    for name in metrics.__all__:
        made = getattr(metrics, name)
        if inspect.isclass(made) and "registry" in inspect.signature(made).parameters:
            yield made


def _described(collector: Any) -> Iterator[Metric]:
    for family in collector.describe():
        suffix = "_total" if family.type == "counter" else ""
        labels = tuple(name for name in collector._labelnames if name != "model_name")
        yield Metric(f"{family.name}{suffix}", family.type, labels, family.documentation)
