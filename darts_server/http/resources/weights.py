"""``/darts/v1/weights``: new weights for the model, pushed, pulled or read from a folder of the server's machine."""

from collections.abc import AsyncIterator, Callable
from typing import Annotated, Literal, Self

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from darts_server.http.body import chunks_of, parsed, read_body
from darts_server.http.openapi import binary_body, json_body
from darts_server.types import UpdateRecord
from darts_server.weights.rules import Rule
from darts_server.weights.updates import UpdateOptions, Updates

LARGEST_REQUEST = 64 * 1024
"""Bytes of the JSON that names a path."""
LARGEST_VERSION = 2**53 - 1
"""JSON's numbers are whole up to here."""
RULE = "What becomes of groups that run; the server's setting if left out."
VERSION = "Of the new weights; the next one if left out."
PARTIAL = "Whether tensors may be missing; these stay as they are."


class WeightsIn(BaseModel):
    """Weights on the server's machine, or where it can pull them."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"oneOf": [{"required": ["path"]}, {"required": ["url"]}]}
    )

    path: str = Field("", description="Safetensors file, or a folder of these; under --weights-root.")
    url: str = Field("", description="Safetensors file to be pulled over HTTP, from one of --weights-hosts.")
    rule: Literal["finish", "keep", "restart"] | None = Field(None, description=RULE)
    version: int | None = Field(None, ge=0, le=LARGEST_VERSION, description=VERSION)
    partial: bool = Field(False, description=PARTIAL)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len(self.model_fields_set & {"path", "url"}) != 1:
            raise ValueError("must have either path or url")
        return self


class UpdateAnswer(BaseModel):
    """What became of an update."""

    version: int = Field(description="Served after it.")
    outcome: Literal["completed", "refused", "failed", "lost"]
    source: str = Field(description="`push`, `disk`, `http`, `delete`, or `vllm` for its own routes.")
    lora: str | None = Field(description="Name of the LoRA adapter that was updated; null for the model itself.")
    rule: str | None
    partial: bool
    seconds: dict[str, float] = Field(
        description="By phase: `transfer`, `check`, `wait` for groups, `pause`, `load`, `restore`, `resume`."
    )
    error: str | None

    @classmethod
    def of(cls, record: UpdateRecord) -> "UpdateAnswer":
        return cls(
            version=record.version,
            outcome=record.outcome.value,
            source=record.source,
            lora=record.lora,
            rule=record.rule,
            partial=record.partial,
            seconds=dict(record.seconds),
            error=record.error,
        )


class LoraAnswer(BaseModel):
    """A LoRA adapter that was pushed."""

    name: str = Field(description="That of the model in requests.")
    version: int = Field(description="Of the update that it came with.")
    rank: int
    scale: float = Field(description="What the product of its matrices is multiplied by.")


class WeightsAnswer(BaseModel):
    """The weights that are served."""

    version: int
    state: str = Field(description="`serving`, or how far an update is.")
    intact: bool = Field(description="Whether all that the model holds is of that version. If not, send a full set.")
    rule: str = Field(description="For updates that name none.")
    loras: list[LoraAnswer]
    last: UpdateAnswer | None = Field(description="The last update that ended, whichever way.")
    last_error: str | None = Field(description="Of the last update that did not succeed.")


def routes(updates: Updates) -> APIRouter:
    api = APIRouter()

    @api.get("/weights")
    async def read() -> WeightsAnswer:
        """Which version is served, and how updates went."""
        return answer(updates)

    @api.put("/weights", openapi_extra=binary_body("A safetensors file."))
    async def push(
        request: Request,
        rule: Annotated[Literal["finish", "keep", "restart"] | None, Query(description=RULE)] = None,
        version: Annotated[int | None, Query(ge=0, le=LARGEST_VERSION, description=VERSION)] = None,
        partial: Annotated[bool, Query(description=PARTIAL)] = False,
    ) -> WeightsAnswer:
        """Gives the model these weights, or changes nothing. Answers when they are served."""
        await updates.push(body_of(request), _options(rule, version, partial))
        return answer(updates)

    @api.post("/weights", openapi_extra=json_body(WeightsIn))
    async def load(request: Request) -> WeightsAnswer:
        """Gives the model weights from there, or changes nothing. Answers when they are served."""
        body = parsed(WeightsIn, await read_body(request, LARGEST_REQUEST))
        options = _options(body.rule, body.version, body.partial)
        if "path" in body.model_fields_set:
            await updates.load(body.path, options)
        else:
            await updates.pull(body.url, options)
        return answer(updates)

    return api


def body_of(request: Request) -> Callable[[int], AsyncIterator[bytes]]:
    """From how many bytes may come, the body as it comes."""
    return lambda limit: chunks_of(request, limit)


def _options(rule: str | None, version: int | None, partial: bool) -> UpdateOptions:
    return UpdateOptions(None if rule is None else Rule(rule), version, partial)


def answer(updates: Updates) -> WeightsAnswer:
    """What is served now."""
    return WeightsAnswer(
        version=updates.version,
        state=updates.state.value,
        intact=updates.intact,
        rule=updates.rule.value,
        loras=[
            LoraAnswer(name=name, version=one.version, rank=one.config.rank, scale=one.config.scale)
            for name, one in updates.loras.served.items()
        ],
        last=None if updates.last is None else UpdateAnswer.of(updates.last),
        last_error=updates.last_error,
    )
