"""Server-sent events of a batch."""

from collections.abc import AsyncGenerator
from typing import Any

from darts_server.http.json_encoding import encode_ascii
from darts_server.http.resources.rollouts_encoding import group_fields
from darts_server.http.resources.rollouts_models import CohortOut, UnfinishedOut, error_object, usage_of
from darts_server.http.sse import EventStream, encode, encode_text
from darts_server.rollout.batches.events import (
    BatchDone,
    BatchFailed,
    BatchStarted,
    CandidateDiscarded,
    Event,
    GroupEnded,
    NeedsReported,
    TokenDelta,
    TrajectorySelected,
)
from darts_server.rollout.batches.run import BatchRun, Listener, StreamMode

CHUNK_BYTES = 64 * 1024
"""About what the web server buffers for a reader before it waits for it to read."""
SENT_IN_DELTAS = {"trajectories": {"__all__": {"token_ids", "logprobs"}}}


def stream_events(batch: BatchRun, after: int = 0) -> EventStream:
    """Stream the events of a batch that follow event ``after``."""
    listener = batch.listen(after)
    return EventStream(event_chunks(listener, batch.answer_format.stream), listener)


async def event_chunks(listener: Listener, stream: StreamMode) -> AsyncGenerator[bytes, None]:
    """Encode the events of a batch; those that came while the previous chunk was sent go out together."""
    while (found := await listener.next()) is not None:
        chunk = encode_event(*found, stream)
        while len(chunk) < CHUNK_BYTES and (found := listener.next_nowait()) is not None:
            chunk += encode_event(*found, stream)
        yield chunk


def encode_event(number: int, event: Event, stream: StreamMode) -> bytes:
    """Encode an event; ``number`` is its id, for Last-Event-ID."""
    match event:  # those with tokens: fast
        case TokenDelta(name, group, start, token_ids, logprobs):
            place = {"trajectory_id": name, "number": group, "start": start}
            return encode_text("delta", encode_ascii({**place, "token_ids": token_ids, "logprobs": logprobs}), number)
        case GroupEnded(result):
            left_out = SENT_IN_DELTAS if stream is StreamMode.TOKENS else None
            return encode_text("group", encode_ascii(group_fields(result, left_out)), number)
    name, data = _name_and_data(event)
    return encode(name, data, number)


def _name_and_data(
    event: BatchStarted | NeedsReported | TrajectorySelected | CandidateDiscarded | BatchDone | BatchFailed,
) -> tuple[str, dict[str, Any]]:
    match event:
        case TrajectorySelected(name, number, sample, cut):
            what = {"length": len(sample.token_ids), "finish_reason": sample.finish_reason, "text": sample.text}
            return "trajectory", {"trajectory_id": name, "number": number, **what, "cut": cut}
        case CandidateDiscarded(name, number, length, reason):
            return "discard", {"trajectory_id": name, "number": number, "length": length, "reason": reason}
        case BatchStarted(batch_id, policy, groups, survivors, sampling, cohort):
            what = {"id": batch_id, "policy": policy, "groups": groups}
            of_part = {} if cohort is None else {"cohort": CohortOut.of(cohort).model_dump()}
            return "batch", {**what, "survivors": survivors, "sampling": sampling, **of_part}
        case NeedsReported(needs, minimums):
            return "needs", {"needs": list(needs.items()), "minimums": list(minimums.items())}
        case BatchDone():
            usage = usage_of(event).model_dump(mode="json")
            left = [UnfinishedOut.of(prompt).model_dump(mode="json") for prompt in event.unfinished]
            return "done", {"id": event.batch_id, "usage": usage, "unfinished": left, "carried": event.carried}
        case BatchFailed(error):
            return "error", {"error": error_object(error)}
