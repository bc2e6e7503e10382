"""Spans of groups, as an exporter receives them."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from darts_server.vllm.server import Traces
from tests.metrics.test_rollouts import record

sdk = pytest.importorskip("opentelemetry.sdk.trace")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Sequence[Any]:
    """Collect the exported spans."""
    sent: list[Any] = []

    class Collected(sdk.SpanProcessor):  # type: ignore[misc, name-defined]  # optional
        def on_end(self, span: Any) -> None:
            sent.append(span)

    provider = sdk.TracerProvider()
    provider.add_span_processor(Collected())
    monkeypatch.setattr("vllm.tracing.otel.trace.get_tracer", provider.get_tracer)
    return sent


def test_a_groups_span_is_a_child_of_the_callers(spans: Sequence[Any]) -> None:
    trace = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    Traces(clock=lambda: 10.0).group_ended(replace(record(), trace=trace, cohort_deadline=60, completion_length=9))
    [span] = spans
    assert span.name == "darts_group"
    assert f"{span.context.trace_id:x}" == TRACE[1:], "without its leading zero"
    assert f"{span.parent.span_id:x}" == PARENT
    assert span.attributes["darts.group_id"] == "g"
    assert (span.attributes["darts.candidates"], span.attributes["darts.returned"]) == (3, 2)
    assert (span.attributes["darts.generated_tokens"], span.attributes["darts.deadline"]) == (80, 60)
    assert span.attributes["darts.outcome"] == "completed"
    assert "darts.error" not in span.attributes
    assert span.end_time - span.start_time == pytest.approx(3e9, abs=1e8), "as long as the group"
    assert time.time_ns() - span.end_time == pytest.approx(2e9, abs=1e9), "it ended two seconds ago"


def test_a_group_without_a_callers_trace_starts_its_own(spans: Sequence[Any]) -> None:
    Traces().group_ended(record())
    [span] = spans
    assert span.parent is None
