"""A span for each group, sent where vLLM's ``--otlp-traces-endpoint`` says, beside vLLM's own for each candidate."""

import time
from collections.abc import Callable

from vllm.tracing import extract_trace_context, instrument_manual

from darts_server.observers import GroupObserver
from darts_server.types import GroupRecord

NAME = "darts_group"
NANOSECONDS = 1_000_000_000


class Traces(GroupObserver):
    """Implements the observer of groups. What is made of spans, and where they go, is set up by vLLM.

    Args:
        clock: the one by which records tell times, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def group_ended(self, record: GroupRecord) -> None:
        """A child of the caller's ``traceparent``, if there was one; else a trace of its own."""
        instrument_manual(
            NAME,
            start_time=self._since_the_epoch(record.started_at),
            end_time=self._since_the_epoch(record.ended_at),
            attributes=_attributes(record),
            context=extract_trace_context(record.trace),
        )

    def _since_the_epoch(self, seconds: float) -> int:
        return time.time_ns() - int((self._clock() - seconds) * NANOSECONDS)


def _attributes(record: GroupRecord) -> dict[str, str | int]:
    known = {
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
    return {name: value for name, value in known.items() if value is not None}
