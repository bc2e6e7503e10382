"""Our metrics, from the code."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from darts_server.metrics.collectors import AccessMetrics, ServingMetrics, WeightMetrics
from darts_server.metrics.quality import QualityMetrics
from darts_server.metrics.rollouts import RolloutMetrics
from darts_server.metrics.sessions import SessionMetrics
from darts_server.metrics.verifiers import VerifierMetrics

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
    registry = CollectorRegistry()
    AccessMetrics("m", registry)
    QualityMetrics("m", defaultdict(lambda: _zero), registry)
    RolloutMetrics("m", defaultdict(lambda: _zero), registry)
    SessionMetrics("m", defaultdict(lambda: _zero), registry)
    ServingMetrics("m", defaultdict(lambda: _zero), registry)
    VerifierMetrics("m", registry=registry)
    WeightMetrics("m", registry)
    return [metric for collector in registry._collector_to_names for metric in _described(collector)]


def _zero(*_: object) -> Any:
    return 0.0


def _described(collector: Any) -> Iterator[Metric]:
    for family in collector.describe():
        suffix = "_total" if family.type == "counter" else ""
        # The client's own collectors have the names, and families that are made at each scrape have their own.
        named: Any = collector if hasattr(collector, "_labelnames") else family
        labels = tuple(name for name in named._labelnames if name != "model_name")
        yield Metric(f"{family.name}{suffix}", family.type, labels, family.documentation)
