"""The table of our metrics in ``docs/metrics.md``; run, this module writes it."""

from collections.abc import Iterable

from tests.deploy.names import ROOT, Metric, ours

PAGE = ROOT / "docs" / "metrics.md"
HEAD = """\
# Metrics

What darts-server adds to vLLM's `/metrics`. Each has the label `model_name`, beside those named here; none has a
prompt, a group or a caller as its label, so their number does not grow with use. A gauge is NaN until its value is
known. What to look at, and when to act, is in [operations.md](operations.md#monitor).

This page is made from the code by `scripts/metrics`.

| metric | type | labels | |
|---|---|---|---|
"""


def page(metrics: Iterable[Metric]) -> str:
    """The whole page."""
    return HEAD + "".join(f"{_row(metric)}\n" for metric in sorted(metrics, key=lambda metric: metric.name))


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |"


if __name__ == "__main__":
    PAGE.write_text(page(ours()))
