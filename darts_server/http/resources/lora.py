"""``/darts/v1/weights/lora``: LoRA adapters for the model, pushed or read from a folder of the server's machine."""

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field

from darts_server.http.body import Body, parse_body, read_body
from darts_server.http.openapi import binary_body, json_body
from darts_server.http.resources.weights import (
    MAX_REQUEST_BYTES,
    MAX_VERSION,
    RULE,
    VERSION,
    WeightsAnswer,
    answer,
    body_of,
)
from darts_server.identifiers import LORA_NAME
from darts_server.weights.rules import Rule
from darts_server.weights.updates import Updates

MAX_CONFIG_CHARS = 4096
Name = Annotated[
    str,
    Path(pattern=LORA_NAME, description="Model name in requests."),
]


class LoraIn(Body):
    """A LoRA adapter on the server's machine."""

    path: str = Field(description="Folder as PEFT saves it, under --weights-root.")
    rule: Literal["finish", "keep", "restart"] | None = Field(None, description=RULE)
    version: int | None = Field(None, ge=0, le=MAX_VERSION, description=VERSION)


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
        rule: Annotated[Literal["finish", "keep", "restart"] | None, Query(description=RULE)] = None,
        version: Annotated[int | None, Query(ge=0, le=MAX_VERSION, description=VERSION)] = None,
    ) -> WeightsAnswer:
        """Serve this adapter under that name, replacing an earlier one, or change nothing."""
        await updates.loras.push(name, config, body_of(request), _rule(rule), version)
        return answer(updates)

    @api.post("/weights/lora/{name}", openapi_extra=json_body(LoraIn))
    async def load(name: Name, request: Request) -> WeightsAnswer:
        """Serve the adapter in that folder under that name, or change nothing."""
        body = await parse_body(LoraIn, await read_body(request, MAX_REQUEST_BYTES))
        await updates.loras.load(name, body.path, _rule(body.rule), body.version)
        return answer(updates)

    @api.delete("/weights/lora/{name}")
    async def remove(name: Name) -> WeightsAnswer:
        """Stop serving the adapter, after all running requests have finished."""
        await updates.loras.remove(name)
        return answer(updates)

    return api


def _rule(rule: str | None) -> Rule | None:
    return None if rule is None else Rule(rule)
