"""Export an OpenTelemetry span for each group, next to the one that vLLM exports for each candidate."""

import time
from collections.abc import Callable

from vllm.tracing import extract_trace_context, instrument_manual

from darts_server.observers import GroupObserver
from darts_server.records import GroupRecord

NAME = "darts_group"
NANOSECONDS = 1_000_000_000


class Traces(GroupObserver):
    """Exports spans through the tracer that vLLM sets up for ``--otlp-traces-endpoint``.

    Args:
        clock: the clock of the records' times, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def group_ended(self, record: GroupRecord) -> None:
        """Export the group's span: a child of the caller's ``traceparent``, or the root of a new trace without one."""
        instrument_manual(
            NAME,
            start_time=self._unix_nanoseconds(record.started_at),
            end_time=self._unix_nanoseconds(record.ended_at),
            attributes=_attributes(record),
            context=extract_trace_context(record.trace),
        )

    def _unix_nanoseconds(self, seconds: float) -> int:
        return time.time_ns() - int((self._clock() - seconds) * NANOSECONDS)


def _attributes(record: GroupRecord) -> dict[str, str | int]:
    attributes = {
        "darts.group_id": record.group_id,
        "darts.prompt_key": record.prompt_key,
        "darts.policy": record.policy,
        "darts.outcome": str(record.outcome),
        "darts.candidates": len(record.candidates),
        "darts.returned": len(record.selected),
        "darts.generated_tokens": record.generated_tokens,
        "darts.returned_tokens": record.returned_tokens,
        "darts.deadline": record.deadline,
        "darts.error": record.error,
    }
    return {name: value for name, value in attributes.items() if value is not None}
