"""SkyRL, read at version 0.3.0 (August 2026): ``inference_servers/remote_inference_client.py`` sends.

Its own vLLM server answers, behind vLLM's router, which has the route for sessions that have ended.
"""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from darts_server.http.dialects.controls import Controls, LoraIn, read_lora
from darts_server.http.openapi import json_body
from darts_server.identifiers import NAME_CHARS
from darts_server.serving.admission import caller


class SessionAnswer(BaseModel):
    """The end of a session."""

    known: bool = Field(description="Whether the session had an answer.")


def routes(controls: Controls) -> APIRouter:
    api = APIRouter()

    @api.post("/skyrl/v1/load_lora_adapter", openapi_extra=json_body(LoraIn))
    async def load_lora(request: Request) -> str:
        """Serve the LoRA adapter in a folder, replacing one of the same name, or change nothing."""
        body = await read_lora(request)
        await controls.load_lora(body.lora_name, "lora_path", body.lora_path)
        return f"LoRA adapter {body.lora_name} is served"

    @api.post("/finish_session")
    async def finish_session(session_id: Annotated[str, Query(min_length=1, max_length=NAME_CHARS)]) -> SessionAnswer:
        """Forget a session of the caller's: the next request of that name opens a trajectory."""
        return SessionAnswer(known=controls.turns.forget_session(caller.get().name or "", session_id))

    return api
