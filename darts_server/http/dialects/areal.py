"""AReaL, read at version 1.0.4: ``areal/engine/vllm_remote.py`` sends, its own vLLM server answers.

It sends ``/areal_pause_generation``, which aborts, ``/areal_update_weights`` with a folder, and
``/areal_continue_generation``. LoRA adapters it loads by vLLM's route, each version under a name of its own.
It counts all tokens of an answer to one version, so an update without a pause aborts what runs, as on its own server.
"""

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from darts_server.exceptions import UpdateUnsupported
from darts_server.http.body import Body, parse_body, read_body
from darts_server.http.dialects.controls import Controls
from darts_server.http.openapi import json_body
from darts_server.http.resources.weights import MAX_REQUEST_BYTES
from darts_server.identifiers import LORA_NAME

NCCL = (
    "/areal_init_weights_update_group",
    "/areal_set_update_weight_meta",
    "/areal_update_weights_xccl",
    "/areal_set_update_weight_meta_lora",
    "/areal_update_weights_lora_xccl",
)
"""Routes for weights by NCCL, which are methods of its own worker."""


class WeightsIn(Body):
    """A folder with the weights. ``abort_all_requests`` changes nothing: they are aborted in any case."""

    model_path: str = Field(description="Folder of safetensors files, under --weights-root.")
    load_format: str | None = None
    abort_all_requests: bool = False


class LoraIn(Body):
    """A folder with a LoRA adapter."""

    lora_model_path: str = Field(description="Folder as PEFT saves it, under --weights-root.")
    lora_name: str = Field(pattern=LORA_NAME, description="Model name in requests.")
    lora_int_id: int | None = None
    base_model_name: str | None = None
    load_format: str | None = None
    abort_all_requests: bool = False


class Answer(BaseModel):
    """Whether it was done."""

    success: bool = True
    message: str


def routes(controls: Controls) -> APIRouter:
    api = APIRouter()

    @api.post("/areal_pause_generation")
    async def pause() -> Answer:
        """Abort what runs, each caller with its tokens so far, and let new requests wait."""
        await controls.engine.pause_generation(mode="abort")
        return Answer(message="Generation is paused, and all requests were aborted")

    @api.post("/areal_continue_generation")
    async def resume() -> Answer:
        """End the pause."""
        await controls.engine.resume_generation()
        return Answer(message="Generation continues")

    @api.post("/areal_update_weights", openapi_extra=json_body(WeightsIn))
    async def update(request: Request) -> Answer:
        """Replace the weights by those in a folder, or change nothing."""
        body = await parse_body(WeightsIn, await read_body(request, MAX_REQUEST_BYTES))
        await controls.load("model_path", body.model_path, aborts=True)
        return Answer(message=f"The weights have version {controls.updates.version}")

    @api.post("/areal_update_weights_lora", openapi_extra=json_body(LoraIn))
    async def update_lora(request: Request) -> Answer:
        """Serve the LoRA adapter in a folder, replacing one of the same name, or change nothing."""
        body = await parse_body(LoraIn, await read_body(request, MAX_REQUEST_BYTES))
        await controls.load("lora_model_path", body.lora_model_path, lora=body.lora_name, aborts=True)
        return Answer(message=f"The LoRA adapter has version {controls.updates.version}")

    for path in NCCL:
        api.add_api_route(path, _refuse, methods=["POST"])
    return api


async def _refuse(request: Request) -> None:
    """Refuse weights by NCCL."""
    raise UpdateUnsupported(
        f"{request.url.path} is for weights by NCCL, which is not served in this form; set weight_update_mode: disk"
    )
