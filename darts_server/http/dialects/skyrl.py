"""SkyRL, read at version 0.3.0 (August 2026): ``inference_servers/remote_inference_client.py`` sends.

Its own vLLM server answers, behind vLLM's router, which has the route for sessions that have ended. Full weights it
sends by ``/collective_rpc``, to methods of its worker that stand for vLLM's own routes for weights.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from darts_server.exceptions import Forbidden, InvalidRequest
from darts_server.http.body import Body, parse_body
from darts_server.http.dialects.controls import Controls, LoraIn, read_lora, vllms_handler
from darts_server.http.openapi import json_body
from darts_server.identifiers import NAME_CHARS
from darts_server.serving.admission import caller

RPC = "/collective_rpc"
START, WRITE, FINISH = "skyrl_start_weight_update", "update_weights_nccl", "skyrl_finish_weight_update"
DONE = {"results": [None]}


class Call(Body):
    """A method of the workers."""

    method: str
    kwargs: dict[str, Any] = Field(default_factory=dict)
    args: list[Any] = Field(default_factory=list)
    timeout: float | None = None


class SessionAnswer(BaseModel):
    """The end of a session."""

    known: bool = Field(description="Whether the session had an answer.")


def routes(controls: Controls) -> APIRouter:
    api = APIRouter()

    @api.post("/skyrl/v1/load_lora_adapter", openapi_extra=json_body(LoraIn))
    async def load_lora(request: Request) -> str:
        """Serve the LoRA adapter in a folder, replacing one of the same name, or change nothing."""
        body = await read_lora(request)
        await controls.load("lora_path", body.lora_path, lora=body.lora_name)
        return f"LoRA adapter {body.lora_name} is served"

    @api.post("/finish_session")
    async def finish_session(session_id: Annotated[str, Query(min_length=1, max_length=NAME_CHARS)]) -> SessionAnswer:
        """Forget a session of the caller's: the next request of that name opens a trajectory."""
        return SessionAnswer(known=controls.turns.forget_session(caller.get().name or "", session_id))

    @api.post(RPC, openapi_extra=json_body(Call))
    async def call_workers(request: Request) -> Any:
        """Start, write or finish an update of the weights, as vLLM's own routes do.

        Other methods are vLLM's, where dangerous routes are enabled.
        """
        call = await parse_body(Call, await request.body())
        if call.method == START:
            if call.kwargs.get("is_checkpoint_format", True) is not True:
                raise InvalidRequest("kwargs.is_checkpoint_format", "must be true: weights are written by their names")
            await controls.engine.start_weight_update()
        elif call.method == WRITE:
            if not isinstance(info := call.kwargs.get("update_info"), dict):
                raise InvalidRequest("kwargs.update_info", "must be an object, as for vLLM's /update_weights")
            await controls.engine.write_weights(info)
        elif call.method == FINISH:
            await controls.engine.finish_weight_update()
        else:
            handler = vllms_handler(request.app, RPC)
            if not controls.dangerous or handler is None:
                raise Forbidden(
                    f"of {RPC} only {START}, {WRITE} and {FINISH} are enabled; others call any method of the workers, "
                    "and need --allow-dangerous-routes and vLLM's own route"
                )
            return await handler(raw_request=request)
        return DONE

    return api
