"""Encode the answer to a batch: as JSON, as tensors with the rest as JSON, or as server-sent events.

Arrays of tokens are written as they are, without an object for each value.
"""

import json
import re
from array import array
from collections.abc import AsyncGenerator, Iterable
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from darts_server.http.resources.rollouts_models import (
    GroupOut,
    RolloutsOut,
    UnfinishedOut,
    error_object,
    usage_of,
)
from darts_server.http.sse import EventStream, encode, encode_text
from darts_server.http.token_tensors import TokenTensors
from darts_server.rollout.batches.events import (
    BatchDone,
    BatchFailed,
    BatchStarted,
    CandidateDiscarded,
    Event,
    GroupEnded,
    GroupResult,
    TokenDelta,
    TrajectorySelected,
    Unfinished,
)
from darts_server.rollout.batches.run import BatchRun, Listener, StreamMode

TOKEN_LISTS = ("aborted", "trajectories")
"""Fields of a group, and of an unfinished prompt, whose items have tokens."""
CHUNK_BYTES = 64 * 1024
"""About what the web server buffers for a reader before it waits for it to read."""
SENT_IN_DELTAS = {"trajectories": {"__all__": {"token_ids", "logprobs"}}}
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


def group_fields(result: GroupResult, exclude: Any = None) -> dict[str, Any]:
    """Return the fields of `GroupOut`, with arrays of tokens as they are."""
    return GroupOut.of(result).model_dump(exclude=exclude) | _metadata(result.metadata)


def encode_answer(batch: BatchRun, done: BatchDone) -> bytes:
    """Encode the answer as JSON."""
    return _encode(batch, done, None)


def encode_tensors(batch: BatchRun, done: BatchDone) -> TokenTensors:
    """Take the tokens from the answer: it has the numbers of their rows in place of the lists."""
    tensors = TokenTensors()
    tensors.answer = _encode(batch, done, tensors)
    return tensors


def _encode(batch: BatchRun, done: BatchDone, tensors: TokenTensors | None) -> bytes:
    head = RolloutsOut(
        id=batch.batch_id,
        policy=batch.policy,
        groups=[],
        survivors=batch.survivors,
        sampling={},
        unfinished=[],
        carried=done.carried,
        usage=usage_of(done),
    ).model_dump()
    # Callers choose its numbers, which may be any that JSON has.
    head["sampling"] = Raw(json.dumps(dict(batch.sampling), separators=(",", ":")).encode())
    answer = BytesIO()  # it does not copy the whole answer at once, for which the event loop would have to wait
    groups = sorted(done.results, key=lambda result: result.number)
    for place, (name, value) in enumerate(head.items()):
        answer.write((b"," if place else b"{") + encode_json(name) + b":")
        if name == "groups":
            _write_list(answer, (group_fields(group) for group in groups), tensors)
        elif name == "unfinished":
            _write_list(answer, (_unfinished_fields(prompt) for prompt in done.unfinished), tensors)
        else:
            answer.write(encode_json(value))
    answer.write(b"}")
    return answer.getvalue()


def _write_list(answer: BytesIO, items: Iterable[dict[str, Any]], tensors: TokenTensors | None) -> None:
    answer.write(b"[")
    for place, fields in enumerate(items):
        if tensors is not None:
            take_tokens(fields, tensors)
        answer.write(b"," * (place > 0) + encode_json(fields))
    answer.write(b"]")


def take_tokens(fields: dict[str, Any], tensors: TokenTensors) -> None:
    """Put the tokens of a group or an unfinished prompt into rows, and the rows' numbers in their places."""
    for name in TOKEN_LISTS:
        for item in fields.get(name) or ():
            row = tensors.add(item["token_ids"], item["logprobs"])
            item["token_ids"], item["logprobs"] = row, None if item["logprobs"] is None else row


def _unfinished_fields(prompt: Unfinished) -> dict[str, Any]:
    return UnfinishedOut.of(prompt).model_dump() | _metadata(prompt.metadata)


def _metadata(metadata: bytes | None) -> dict[str, Raw]:
    """Return the caller's metadata as it was encoded, whatever numbers it has."""
    return {} if metadata is None else {"metadata": Raw(metadata)}


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
    event: BatchStarted | TrajectorySelected | CandidateDiscarded | BatchDone | BatchFailed,
) -> tuple[str, dict[str, Any]]:
    match event:
        case TrajectorySelected(name, number, sample, cut):
            what = {"length": len(sample.token_ids), "finish_reason": sample.finish_reason, "text": sample.text}
            return "trajectory", {"trajectory_id": name, "number": number, **what, "cut": cut}
        case CandidateDiscarded(name, number, length, reason):
            return "discard", {"trajectory_id": name, "number": number, "length": length, "reason": reason}
        case BatchStarted(batch_id, policy, groups, survivors, sampling):
            what = {"id": batch_id, "policy": policy, "groups": groups}
            return "batch", {**what, "survivors": survivors, "sampling": sampling}
        case BatchDone():
            usage = usage_of(event).model_dump(mode="json")
            left = [UnfinishedOut.of(prompt).model_dump(mode="json") for prompt in event.unfinished]
            return "done", {"id": event.batch_id, "usage": usage, "unfinished": left, "carried": event.carried}
        case BatchFailed(error):
            return "error", {"error": error_object(error)}


def encode_json(value: Any) -> bytes:
    """Encode a value, in which sequences of numbers may be arrays. Numbers that JSON does not have are null.

    Integers of more than 64 bits are refused: what callers chose is put in as `msgspec.Raw`.
    """
    return _encoder.encode(value)


def encode_ascii(value: Any) -> str:
    """Encode a value as `encode_json` does, with all other characters escaped."""
    text = encode_json(value).decode()
    return text if text.isascii() else _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _encode_array(value: Any) -> Any:
    # One after the other, each by itself: the encoder does not let other threads run meanwhile.
    if isinstance(value, array | np.ndarray):
        return value.tolist()
    raise TypeError(f"cannot encode a {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_encode_array)
