"""vLLM's metrics, recorded from a real server. Record them again with

::

    curl -s http://127.0.0.1:8000/metrics | python -m tests.deploy.recorded > tests/deploy/vllm_metrics.txt
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.names import Metric

FILE = Path(__file__).with_name("vllm_metrics.txt")
HEAD = "# vLLM's metrics on its version 0.31.0: name, type, labels beside model_name"
HISTOGRAM_LABEL = "le"
CACHE_CONFIG = "vllm:cache_config_info"
"""Not recorded: its labels are the engine's settings, which differ between versions."""


def recorded() -> list[Metric]:
    """Read the recorded metrics."""
    rows = (line.split() for line in FILE.read_text().splitlines() if not line.startswith("#"))
    return [Metric(name, kind, tuple(labels), "") for name, kind, *labels in rows]


def exposed(text: str) -> Iterator[Metric]:
    """Yield the metrics of a server's ``/metrics`` that have samples."""
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels} - {"model_name", HISTOGRAM_LABEL}
        suffix = "_total" if family.type == "counter" else ""
        yield Metric(f"{family.name}{suffix}", family.type, tuple(sorted(labels)), "")


if __name__ == "__main__":
    found = (m for m in exposed(sys.stdin.read()) if m.name.startswith("vllm:") and not m.name.endswith("_created"))
    kept = sorted((m for m in found if m.name != CACHE_CONFIG), key=lambda metric: metric.name)
    print(HEAD, *(" ".join((m.name, m.kind, *m.labels)) for m in kept), sep="\n")
