"""``/darts/v1/rollouts``: groups for a batch of prompts, as one answer or as events."""

import asyncio
import hashlib
from reprlib import repr as shortened
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from starlette.datastructures import Headers
from starlette.responses import Response

from darts_server.exceptions import InvalidRequest, NotAcceptable
from darts_server.http.body import converted, parse_body, read_body
from darts_server.http.openapi import json_body
from darts_server.http.requests import choose_media_type, while_connected
from darts_server.http.resources.rollouts_answers import encode_answer, encode_tensors, stream_events
from darts_server.http.resources.rollouts_models import CancelledOut, RolloutsIn, RolloutsOut
from darts_server.http.sse import MEDIA_TYPE
from darts_server.http.token_tensors import MEDIA_TYPE as SAFETENSORS
from darts_server.identifiers import NAME_CHARS, RULE, is_name
from darts_server.rollout.batches.registry import KEY_HEADER, BatchRegistry, IdempotencyKey
from darts_server.rollout.batches.request import BatchRequest
from darts_server.rollout.batches.run import AnswerFormat, BatchRun, StreamMode
from darts_server.serving.admission import caller
from darts_server.types import PromptSpec

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Enough for 1,024 prompts of 8,192 tokens, which are read in a second. Larger batches are sent in several requests."""
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
    description="Of a stream: the number of the last event that was received.",
    json_schema_extra={"pattern": f"^[0-9]{{1,{MAX_EVENT_DIGITS}}}$"},
)
JSON = "application/json"
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


def routes(batches: BatchRegistry[Any, Any]) -> APIRouter:
    api = APIRouter()

    @api.post("/rollouts", response_model=RolloutsOut, responses=ANSWERS, openapi_extra=json_body(RolloutsIn))
    async def rollouts(
        request: Request,
        idempotency_key: Annotated[str | None, KEY] = None,
    ) -> Response:
        """Generate a shaped group for each prompt; with ``stream`` as server-sent events."""
        raw = await read_body(request, MAX_BODY_BYTES)
        key = None if idempotency_key is None else await _idempotency_key(idempotency_key, raw)
        body = await parse_body(RolloutsIn, raw, "prompts")
        answer_format = AnswerFormat(StreamMode(body.stream), body.chunk_tokens)
        media_type = choose_form(request.headers, streams=answer_format.stream is not StreamMode.OFF)
        batch_request = await converted(_batch_request, body, raw)
        batch = await batches.open(batch_request, answer_format, key)
        return await _respond(request, batch, 0, media_type)

    @api.get("/rollouts/{batch_id}", response_model=RolloutsOut, responses=ANSWERS)
    async def attach(
        batch_id: str,
        request: Request,
        last_event_id: Annotated[str | None, LAST] = None,
    ) -> Response:
        """Reconnect to a batch that was sent with an Idempotency-Key, while it runs or is kept."""
        after = 0 if last_event_id is None else _event_number(last_event_id)
        batch = batches.find(batch_id)
        streams = batch.answer_format.stream is not StreamMode.OFF
        media_type = choose_form(request.headers, streams=streams)
        if streams and after > batch.feed.last_number:
            raise InvalidRequest(
                LAST_EVENT_HEADER, f"the latest event of this batch is {batch.feed.last_number}, got {after}"
            )
        return await _respond(request, batch, after, media_type)

    @api.delete("/rollouts/{batch_id}")
    async def cancel(batch_id: str) -> CancelledOut:
        """Cancel a batch. Callers that wait for it get an error."""
        return CancelledOut(id=batch_id, cancelled=batches.cancel(batch_id))

    return api


def choose_form(headers: Headers, *, streams: bool) -> str:
    """Return the media type of a batch's answer.

    Raises:
        NotAcceptable
    """
    # OpenAI's clients accept JSON alone, also of answers that they request as a stream.
    if (found := choose_media_type(headers, (MEDIA_TYPE, JSON) if streams else (JSON, SAFETENSORS))) is None:
        offers = MEDIA_TYPE if streams else f"{JSON} or {SAFETENSORS}"
        other = "without" if streams else "with"
        raise NotAcceptable(
            "Accept", f'this answer can be {offers}; {other} "stream" in the request it has another form'
        )
    return found


async def _respond(request: Request, batch: BatchRun, after: int, media_type: str) -> Response:
    if batch.answer_format.stream is not StreamMode.OFF:
        return stream_events(batch, after)
    with batch.listen():
        return await while_connected(request, _answer(batch, media_type))


async def _answer(batch: BatchRun, media_type: str = JSON) -> Response:
    done = await batch.wait()
    errors = [result.error for result in done.results if result.error is not None and not result.has_tokens]
    if errors and len(errors) == len(done.results) and not done.unfinished:  # nothing to return
        raise errors[0]
    # In a thread: a large answer takes long. The interpreter is free for the event loop between two trajectories.
    if media_type == SAFETENSORS:
        return (await asyncio.to_thread(encode_tensors, batch, done)).response()
    return Response(await asyncio.to_thread(encode_answer, batch, done), media_type=JSON)


def _batch_request(body: RolloutsIn) -> BatchRequest:
    return BatchRequest(
        prompts=[PromptSpec(p.token_ids, p.messages, p.text, p.key, p.metadata) for p in body.prompts],
        group_size=body.group_size,
        sampling=body.sampling,
        policy=body.policy,
        budget=body.budget,
        num_groups=body.num_groups,
        min_groups=body.min_groups,
        survivors=body.survivors,
        carry=body.carry,
        carried=body.carried,
    )


async def _idempotency_key(key: str, body: bytes) -> IdempotencyKey:
    if not is_name(key):
        raise InvalidRequest(KEY_HEADER, f"must be {RULE}, if it is sent")
    digest = (await asyncio.to_thread(hashlib.sha256, body)).digest()
    return IdempotencyKey(caller.get().name, key, digest, len(body))


def _event_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_EVENT_DIGITS):
        raise InvalidRequest(LAST_EVENT_HEADER, f"must be the number of an event, got {shortened(text)}")
    return int(text)
