import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from darts_server.demo.server import FLAGS, MODEL
from darts_server.exceptions import InvalidSetting
from darts_server.vllm import platform
from darts_server.vllm.launch import start_engine
from darts_server.vllm.server import MORE_HELP, Traces, parse
from tests.metrics.test_rollouts import record

# --- Flags of vLLM's that we refuse or explain


def test_several_api_processes_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="--api-server-count = 2"):
        parse(["some/model", "--api-server-count", "2"])


@pytest.mark.skipif(not current_platform.is_cpu(), reason="tests the CPU build")
@pytest.mark.parametrize("flags", [["--speculative-config", '{"method": "ngram"}'], ["--spec-method", "ngram"]])
def test_speculation_is_refused_on_a_cpu(flags: list[str]) -> None:
    with pytest.raises(InvalidSetting, match="samples from another distribution"):
        parse(["some/model", *flags])


@pytest.mark.skipif(not current_platform.is_cpu(), reason="tests the CPU build")
@pytest.mark.anyio
async def test_speculation_that_no_flag_asks_for_is_refused_on_a_cpu_before_the_engine_starts() -> None:
    args = parse([str(MODEL), *FLAGS])
    args.speculative_config = {"method": "ngram", "num_speculative_tokens": 2}  # vLLM reads it from some models' config
    with pytest.raises(InvalidSetting, match="samples from another distribution"):
        async with start_engine(args):
            pass


def test_speculation_is_not_refused_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    platform.refuse_speculation({"method": "ngram"})


def test_the_help_of_vllms_flags_names_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(["--help=data-parallel-size"])
    assert "--replicas N" in " ".join(capsys.readouterr().out.split())
    parser = make_arg_parser(FlexibleArgumentParser())
    names = {action.dest for action in parser._actions}
    assert MORE_HELP.keys() <= names


# --- Spans of groups, as an exporter receives them


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Sequence[Any]:
    """Collect the exported spans."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
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
