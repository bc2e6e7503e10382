"""``/darts/v1/observations``: what servers behind an ingress learn from each other."""

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from darts_server.exceptions import InvalidRequest
from darts_server.http.body import converted, parse_body, read_body
from darts_server.http.openapi import json_body
from darts_server.http.resources.observations_models import Encoder, LearnedAnswer, ObservationsAnswer, ObservationsIn
from darts_server.rollout.exchange.exchange import Exchange

MAX_BODY_BYTES = 16 * 1024 * 1024
PER_ANSWER = 256
"""Observations. They take some 17 ms to write in groups of 16."""
PER_TURN = 32
"""Observations that are written in one turn of the event loop."""

EXAMPLE = {
    "observations": [
        {
            "life": "8f3a91c0d2e4b657",
            "number": 1,
            "kind": "group",
            "prompt_key": "gsm8k/7",
            "policy": "uniform",
            "size": 1,
            "candidates": [{"tokens": 120, "finish_reason": "stop", "selected": True}, {"tokens": 121}],
        }
    ]
}


def routes(exchange: Exchange) -> APIRouter:
    api = APIRouter()

    @api.get("/observations", response_model=ObservationsAnswer)
    async def observations(
        after: Annotated[
            str, Query(max_length=100, description="`LIFE:NUMBER` of the last one that is known; all that are kept.")
        ] = "",
    ) -> Response:
        """Return the oldest observations of this server that are newer, at most 256."""
        life, number = _position(after)
        found = exchange.after(life, number, PER_ANSWER)
        encoder = Encoder(exchange.log.life)
        fields = {
            "life": exchange.log.life,
            "last": exchange.log.last,
            "learned": dict(exchange.positions.all),
            "is_new": exchange.is_new,
        }
        texts = []
        for each in found:
            texts.append(_json(encoder.encode(*each)))
            if len(texts) % PER_TURN == 0:
                await asyncio.sleep(0)
        body = f'{_json(fields)[:-1]},"observations":[{",".join(texts)}]}}'
        return Response(body, media_type="application/json")

    @api.post("/observations", openapi_extra=json_body(ObservationsIn, EXAMPLE))
    async def learn(request: Request) -> LearnedAnswer:
        """Learn from observations of other servers as from this server's own, from each of them once."""
        raw = await read_body(request, MAX_BODY_BYTES)
        body = await parse_body(ObservationsIn, raw, "observations")
        result = await exchange.learn_from_others(await converted(ObservationsIn.to_observations, body, raw))
        return LearnedAnswer(**asdict(result))

    return api


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _position(after: str) -> tuple[str, int]:
    """
    Raises:
        InvalidRequest
    """
    life, colon, number = after.rpartition(":")
    if not after:
        return "", 0
    if not colon or not life or not (number.isascii() and number.isdecimal()):
        raise InvalidRequest("after", f"must be LIFE:NUMBER of an observation, got {after!r}; omit it for all")
    return life, int(number)
