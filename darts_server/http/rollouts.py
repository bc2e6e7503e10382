"""``POST /darts/v1/rollouts``: groups for a whole batch of prompts, as one answer or as events."""

import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from darts_server.exceptions import InvalidRequest
from darts_server.http.body import read_body
from darts_server.http.connection import while_connected
from darts_server.http.rollouts_wire import GroupOut, RolloutsIn, RolloutsOut, UsageOut
from darts_server.rollout.submission import Asked, GroupResult, Submission, Submissions
from darts_server.types import PromptSpec

LARGEST_BODY = 256 * 1024 * 1024
"""Bytes: 4,096 prompts of 8,192 tokens have half of that."""
EVENTS = "text/event-stream"


def routes(submissions: Callable[[], Submissions[Any, Any]]) -> APIRouter:
    """The route. ``submissions`` is asked when a request comes: the engine may start after the routes are made."""
    api = APIRouter()

    @api.post(
        "/rollouts",
        response_model=RolloutsOut,
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": RolloutsIn.model_json_schema()}},
            }
        },
    )
    async def rollouts(request: Request) -> Response:
        """A shaped group for each prompt. With ``"stream": "groups"`` each is an event as soon as it is decided."""
        body = _checked(await read_body(request, LARGEST_BODY))
        began = time.monotonic()
        submission = await submissions().submit(_asked(body))
        if body.stream:
            return StreamingResponse(_events(submission, body, began), media_type=EVENTS)
        return await while_connected(request, _answer(submission, body, began))

    return api


async def _answer(submission: Submission[Any, Any], body: RolloutsIn, began: float) -> Response:
    async with aclosing(submission.results()) as results:
        groups = [result async for result in results]
    errors = [result.error for result in groups if result.error is not None]
    if len(errors) == len(groups):  # there is nothing to answer with
        raise errors[0]
    made = [GroupOut.of(group, body.prompts[group.number]) for group in sorted(groups, key=lambda g: g.number)]
    usage = UsageOut.of(groups, time.monotonic() - began)
    answer = RolloutsOut(id=submission.batch_id, policy=submission.plan.policy, groups=made, usage=usage)
    return JSONResponse(answer.model_dump(mode="json"))


async def _events(submission: Submission[Any, Any], body: RolloutsIn, began: float) -> AsyncGenerator[str, None]:
    groups: list[GroupResult] = []
    yield _event("batch", {"id": submission.batch_id, "policy": submission.plan.policy, "groups": len(body.prompts)})
    async with aclosing(submission.results()) as results:
        async for group in results:
            groups.append(group)
            yield _event("group", GroupOut.of(group, body.prompts[group.number]).model_dump(mode="json"))
    usage = UsageOut.of(groups, time.monotonic() - began)
    yield _event("done", {"id": submission.batch_id, "usage": usage.model_dump(mode="json")})


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def _asked(body: RolloutsIn) -> Asked:
    return Asked(
        prompts=[PromptSpec(p.token_ids, p.messages, p.text, p.key) for p in body.prompts],
        group_size=body.group_size,
        sampling=body.sampling,
        policy=body.policy,
        budget=body.budget,
    )


def _checked(body: bytes) -> RolloutsIn:
    try:
        return RolloutsIn.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        raise InvalidRequest(where or "body", str(first["msg"]).removeprefix("Value error, ")) from error
