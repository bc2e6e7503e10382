"""Routes and fields of trainers' own servers, as thin aliases of ours. ``--dialect`` enables them.

An alias has the checks, access (in `route_table`) and coordination of its original. Each trainer's section names the
version and the files that were read (August 2026).
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.routing import APIRoute
from pydantic import Field

from darts_server.caller import caller
from darts_server.exceptions import Forbidden, InvalidRequest, UpdateUnsupported
from darts_server.http.body import Body, parse_body, read_body
from darts_server.http.openapi import FAILURES, json_body
from darts_server.http.resources.weights import MAX_REQUEST_BYTES
from darts_server.http.security.access import RouteAccess
from darts_server.identifiers import LORA_NAME, NAME_CHARS
from darts_server.rollout.turns import Turns
from darts_server.weights.port import Rule
from darts_server.weights.updates import Updates

KEEP = Rule.KEEP
"""These trainers pause the engine before an update, or requests run through it, so no update can wait for groups."""


class Engine(Protocol):
    """The methods behind vLLM's own control routes."""

    async def pause_generation(self, *, mode: str) -> None: ...
    async def resume_generation(self) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def write_weights(self, update_info: dict[str, Any]) -> None: ...
    async def finish_weight_update(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Controls:
    updates: Updates
    engine: Engine
    turns: Turns
    allow_dangerous: bool = False
    """Whether admins may call any method of the workers."""

    async def load_weights(
        self,
        path_field: str,
        path: str,
        *,
        lora: str | None = None,
        aborts_running: bool = False,
    ) -> None:
        """Load weights from a file or folder, or a LoRA adapter from a folder.

        Args:
            path_field: name of the path's field in the request, for errors.
            aborts_running: whether to abort running requests, unless the trainer has paused.

        Raises:
            Forbidden, InvalidRequest, UpdateError, WeightsLost
        """
        paused_here = False

        async def abort_running() -> None:
            nonlocal paused_here
            if aborts_running and not self.updates.coordinator.paused_by_trainer:
                await self.engine.pause_generation(mode="abort")
                paused_here = True

        try:
            # Requests are aborted only after the new weights were read and checked. Under `KEEP`, requests that are not
            # aborted continue with the new weights.
            if lora is None:
                await self.updates.load(path, rule=KEEP, when_staged=abort_running)
            else:
                await self.updates.loras.load(
                    lora,
                    path,
                    rule=KEEP,
                    when_staged=abort_running,
                )
        except InvalidRequest as error:
            # The trainer has other names for the fields.
            trainers_field = {"path": path_field, "name": "lora_name"}.get(error.field)
            if trainers_field is None:
                raise
            raise type(error)(trainers_field, error.message) from error
        finally:
            if paused_here:
                await self.engine.resume_generation()


class LoraIn(Body):
    """A LoRA adapter, in the form of vLLM's own route."""

    lora_name: str = Field(pattern=LORA_NAME, description="Model name in requests.")
    lora_path: str = Field(description="Folder as PEFT saves it, under --weights-root.")


async def load_named_lora(controls: Controls, request: Request) -> str:
    """Serve the LoRA adapter of a `LoraIn` request, and return its name."""
    body = await parse_body(LoraIn, await read_body(request, MAX_REQUEST_BYTES))
    await controls.load_weights("lora_path", body.lora_path, lora=body.lora_name)
    return body.lora_name


def find_vllm_handler(application: FastAPI, path: str) -> Callable[..., Awaitable[Any]] | None:
    """Return vLLM's handler of a path that a dialect has taken over, if vLLM has this route."""
    routes = [route for route in application.routes if isinstance(route, APIRoute) and route.path == path]
    # The first is the dialect's own route, because `add_routes` puts its routes before vLLM's.
    return routes[1].dependant.call if len(routes) > 1 else None


# --- AReaL 1.0.4: areal/engine/vllm_remote.py ---
# AReaL sends /areal_pause_generation, which aborts, /areal_update_weights with a folder, /areal_continue_generation.
# It loads LoRA adapters by vLLM's route, each version under a new name. It counts all tokens of an answer to one
# version, so an update without a pause aborts running requests, as on AReaL's own server.

AREAL_NCCL = (
    "/areal_init_weights_update_group",
    "/areal_set_update_weight_meta",
    "/areal_update_weights_xccl",
    "/areal_set_update_weight_meta_lora",
    "/areal_update_weights_lora_xccl",
)
"""Routes for weights by NCCL, which call methods of AReaL's own worker."""


class ArealWeightsIn(Body):
    """A folder with the weights. Requests are aborted in any case, so ``abort_all_requests`` changes nothing."""

    model_path: str = Field(description="Folder of safetensors files, under --weights-root.")
    load_format: str | None = None
    abort_all_requests: bool = False


class ArealLoraIn(Body):
    """A folder with a LoRA adapter."""

    lora_model_path: str = Field(description="Folder as PEFT saves it, under --weights-root.")
    lora_name: str = Field(pattern=LORA_NAME, description="Model name in requests.")
    lora_int_id: int | None = None
    base_model_name: str | None = None
    load_format: str | None = None
    abort_all_requests: bool = False


def add_areal_routes(api: APIRouter, controls: Controls) -> None:
    def success(message: str) -> dict[str, Any]:
        return {"success": True, "message": message}

    @api.post("/areal_pause_generation")
    async def pause() -> dict[str, Any]:
        """Abort running requests, return their tokens so far, and let new requests wait."""
        await controls.engine.pause_generation(mode="abort")
        return success("Generation is paused, and all requests were aborted")

    @api.post("/areal_continue_generation")
    async def resume() -> dict[str, Any]:
        """End the pause."""
        await controls.engine.resume_generation()
        return success("Generation continues")

    @api.post("/areal_update_weights", openapi_extra=json_body(ArealWeightsIn))
    async def update(request: Request) -> dict[str, Any]:
        """Load the weights in a folder, or change nothing."""
        body = await parse_body(ArealWeightsIn, await read_body(request, MAX_REQUEST_BYTES))
        await controls.load_weights("model_path", body.model_path, aborts_running=True)
        return success(f"The weights have version {controls.updates.coordinator.version}")

    @api.post("/areal_update_weights_lora", openapi_extra=json_body(ArealLoraIn))
    async def update_lora(request: Request) -> dict[str, Any]:
        """Serve the LoRA adapter in a folder, in place of an adapter of the same name, or change nothing."""
        body = await parse_body(ArealLoraIn, await read_body(request, MAX_REQUEST_BYTES))
        await controls.load_weights(
            "lora_model_path",
            body.lora_model_path,
            lora=body.lora_name,
            aborts_running=True,
        )
        return success(f"The LoRA adapter has version {controls.updates.coordinator.version}")

    async def refuse_nccl(request: Request) -> None:
        """Refuse weights by NCCL."""
        raise UpdateUnsupported(
            f"{request.url.path} is for weights by NCCL, which is not served in this form; set weight_update_mode: disk"
        )

    for path in AREAL_NCCL:
        api.add_api_route(
            path,
            refuse_nccl,
            name="refuse",
            methods=["POST"],
        )


# --- prime-rl 0.8.0: prime_rl/utils/client.py ---
# prime-rl sends /pause?mode=keep, /update_weights with a folder, and /resume; for LoRA only /load_lora_adapter.

UPDATE = "/update_weights"
WEIGHT_DIR = "weight_dir"


class PrimeWeightsIn(Body):
    """A folder with the weights."""

    weight_dir: str | None = Field(description="Folder of safetensors files, under --weights-root.")


def add_prime_rl_routes(api: APIRouter, controls: Controls) -> None:
    @api.post(UPDATE, openapi_extra=json_body(PrimeWeightsIn))
    async def update_from_folder(request: Request) -> Any:
        """Load the weights in a folder, or change nothing. Running groups continue with the new weights.

        A request without `weight_dir` is passed to vLLM's route of the same path, if the server has that route.
        """
        raw_body = await request.body()
        # Only searched, because a body for vLLM's route has other fields.
        names_folder = f'"{WEIGHT_DIR}"'.encode() in raw_body
        if not names_folder:
            handler = find_vllm_handler(request.app, UPDATE)
            if handler is not None:
                return await handler(raw_request=request)

        body = await parse_body(PrimeWeightsIn, raw_body)
        if body.weight_dir is None:
            raise InvalidRequest(
                WEIGHT_DIR,
                'is null, as for weights by NCCL, which is not served; set weight_broadcast.type = "filesystem"',
            )
        await controls.load_weights(WEIGHT_DIR, body.weight_dir)
        return {"status": "ok"}

    @api.post("/load_lora_adapter", openapi_extra=json_body(LoraIn))
    async def load_lora_adapter(request: Request) -> dict[str, str]:
        """Serve the LoRA adapter in a folder, in place of an adapter of the same name, or change nothing."""
        await load_named_lora(controls, request)
        return {"status": "ok"}


# --- SkyRL 0.3.0: inference_servers/remote_inference_client.py ---
# SkyRL's own server stands behind vLLM's router, which has the route for finished sessions. SkyRL sends full weights by
# /collective_rpc, to methods of its worker that correspond to vLLM's own routes for weights.

RPC = "/collective_rpc"
START = "skyrl_start_weight_update"
WRITE = "update_weights_nccl"
FINISH = "skyrl_finish_weight_update"


class SkyrlCall(Body):
    """A method of the workers."""

    method: str
    kwargs: dict[str, Any] = Field(default_factory=dict)
    args: list[Any] = Field(default_factory=list)
    timeout: float | None = None


def add_skyrl_routes(api: APIRouter, controls: Controls) -> None:
    @api.post("/skyrl/v1/load_lora_adapter", openapi_extra=json_body(LoraIn))
    async def load_lora(request: Request) -> str:
        """Serve the LoRA adapter in a folder, in place of an adapter of the same name, or change nothing."""
        return f"LoRA adapter {await load_named_lora(controls, request)} is served"

    @api.post("/finish_session")
    async def finish_session(session_id: Annotated[str, Query(min_length=1, max_length=NAME_CHARS)]) -> dict[str, bool]:
        """Forget a session of the caller, so that its next request opens a new trajectory.

        `known` is whether the session had an answer.
        """
        return {"known": controls.turns.forget_session(caller.get().name or "", session_id)}

    @api.post(RPC, openapi_extra=json_body(SkyrlCall))
    async def call_workers(request: Request) -> Any:
        """Start, write or finish an update of the weights, as vLLM's own routes do.

        Other methods are passed to vLLM's route, if dangerous routes are enabled.
        """
        call = await parse_body(SkyrlCall, await request.body())
        if call.method == START:
            if call.kwargs.get("is_checkpoint_format", True) is not True:
                raise InvalidRequest("kwargs.is_checkpoint_format", "must be true: weights are written by their names")
            await controls.engine.start_weight_update()
        elif call.method == WRITE:
            info = call.kwargs.get("update_info")
            if not isinstance(info, dict):
                raise InvalidRequest("kwargs.update_info", "must be an object, as for vLLM's /update_weights")
            await controls.engine.write_weights(info)
        elif call.method == FINISH:
            await controls.engine.finish_weight_update()
        else:
            handler = find_vllm_handler(request.app, RPC)
            if not controls.allow_dangerous or handler is None:
                raise Forbidden(
                    f"of {RPC} only {START}, {WRITE} and {FINISH} are enabled; others call any method of the workers, "
                    "and need --allow-dangerous-routes and vLLM's own route"
                )
            return await handler(raw_request=request)
        # The form of vLLM's answer, for one worker.
        return {"results": [None]}


# --- NeMo-RL 0.6.0: nemo_rl/models/generation/dynamo/dynamo_generation.py ---
# NeMo-RL samples from an NVIDIA Dynamo front end by /v1/completions with token ids and n = 1. It requests
# nvext.extra_fields, and reads the tokens of the answer from nvext.completion_token_ids.

TOKEN_IDS = "completion_token_ids"


class CompletionTokenIds:
    """Add ``nvext`` to the answer of a completions request with ``nvext``."""

    def prepare_request(self, request: Any) -> None:
        """Request token ids for a parsed generation request, or raise `InvalidRequest`."""
        nvext = getattr(request, "nvext", None)
        if nvext is None:
            return
        fields = nvext.get("extra_fields") if isinstance(nvext, Mapping) else None
        if fields != [TOKEN_IDS] or len(nvext) > 1:
            raise InvalidRequest("nvext", f'must be {{"extra_fields": ["{TOKEN_IDS}"]}}, which alone is served')
        prompt = getattr(request, "prompt", None)
        if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
            raise InvalidRequest("nvext", "is served on /v1/completions alone, for one prompt of token ids")
        if (getattr(request, "n", None) or 1) != 1 or getattr(request, "stream", False):
            raise InvalidRequest("nvext", "is served for n = 1 without stream; use return_token_ids for others")
        request.return_token_ids = True

    def complete_answer(self, request: Any, answer: Any) -> None:
        # An error response has no choices.
        choices = getattr(answer, "choices", None)
        if getattr(request, "nvext", None) is not None and choices:
            answer.nvext = {TOKEN_IDS: choices[0].token_ids}


# --- all dialects ---

ROUTES = {"areal": add_areal_routes, "prime-rl": add_prime_rl_routes, "skyrl": add_skyrl_routes}


def add_routes(application: FastAPI, dialects: Sequence[str], controls: Controls) -> None:
    api = APIRouter(tags=["dialects"], responses=FAILURES)
    for dialect in dialects:
        if dialect in ROUTES:
            ROUTES[dialect](api, controls)
    # These routes stand before vLLM's routes, because a dialect may take over the path of a route.
    application.router.routes[:0] = api.routes


def access_overrides(dialects: Sequence[str]) -> dict[tuple[str, str], RouteAccess]:
    """Return the access by method and path that differs from the route table."""
    # This route is dangerous, but SkyRL's handler of it refuses all methods of the workers but three.
    if "skyrl" in dialects:
        return {("POST", RPC): RouteAccess.ADMIN}
    return {}


def body_extensions(dialects: Sequence[str]) -> list[CompletionTokenIds]:
    return [CompletionTokenIds()] if "nemo-rl" in dialects else []
