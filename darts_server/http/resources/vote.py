"""``POST /darts/v1/vote``: answer a question by a vote of several trajectories."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from darts_server.http.body import parse_body, read_body
from darts_server.http.openapi import json_body
from darts_server.http.requests import while_connected
from darts_server.http.resources.vote_models import VoteIn, VoteOut
from darts_server.rollout.voting.runner import VoteRequest, VoteRunner

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Enough for a prompt of a million tokens."""
EXAMPLES = (
    {"prompt": "7a-5b*4>", "n": 8, "sampling": {"max_tokens": 200}, "pattern": "#([0-9])"},
    {
        "messages": [{"role": "user", "content": "Is 7 a prime number?"}],
        "n": 8,
        "pattern": {"choices": ["yes", "no"]},
        "weights": "rank",
        "score": "logprob",
    },
)


def routes(votes: VoteRunner[Any, Any]) -> APIRouter:
    api = APIRouter()

    @api.post("/vote", response_model=VoteOut, openapi_extra=json_body(VoteIn, *EXAMPLES))
    async def vote(request: Request) -> Response:
        """Sample one prompt until the result of the vote is certain; stop the remaining candidates."""
        body = await parse_body(VoteIn, await read_body(request, MAX_BODY_BYTES))
        return await while_connected(request, _answer(votes, body.question))

    return api


async def _answer(votes: VoteRunner[Any, Any], question: VoteRequest) -> Response:
    return JSONResponse(VoteOut.of(await votes.run(question)).model_dump(mode="json"))
