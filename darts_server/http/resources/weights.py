"""``/darts/v1/weights``: update the model's weights and LoRA adapters, from a request's body or from a folder."""

from typing import Annotated, Literal, Self

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from darts_server.http.body import Body, parse_body, read_body, stream_body
from darts_server.http.openapi import binary_body, json_body
from darts_server.identifiers import LORA_NAME
from darts_server.records import UpdateRecord
from darts_server.types import UpdateOutcome
from darts_server.weights.port import Rule, RuleName
from darts_server.weights.updates import Updates

MAX_REQUEST_BYTES = 64 * 1024
MAX_VERSION = 2**53 - 1
"""The largest whole number that every JSON parser keeps exact."""
RULE = "What happens to running groups; --weights-rule by default."
VERSION = "Version of the new weights; the next number by default."
PARTIAL = "Whether tensors may be missing. Missing tensors keep their values."
REPEAT_VERSION = "Whether the version may be the served version, for weights that a trainer sends again."
CHECK_FINITE = "Whether the update is refused if a tensor has NaN or infinity."
LoraName = Annotated[str, Path(pattern=LORA_NAME, description="Model name in requests.")]


class LoraIn(Body):
    """A LoRA adapter on the server's machine."""

    path: str = Field(description="Folder as PEFT saves it, under --weights-root.")
    rule: RuleName | None = Field(None, description=RULE)
    version: int | None = Field(
        None,
        ge=0,
        le=MAX_VERSION,
        description=VERSION,
    )
    check_finite: bool = Field(True, description=CHECK_FINITE)


class WeightsIn(LoraIn):
    """Weights on the server's machine."""

    path: str = Field(description="Safetensors file, or a folder of them, under --weights-root.")
    partial: bool = Field(False, description=PARTIAL)
    repeat_version: bool = Field(False, description=REPEAT_VERSION)


class UpdateAnswer(BaseModel):
    """The result of an update, with the fields of `UpdateRecord`."""

    model_config = ConfigDict(from_attributes=True)

    version: int = Field(description="Version served after it.")
    outcome: Literal["completed", "refused", "failed", "lost"]
    source: str = Field(description="`push`, `disk`, `delete`, or `vllm` for its own routes.")
    lora: str | None = Field(description="Name of the LoRA adapter that was updated; null for the model itself.")
    rule: str | None
    partial: bool
    seconds: dict[str, float] = Field(
        description="By phase: `transfer`, `check`, `wait` for groups, `pause`, `load`, `restore`, `resume`."
    )
    error: str | None

    @classmethod
    def of(cls, record: UpdateRecord | None) -> Self | None:
        if record is None:
            return None
        return cls.model_validate(record)


class LoraAnswer(BaseModel):
    """A LoRA adapter that is served."""

    name: str = Field(description="Model name in requests.")
    version: int = Field(description="Version of its update.")
    rank: int
    scale: float = Field(description="Factor of the product of its matrices.")


class WeightsAnswer(BaseModel):
    """The weights that are served."""

    version: int
    state: str = Field(description="`serving`, or the state of the running update.")
    intact: bool = Field(description="Whether all weights have this version. If not, send a full set.")
    rule: str = Field(description="Rule for updates without `rule`.")
    loras: list[LoraAnswer]
    last: UpdateAnswer | None = Field(description="The last update, successful or not.")
    last_error: str | None = Field(
        description="Error of the last failed update, until an update succeeds and `intact` is true."
    )


def add_routes(api: APIRouter, updates: Updates) -> None:
    @api.get("/weights")
    async def read() -> WeightsAnswer:
        """Return the served version and the result of the last update."""
        return describe_weights(updates)

    @api.put("/weights", openapi_extra=binary_body("A safetensors file."))
    async def push(
        request: Request,
        rule: Annotated[RuleName | None, Query(description=RULE)] = None,
        version: Annotated[int | None, Query(ge=0, le=MAX_VERSION, description=VERSION)] = None,
        partial: Annotated[bool, Query(description=PARTIAL)] = False,
        check_finite: Annotated[bool, Query(description=CHECK_FINITE)] = True,
    ) -> WeightsAnswer:
        """Replace the weights by the body's, or change nothing. Responds when the new weights are served."""
        await updates.push(
            lambda limit: stream_body(request, limit),
            rule=rule and Rule(rule),
            version=version,
            partial=partial,
            check_finite=check_finite,
        )
        return describe_weights(updates)

    @api.post("/weights", openapi_extra=json_body(WeightsIn))
    async def load(request: Request) -> WeightsAnswer:
        """Replace the weights by a path's, or change nothing. Responds when the new weights are served."""
        body = await parse_body(WeightsIn, await read_body(request, MAX_REQUEST_BYTES))
        await updates.load(
            body.path,
            rule=body.rule and Rule(body.rule),
            version=body.version,
            partial=body.partial,
            check_finite=body.check_finite,
            repeat_version=body.repeat_version,
        )
        return describe_weights(updates)

    @api.put("/weights/lora/{name}", openapi_extra=binary_body("PEFT's adapter_model.safetensors."))
    async def push_lora(
        name: LoraName,
        request: Request,
        config: Annotated[
            str, Query(max_length=4096, description="PEFT's adapter_config.json; `r` and `lora_alpha` are enough.")
        ],
        rule: Annotated[RuleName | None, Query(description=RULE)] = None,
        version: Annotated[int | None, Query(ge=0, le=MAX_VERSION, description=VERSION)] = None,
        check_finite: Annotated[bool, Query(description=CHECK_FINITE)] = True,
    ) -> WeightsAnswer:
        """Serve the adapter in the body under a name, in place of an earlier adapter, or change nothing."""
        await updates.loras.push(
            name,
            config,
            lambda limit: stream_body(request, limit),
            rule=rule and Rule(rule),
            version=version,
            check_finite=check_finite,
        )
        return describe_weights(updates)

    @api.post("/weights/lora/{name}", openapi_extra=json_body(LoraIn))
    async def load_lora(name: LoraName, request: Request) -> WeightsAnswer:
        """Serve the adapter in a folder under a name, or change nothing."""
        body = await parse_body(LoraIn, await read_body(request, MAX_REQUEST_BYTES))
        await updates.loras.load(
            name,
            body.path,
            rule=body.rule and Rule(body.rule),
            version=body.version,
            check_finite=body.check_finite,
        )
        return describe_weights(updates)

    @api.delete("/weights/lora/{name}")
    async def remove_lora(name: LoraName) -> WeightsAnswer:
        """Stop serving the adapter, after all running requests have finished."""
        await updates.loras.remove(name)
        return describe_weights(updates)


def describe_weights(updates: Updates) -> WeightsAnswer:
    coordinator = updates.coordinator
    loras = [
        LoraAnswer(
            name=name,
            version=lora.version,
            rank=lora.config.rank,
            scale=lora.config.scale,
        )
        for name, lora in updates.loras.served.items()
    ]
    last = coordinator.last
    last_error = coordinator.last_error
    # An update of a LoRA adapter does not replace tensors that a failed update may have left.
    if last is not None and last.outcome is UpdateOutcome.COMPLETED and updates.loaded.intact:
        last_error = None
    return WeightsAnswer(
        version=coordinator.version,
        state=coordinator.state.value,
        intact=updates.loaded.intact,
        rule=coordinator.settings.rule.value,
        loras=loras,
        last=UpdateAnswer.of(last),
        last_error=last_error,
    )
