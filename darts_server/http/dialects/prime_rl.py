"""prime-rl, read at version 0.8.0 (August 2026): ``prime_rl/utils/client.py`` sends, its own vLLM server answers.

It sends ``/pause?mode=keep``, ``/update_weights`` with a folder and ``/resume``; for LoRA ``/load_lora_adapter`` alone.
"""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from darts_server.exceptions import InvalidRequest
from darts_server.http.body import Body, parse_body
from darts_server.http.dialects.controls import Controls, LoraIn, read_lora, vllms_handler
from darts_server.http.openapi import json_body

UPDATE = "/update_weights"
FIELD = "weight_dir"
DONE = {"status": "ok"}


class WeightsIn(Body):
    """A folder with the weights."""

    weight_dir: str | None = Field(description="Folder of safetensors files, under --weights-root.")


def routes(controls: Controls) -> APIRouter:
    api = APIRouter()

    @api.post(UPDATE, openapi_extra=json_body(WeightsIn))
    async def update_from_folder(request: Request) -> Any:
        """Replace the weights by those in a folder, or change nothing. Running groups go on with the new weights.

        Without `weight_dir` this is vLLM's route of the same path, where the server has that.
        """
        text = await request.body()
        if f'"{FIELD}"'.encode() not in text and (handler := vllms_handler(request.app, UPDATE)) is not None:
            return await handler(raw_request=request)
        body = await parse_body(WeightsIn, text)
        if body.weight_dir is None:
            raise InvalidRequest(
                FIELD, 'is null, as for weights by NCCL, which is not served; set weight_broadcast.type = "filesystem"'
            )
        await controls.load(FIELD, body.weight_dir)
        return DONE

    @api.post("/load_lora_adapter", openapi_extra=json_body(LoraIn))
    async def load_lora_adapter(request: Request) -> dict[str, str]:
        """Serve the LoRA adapter in a folder, replacing one of the same name, or change nothing."""
        body = await read_lora(request)
        await controls.load("lora_path", body.lora_path, lora=body.lora_name)
        return DONE

    return api
