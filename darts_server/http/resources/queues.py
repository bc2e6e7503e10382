"""``/darts/v1/queue``: prompts in, groups out, each acknowledged once."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from darts_server.exceptions import Forbidden, InvalidRequest, ServerStopping
from darts_server.http.body import converted, parse_body, read_body
from darts_server.http.disconnect import while_connected
from darts_server.http.openapi import json_body
from darts_server.http.resources.queue_models import (
    DEFAULT_JOB,
    AckedOut,
    AckIn,
    AckOut,
    DroppedOut,
    JobOut,
    PutOut,
    QueueIn,
    QueueOut,
    TakenGroupsOut,
    TakenOut,
)
from darts_server.http.resources.rollouts import ANSWERS, KEY, MAX_BODY_BYTES, check_key
from darts_server.http.sse import MEDIA_TYPE, EventStream, encode_text
from darts_server.identifiers import NAME_CHARS, RULE, is_name
from darts_server.rollout.batches.registry import KEY_HEADER
from darts_server.rollout.queue.entries import AckOutcome
from darts_server.rollout.queue.handout import TakenGroup
from darts_server.rollout.queue.puts import Put, terms_of
from darts_server.rollout.queue.queue import PromptQueue
from darts_server.serving.admission import Caller, caller
from darts_server.types import PromptSpec

MAX_COUNT = 4096
MAX_WAIT_SECONDS = 60.0
"""Proxies close connections that are silent for a minute."""
STALL_SECONDS = 60.0
"""A reader of a stream that accepts nothing for so long is dropped; its leases expire."""
NO_STORE = {"Cache-Control": "no-store"}

JobName = Annotated[str, Query(min_length=1, max_length=NAME_CHARS, description="Name of the job.")]
Count = Annotated[
    int,
    Query(
        ge=1,
        le=MAX_COUNT,
        description="Number of groups. Of a stream: how many may be handed out and not acknowledged at a time.",
    ),
]
Wait = Annotated[
    float,
    Query(ge=0, le=MAX_WAIT_SECONDS, description="Seconds to wait for as many groups; then those that are there come."),
]
LeaseSeconds = Annotated[
    float | None,
    Query(
        ge=1, le=604800, description="Seconds until the groups are handed out again. Default: --queue-lease-seconds."
    ),
]
TAKE_KEY = Header(
    alias=KEY_HEADER,
    description="A name of your choice. A request with the same name gets the groups again that the first one has "
    "leased, while they are; for requests whose answer was lost. Not for streams.",
    json_schema_extra={"minLength": 1, "maxLength": NAME_CHARS},
)
Owner = Annotated[
    str | None,
    Query(max_length=NAME_CHARS, description="For admins: whose job, as `owner` in `GET /darts/v1/queue`."),
]


@dataclass(frozen=True, slots=True)
class Queue:
    """The queue, and the seconds of a lease that names none."""

    prompts: PromptQueue[Any, Any]
    lease_seconds: float


def routes(queue: Queue) -> APIRouter:
    api = APIRouter()

    @api.post("/queue", response_model=PutOut, openapi_extra=json_body(QueueIn))
    async def put(request: Request, idempotency_key: Annotated[str | None, KEY] = None) -> PutOut:
        """Add prompts to a job. They are kept until their groups were acknowledged, also across a restart."""
        raw = await read_body(request, MAX_BODY_BYTES)
        if idempotency_key is not None:
            check_key(idempotency_key)
        body = await parse_body(QueueIn, raw, "prompts")
        digest = "" if idempotency_key is None else await asyncio.to_thread(lambda: hashlib.sha256(raw).hexdigest())
        result = await queue.prompts.put(
            caller.get(), await converted(partial(_put, key=idempotency_key, digest=digest), body, raw)
        )
        return PutOut(job=body.job, ids=list(result.names), added=result.added)

    @api.get("/queue")
    async def status() -> QueueOut:
        """Return your jobs."""
        prompts, who = queue.prompts, caller.get()
        jobs = [
            JobOut.of(each, prompts.version, prompts.waits_for(each), for_admin=who.is_admin)
            for each in prompts.jobs(who)
        ]
        return QueueOut(weight_version=prompts.version, durable=prompts.is_durable, jobs=jobs)

    @api.get("/queue/groups", response_model=TakenGroupsOut, responses=ANSWERS)
    async def take(
        request: Request,
        count: Count = 1,
        job: JobName = DEFAULT_JOB,
        wait: Wait = 10.0,
        lease_seconds: LeaseSeconds = None,
        idempotency_key: Annotated[str | None, TAKE_KEY] = None,
    ) -> Response:
        """Take the next complete groups of a job; with ``Accept: text/event-stream``, one after the other for ever.

        Each is leased to you until you acknowledge it.
        """
        if request.headers.get("sec-fetch-site", "none") in ("cross-site", "same-site"):
            raise Forbidden("web pages of other sites may not take groups")
        if not is_name(job):
            raise InvalidRequest("job", f"must be {RULE}")
        if idempotency_key is not None:
            check_key(idempotency_key)
        seconds = queue.lease_seconds if lease_seconds is None else lease_seconds
        who, prompts = caller.get(), queue.prompts
        if MEDIA_TYPE in request.headers.get("accept", ""):
            events = event_chunks(prompts, who, job, count, seconds)
            return EventStream(events, prompts.count_consumer(who), send_timeout=STALL_SECONDS)
        with prompts.count_consumer(who):
            groups = await while_connected(request, prompts.take(who, job, count, wait, seconds, key=idempotency_key))
        # In a thread: a large answer takes a while.
        return Response(await asyncio.to_thread(_encode, groups), media_type="application/json", headers=NO_STORE)

    @api.post("/queue/ack", openapi_extra=json_body(AckIn))
    async def acknowledge(request: Request) -> AckOut:
        """Acknowledge groups: they are done for good. Repeated requests change nothing."""
        body = await parse_body(AckIn, await read_body(request, MAX_BODY_BYTES))
        outcomes = await queue.prompts.acknowledge(caller.get(), body.leases)
        return AckOut(
            acknowledged=outcomes.count(AckOutcome.ACKNOWLEDGED),
            leases=[
                AckedOut(lease=lease, outcome=outcome) for lease, outcome in zip(body.leases, outcomes, strict=True)
            ],
        )

    @api.delete("/queue/jobs/{job:path}")  # callers' own names may have slashes
    async def drop(job: str, owner: Owner = None) -> DroppedOut:
        """Delete a job with its prompts and groups. What runs is stopped."""
        who = caller.get()
        if owner is not None and not who.is_admin:
            raise Forbidden("owner is for admins; leave it out to delete a job of yours")
        return DroppedOut(job=job, dropped=await queue.prompts.drop(who, job, owner))

    return api


async def event_chunks(
    prompts: PromptQueue[Any, Any], who: Caller, job: str, count: int, lease_seconds: float
) -> AsyncGenerator[bytes, None]:
    """Yield each group as it is handed out, while fewer than ``count`` are handed out and not acknowledged."""
    leases: list[str] = []
    while not prompts.is_stopping:
        leases = prompts.unacknowledged(leases)
        if len(leases) >= count:
            await prompts.wait_for_change(who, job, 1.0)
            continue
        try:
            groups = await prompts.take(who, job, 1, 1.0, lease_seconds)
        except ServerStopping:
            return
        for taken in groups:
            leases.append(taken.lease)
            yield encode_text("group", TakenOut.encode(taken))


def _encode(groups: Sequence[TakenGroup]) -> bytes:
    answer = BytesIO()  # it does not copy the whole answer at once, for which the event loop would have to wait
    answer.write(b'{"groups":[')
    for place, group in enumerate(groups):
        answer.write(b"," * (place > 0) + TakenOut.encode(group).encode())
    answer.write(b"]}")
    return answer.getvalue()


def _put(body: QueueIn, key: str | None, digest: str) -> Put:
    return Put(
        job=body.job,
        prompts=[PromptSpec(p.token_ids, p.messages, p.text, p.key, p.metadata) for p in body.prompts],
        names=[prompt.id for prompt in body.prompts],
        terms=terms_of(body.group_size, body.sampling, body.policy),
        priority=body.priority,
        options=body.options,
        taken=body.taken,
        key=key,
        digest=digest,
    )
