"""Middleware for vLLM's flag ``--middleware``: what no request should be able to do to the engine."""

from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequestType

HEADER = "X-Test-Engine"


async def backdoor(request: Request, call_next: Any) -> Any:
    """Send the engine a request that it cannot decode, or add one that cannot be sent; return the requests kept."""
    llm = request.app.state.engine_client
    match request.headers.get(HEADER):
        case "undecodable":
            await llm.engine_core._send_input(EngineCoreRequestType.ADD, "not a request")
        case "unsendable":
            params = SamplingParams(seed=2**64)
            try:
                await llm.add_request("unsendable", {"type": "token", "prompt_token_ids": [5]}, params)
            except OverflowError:
                return JSONResponse(list(llm.output_processor.request_states))
    return await call_next(request)
