"""What the dialects' routes act on, and what they have in common."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import Field

from darts_server.exceptions import InvalidRequest
from darts_server.http.body import Body, parse_body, read_body
from darts_server.http.resources.weights import MAX_REQUEST_BYTES
from darts_server.identifiers import LORA_NAME
from darts_server.rollout.turns import Turns
from darts_server.weights.port import Rule
from darts_server.weights.updates import Updates

KEEP = Rule.KEEP
"""These trainers pause the engine before an update, so that groups cannot be waited for; and where they do not, they
let requests run through the update."""


class Engine(Protocol):
    """What vLLM's own control routes call, coordinated with groups and updates."""

    async def pause_generation(self, *, mode: str) -> None: ...
    async def resume_generation(self) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def write_weights(self, update_info: dict[str, Any]) -> None: ...
    async def finish_weight_update(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Controls:
    """What the routes act on.

    ``turns``: the trajectories' sessions. ``dangerous``: whether admins may call any method of the workers.
    """

    updates: Updates
    engine: Engine
    turns: Turns
    dangerous: bool = False

    async def load(self, field: str, path: str, *, lora: str | None = None, aborts: bool = False) -> None:
        """Replace the weights by those in a file or folder, or serve the LoRA adapter in a folder as ``lora``.

        ``field``: of the path in the request, to be named in errors. ``aborts``: what runs, unless the trainer has
        paused.

        Raises:
            Forbidden, InvalidRequest, UpdateError, WeightsLost
        """
        has_paused = False

        async def pause() -> None:
            nonlocal has_paused
            if aborts and not self.updates.coordinator.paused_by_trainer:
                await self.engine.pause_generation(mode="abort")
                has_paused = True

        try:
            if lora is None:
                await self.updates.load(path, KEEP, when_staged=pause)
            else:
                await self.updates.loras.load(lora, path, KEEP, when_staged=pause)
        except InvalidRequest as error:  # its sender knows the field by another name
            if (name := {"path": field, "name": "lora_name"}.get(error.field)) is None:
                raise
            raise type(error)(name, error.message) from error
        finally:
            if has_paused:
                await self.engine.resume_generation()


class LoraIn(Body):
    """A LoRA adapter, as vLLM's own route takes it."""

    lora_name: str = Field(pattern=LORA_NAME, description="Model name in requests.")
    lora_path: str = Field(description="Folder as PEFT saves it, under --weights-root.")


async def read_lora(request: Request) -> LoraIn:
    """
    Raises:
        InvalidRequest
    """
    return await parse_body(LoraIn, await read_body(request, MAX_REQUEST_BYTES))


def vllms_handler(application: FastAPI, path: str) -> Callable[..., Awaitable[Any]] | None:
    """Return vLLM's handler of a path that a dialect's route has too; ``None`` if this server has no such route."""
    found = [route for route in application.routes if isinstance(route, APIRoute) and route.path == path]
    return found[1].dependant.call if len(found) > 1 else None  # ours comes first
