"""vLLM's metrics, recorded from a real server. They are recorded anew with

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
OF_HISTOGRAMS = "le"
OF_VERSIONS = "vllm:cache_config_info"
"""Its labels are settings of the engine, others in each version."""


def recorded() -> list[Metric]:
    """What stands in the file."""
    rows = (line.split() for line in FILE.read_text().splitlines() if not line.startswith("#"))
    return [Metric(name, kind, tuple(labels), "") for name, kind, *labels in rows]


def exposed(text: str) -> Iterator[Metric]:
    """What a server's ``/metrics`` has, as far as it has samples."""
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels} - {"model_name", OF_HISTOGRAMS}
        suffix = "_total" if family.type == "counter" else ""
        yield Metric(f"{family.name}{suffix}", family.type, tuple(sorted(labels)), "")


def _is_worth_recording(metric: Metric) -> bool:
    return metric.name.startswith("vllm:") and metric.name != OF_VERSIONS and not metric.name.endswith("_created")


if __name__ == "__main__":
    kept = sorted((m for m in exposed(sys.stdin.read()) if _is_worth_recording(m)), key=lambda metric: metric.name)
    print(HEAD, *(" ".join((m.name, m.kind, *m.labels)) for m in kept), sep="\n")
