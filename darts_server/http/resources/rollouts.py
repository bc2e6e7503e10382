"""``/darts/v1/rollouts``: groups for a batch of prompts, as JSON, as tensors with JSON, or as events."""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from reprlib import repr as shortened
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from msgspec import Raw
from starlette.datastructures import Headers
from starlette.responses import Response

from darts_server.caller import caller
from darts_server.exceptions import InvalidRequest, NotAcceptable
from darts_server.http.answers import JSON, SLICE_BYTES, Readers, SharedEncodings, encode_json, respond
from darts_server.http.body import convert_body, parse_body, read_body, while_connected
from darts_server.http.openapi import json_body
from darts_server.http.resources.rollouts_models import (
    CancelledOut,
    GroupOut,
    RolloutsIn,
    RolloutsOut,
    UnfinishedOut,
    describe_error,
    sum_usage,
)
from darts_server.http.sse import MEDIA_TYPE, EventStream, encode_event, encode_text_event
from darts_server.http.token_tensors import MEDIA_TYPE as SAFETENSORS
from darts_server.http.token_tensors import TokenTensors
from darts_server.identifiers import NAME_CHARS, RULE, is_name
from darts_server.rollout.batches.events import (
    BatchDone,
    BatchFailed,
    BatchStarted,
    CandidateDiscarded,
    Event,
    EventFeed,
    GroupResult,
    TokenDelta,
    TrajectorySelected,
)
from darts_server.rollout.batches.registry import KEY_HEADER, BatchRegistry, IdempotencyKey
from darts_server.rollout.batches.run import AnswerFormat, BatchRun, StreamMode

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Enough for 1,024 prompts of 8,192 tokens, which are parsed in a second."""
LAST_EVENT_HEADER = "Last-Event-ID"
MAX_EVENT_DIGITS = 18
"""No batch has so many events."""
KEY = Header(
    alias=KEY_HEADER,
    description="A name of your choice. The same name returns the same batch.",
    json_schema_extra={"minLength": 1, "maxLength": NAME_CHARS},
)
LAST = Header(
    alias=LAST_EVENT_HEADER,
    description="For a stream: the number of the last event that was received.",
    json_schema_extra={"pattern": f"^[0-9]{{1,{MAX_EVENT_DIGITS}}}$"},
)
TOKEN_LISTS = ("aborted", "trajectories")
"""Fields of a group or an unfinished prompt whose items have tokens."""
INLINE_VALUES = 8192
"""Limit of tokens that are encoded in the event loop: they take 2 ms."""
VALUES_PER_CANDIDATE = 32
"""Number of tokens that take as long to encode as a candidate without its tokens."""
SENT_IN_DELTAS = {"trajectories": {"__all__": {"token_ids", "logprobs"}}}
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_RANGE = re.compile(r"\s*([^\s;,/]+/[^\s;,/]+)\s*((?:;[^,]*)?)$")
_WEIGHT = re.compile(r";\s*q\s*=\s*(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*(?:;|$)", re.IGNORECASE)
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            MEDIA_TYPE: {"schema": {"type": "string"}},
            SAFETENSORS: {
                "schema": {
                    "type": "string",
                    "format": "binary",
                    "description": "Without `stream`, for `Accept: application/vnd.safetensors`. Tensors: `offsets` "
                    "(int64), `token_ids` (int32), `logprobs` (float32; left out if not requested), and `answer` "
                    "(uint8): the JSON answer, with the number of a row in place of each list of `token_ids` and "
                    "`logprobs`. Row i is from `offsets[i]` to `offsets[i + 1]`.",
                }
            },
        }
    }
}


@dataclass(frozen=True, slots=True)
class Reading:
    """State that connections share when they read batches."""

    readers: Readers = field(default_factory=lambda: Readers("finished or shared batches"))
    answers: SharedEncodings[bytes | TokenTensors] = field(default_factory=SharedEncodings)
    """Whole answers that are being sent."""
    events: SharedEncodings[bytes] = field(default_factory=SharedEncodings)
    """Large events that are being sent."""

    @contextmanager
    def listen(self, batch: BatchRun) -> Iterator[None]:
        """Keep a batch from being cancelled as idle while the block runs, or raise `QuotaReached`."""
        # Limits of candidates also limit running batches, so only further readers count, and readers of ended batches.
        is_counted = batch.end is not None or batch.listeners > 0
        counted = self.readers.count_connection() if is_counted else nullcontext()
        with counted, batch.listen():
            yield


def add_routes(api: APIRouter, batches: BatchRegistry[Any, Any]) -> None:
    reading = Reading()

    @api.post(
        "/rollouts",
        response_model=RolloutsOut,
        responses=ANSWERS,
        openapi_extra=json_body(RolloutsIn),
    )
    async def rollouts(request: Request, idempotency_key: Annotated[str | None, KEY] = None) -> Response:
        """Generate a shaped group for each prompt; with ``stream`` as server-sent events."""
        raw = await read_body(request, MAX_BODY_BYTES)

        key = None
        # The same key with another body is refused, so the key is stored with the body's digest.
        if idempotency_key is not None:
            if not is_name(idempotency_key):
                raise InvalidRequest(KEY_HEADER, f"must be {RULE}, if it is sent")
            digest = (await asyncio.to_thread(hashlib.sha256, raw)).digest()
            key = IdempotencyKey(caller.get().name, idempotency_key, digest, len(raw))

        body = await parse_body(RolloutsIn, raw, "prompts")
        answer_format = AnswerFormat(StreamMode(body.stream), body.chunk_tokens)
        media_type = choose_media_type(request.headers, streams=answer_format.stream is not StreamMode.OFF)
        batch_request = await convert_body(RolloutsIn.to_batch_request, body, num_bytes=len(raw))
        batch = await batches.start_or_find(batch_request, answer_format, key)
        return await _respond(
            request,
            batch,
            media_type,
            reading,
            last_number=0,
        )

    @api.get("/rollouts/{batch_id}", response_model=RolloutsOut, responses=ANSWERS)
    async def attach(batch_id: str, request: Request, last_event_id: Annotated[str | None, LAST] = None) -> Response:
        """Reconnect to a batch that was sent with an Idempotency-Key, while it runs or is kept."""
        text = "0" if last_event_id is None else last_event_id
        is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_EVENT_DIGITS
        if not is_number:
            raise InvalidRequest(LAST_EVENT_HEADER, f"must be the number of an event, got {shortened(text)}")
        last_number = int(text)

        batch = batches.find(batch_id)
        media_type = choose_media_type(request.headers, streams=batch.feed is not None)
        if batch.feed is not None and last_number > batch.feed.last_number:
            raise InvalidRequest(
                LAST_EVENT_HEADER, f"the latest event of this batch is {batch.feed.last_number}, got {last_number}"
            )
        return await _respond(
            request,
            batch,
            media_type,
            reading,
            last_number=last_number,
        )

    @api.delete("/rollouts/{batch_id}")
    async def cancel(batch_id: str) -> CancelledOut:
        """Cancel a batch. Callers that wait for it get an error."""
        return CancelledOut(id=batch_id, cancelled=batches.cancel(batch_id))


def choose_media_type(headers: Headers, *, streams: bool) -> str:
    """Return the media type that the ``Accept`` header prefers, or raise `NotAcceptable`.

    Without the header, every type is accepted. Ties go to our first offer.
    """
    # OpenAI's clients accept only JSON, even for answers that they request as a stream.
    offers = (MEDIA_TYPE, JSON) if streams else (JSON, SAFETENSORS)
    accepted = ",".join(headers.getlist("accept"))
    if not accepted.strip(", \t"):
        return offers[0]

    weights: dict[str, float] = {}
    for part in accepted.split(","):
        # Such as "application/*;q=0.5".
        media_range = _RANGE.match(part)
        if media_range is not None:
            weight = _WEIGHT.search(media_range[2])
            weights[media_range[1].lower()] = float(weight[1]) if weight else 1.0

    def weight_of(offer: str) -> float:
        # The narrowest range that contains the type counts (RFC 9110, 12.5.1).
        main_type = offer.partition("/")[0]
        for pattern in (offer, f"{main_type}/*", "*/*"):
            if pattern in weights:
                return weights[pattern]
        return 0.0

    best = max(offers, key=weight_of)
    if weight_of(best) > 0:
        return best
    if streams:
        raise NotAcceptable("Accept", f'accept {MEDIA_TYPE}, or send a request without "stream" for another form')
    raise NotAcceptable("Accept", f'accept {JSON} or {SAFETENSORS}, or send a request with "stream" for another form')


async def _respond(
    request: Request,
    batch: BatchRun,
    media_type: str,
    reading: Reading,
    *,
    last_number: int,
) -> Response:
    if batch.feed is not None:
        events = encode_events(batch.feed, last_number, batch.answer_format.stream, reading.events)
        return EventStream(events, reading.listen(batch))

    with ExitStack() as cleanup:
        cleanup.enter_context(reading.listen(batch))
        done = await while_connected(request, batch.wait())
        # If all groups failed without tokens, the first error is the answer.
        errors = [result.error for result in done.results if result.error is not None and not result.has_tokens]
        has_no_tokens = len(errors) == len(done.results) and not done.unfinished
        if errors and has_no_tokens:
            raise errors[0]

        def encode() -> bytes | TokenTensors:
            if media_type == JSON:
                return encode_answer(batch, done)
            tensors = TokenTensors()
            tensors.answer = encode_answer(batch, done, tensors)
            return tensors

        encoding = cleanup.enter_context(reading.answers.use((batch, media_type), encode))
        answer = await while_connected(request, encoding)
        # Other connections may use the encoding until the answer was sent.
        until_sent = cleanup.pop_all()

    if isinstance(answer, TokenTensors):
        return answer.response(until_sent)
    return respond(answer, JSON, until_sent)


def encode_answer(batch: BatchRun, done: BatchDone, tensors: TokenTensors | None = None) -> bytes:
    """Encode the answer as JSON. If ``tensors`` are given, they take the tokens, and the JSON has numbers of rows."""
    fields = RolloutsOut(
        id=batch.batch_id,
        policy=batch.plan.policy,
        groups=[],
        survivors=batch.plan.shaping.return_survivors,
        sampling={},
        unfinished=[],
        carried=done.carried,
        shortfall=done.shortfall,
        uninformative=list(done.uninformative),
        skipped=done.skipped,
        usage=sum_usage(done),
    ).model_dump()
    # The caller's sampling parameters may have numbers with more digits than msgspec encodes.
    fields["sampling"] = Raw(json.dumps(dict(batch.sampling), separators=(",", ":")).encode())
    groups = sorted(done.results, key=lambda result: result.number)
    # Items are converted and encoded one after another: together they need much memory, and keep the interpreter.
    lists = {
        "groups": (GroupOut.of(group).model_dump() for group in groups),
        "unfinished": (UnfinishedOut.of(prompt).model_dump() for prompt in done.unfinished),
    }

    # BytesIO does not copy the whole answer at once: the event loop would have to wait for the copy.
    answer = BytesIO()
    separator = b"{"
    for name, value in fields.items():
        answer.write(separator + encode_json(name) + b":")
        separator = b","
        if name not in lists:
            answer.write(encode_json(value))
            continue

        answer.write(b"[")
        for number, item in enumerate(lists[name]):
            if tensors is not None:
                move_tokens_to_rows(item, tensors)
            if number:
                answer.write(b",")
            answer.write(encode_json(item))
        answer.write(b"]")
    answer.write(b"}")
    return answer.getvalue()


def move_tokens_to_rows(group: dict[str, Any], tensors: TokenTensors) -> None:
    """``group``: a group or an unfinished prompt."""
    for name in TOKEN_LISTS:
        for candidate in group.get(name) or ():
            row_number = tensors.add_row(candidate["token_ids"], candidate["logprobs"])
            candidate["token_ids"] = row_number
            if candidate["logprobs"] is not None:
                candidate["logprobs"] = row_number


async def encode_events(
    feed: EventFeed,
    last_number: int,
    stream: StreamMode,
    encodings: SharedEncodings[bytes],
) -> AsyncGenerator[bytes, None]:
    """A large event is encoded in a thread, once for all current readers, and is a chunk of its own."""
    while (numbered_event := await feed.next(last_number)) is not None:
        # Join small events that are ready, up to the first large event.
        small_events = b""
        while numbered_event is not None and not takes_long_to_encode(numbered_event[1]):
            last_number = numbered_event[0]
            small_events += encode_batch_event(*numbered_event, stream)
            numbered_event = None
            if len(small_events) < SLICE_BYTES:
                numbered_event = feed.next_after(last_number)
        if numbered_event is None:
            yield small_events
            continue

        # The small events are sent while the large event is encoded.
        last_number = numbered_event[0]
        with encodings.use((feed, last_number), partial(encode_batch_event, *numbered_event, stream)) as encoding:
            # A slow reader must not keep the tokens of the event alive.
            numbered_event = None
            if small_events:
                yield small_events
            yield await encoding


def takes_long_to_encode(event: Event) -> bool:
    match event:
        case TokenDelta():
            return len(event.token_ids) > INLINE_VALUES
        case GroupResult():
            num_candidates = 0 if event.record is None else len(event.record.candidates)
            num_tokens = sum(len(sample.token_ids) for sample in event.samples.values())
            num_tokens += sum(len(aborted.sample.token_ids) for aborted in (event.aborted or {}).values())
            return VALUES_PER_CANDIDATE * num_candidates + num_tokens > INLINE_VALUES
        case BatchDone():
            has_groups = any(prompt.group is not None for prompt in event.unfinished)
            return has_groups or VALUES_PER_CANDIDATE * len(event.unfinished) > INLINE_VALUES
        case _:
            return False


def encode_batch_event(number: int, event: Event, stream: StreamMode) -> bytes:
    # msgspec encodes tokens faster than the standard library. As in `encode_event`, the text must be ASCII.
    if isinstance(event, TokenDelta):
        delta = {
            "trajectory_id": event.trajectory_id,
            "number": event.number,
            "start": event.start,
            "token_ids": event.token_ids,
            "logprobs": event.logprobs,
        }
        return encode_text_event("delta", encode_ascii(delta), number)
    if isinstance(event, GroupResult):
        left_out = SENT_IN_DELTAS if stream is StreamMode.TOKENS else None
        group = GroupOut.of(event).model_dump(exclude=left_out)
        return encode_text_event("group", encode_ascii(group), number)
    name, data = _convert_small_event(event)
    return encode_event(name, data, number)


def _convert_small_event(event: Event) -> tuple[str, dict[str, Any]]:
    match event:
        case TrajectorySelected(trajectory_id, group, sample, cut, verdict):
            return "trajectory", {
                "trajectory_id": trajectory_id,
                "number": group,
                "length": len(sample.token_ids),
                "finish_reason": sample.finish_reason,
                "text": sample.text,
                "cut": cut,
                "reward": verdict.reward,
                "correct": verdict.correct,
            }
        case CandidateDiscarded(trajectory_id, group, length, reason):
            return "discard", {"trajectory_id": trajectory_id, "number": group, "length": length, "reason": reason}
        case BatchStarted(batch_id, policy, groups, survivors, sampling):
            return "batch", {
                "id": batch_id,
                "policy": policy,
                "groups": groups,
                "survivors": survivors,
                "sampling": sampling,
            }
        case BatchDone():
            return "done", {
                "id": event.batch_id,
                "usage": sum_usage(event).model_dump(mode="json"),
                "unfinished": [UnfinishedOut.of(prompt).model_dump(mode="json") for prompt in event.unfinished],
                "carried": event.carried,
                "shortfall": event.shortfall,
                "uninformative": list(event.uninformative),
                "skipped": event.skipped,
            }
        case BatchFailed(error):
            return "error", {"error": describe_error(error)}
    raise AssertionError(event)


def encode_ascii(value: Any) -> str:
    text = encode_json(value).decode()
    if text.isascii():
        return text
    # Other characters are escaped as by json.dumps, without its quotes.
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)
