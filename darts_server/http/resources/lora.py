"""``/darts/v1/weights/lora``: LoRA adapters for the model, pushed or read from a folder of the server's machine."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field

from darts_server.http.body import Body, parse_body, read_body
from darts_server.http.openapi import binary_body, json_body
from darts_server.http.resources.weights import (
    EXPIRES_AFTER,
    MAX_REQUEST_BYTES,
    MAX_STAGE_SECONDS,
    MAX_VERSION,
    RULE,
    STAGE,
    VERSION,
    ExpiresAfter,
    WeightsAnswer,
    answer,
    body_of,
    rule_of,
    stage_seconds,
)
from darts_server.identifiers import LORA_NAME
from darts_server.weights.rules import RuleName
from darts_server.weights.updates import Updates

MAX_CONFIG_CHARS = 4096
Name = Annotated[
    str,
    Path(pattern=LORA_NAME, description="Model name in requests."),
]


class LoraIn(Body):
    """A LoRA adapter on the server's machine."""

    path: str = Field(description="Folder as PEFT saves it, under --weights-root.")
    rule: RuleName | None = Field(None, description=RULE)
    version: int | None = Field(None, ge=0, le=MAX_VERSION, description=VERSION)
    stage: bool = Field(False, description=STAGE)
    expires_after: float | None = Field(None, ge=1, le=MAX_STAGE_SECONDS, description=EXPIRES_AFTER)


def routes(updates: Updates) -> APIRouter:
    api = APIRouter()

    @api.put("/weights/lora/{name}", openapi_extra=binary_body("PEFT's adapter_model.safetensors."))
    async def push(
        name: Name,
        request: Request,
        config: Annotated[
            str,
            Query(
                max_length=MAX_CONFIG_CHARS, description="PEFT's adapter_config.json; `r` and `lora_alpha` are enough."
            ),
        ],
        rule: Annotated[RuleName | None, Query(description=RULE)] = None,
        version: Annotated[int | None, Query(ge=0, le=MAX_VERSION, description=VERSION)] = None,
        stage: Annotated[bool, Query(description=STAGE)] = False,
        expires_after: ExpiresAfter = None,
    ) -> WeightsAnswer:
        """Serve this adapter under that name, replacing an earlier one, or change nothing."""
        seconds = stage_seconds(stage, expires_after)
        await updates.loras.push(name, config, body_of(request), rule_of(rule), version, seconds)
        return answer(updates)

    @api.post("/weights/lora/{name}", openapi_extra=json_body(LoraIn))
    async def load(name: Name, request: Request) -> WeightsAnswer:
        """Serve the adapter in that folder under that name, or change nothing."""
        body = await parse_body(LoraIn, await read_body(request, MAX_REQUEST_BYTES))
        seconds = stage_seconds(body.stage, body.expires_after)
        await updates.loras.load(name, body.path, rule_of(body.rule), body.version, stage_seconds=seconds)
        return answer(updates)

    @api.delete("/weights/lora/{name}")
    async def remove(name: Name) -> WeightsAnswer:
        """Stop serving the adapter, after all running requests have finished."""
        await updates.loras.remove(name)
        return answer(updates)

    return api
