"""What the dialects' routes act on, and what they have in common."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
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

    async def load(self, field: str, path: str, *, aborts: bool = False) -> None:
        """Replace the weights by those in a file or folder.

        ``field``: of the request, to be named in errors. ``aborts``: what runs, unless the trainer has paused.

        Raises:
            Forbidden, InvalidRequest, UpdateError, WeightsLost
        """
        with renamed_fields(path=field):
            async with self._pause(aborts) as when_staged:
                await self.updates.load(path, KEEP, when_staged=when_staged)

    async def load_lora(self, name: str, field: str, path: str, *, aborts: bool = False) -> None:
        """Serve the LoRA adapter in a folder. ``field``: of the path in the request. ``aborts``: as for `load`.

        Raises:
            Forbidden, InvalidRequest, UpdateError, WeightsLost
        """
        with renamed_fields(path=field, name="lora_name"):
            async with self._pause(aborts) as when_staged:
                await self.updates.loras.load(name, path, KEEP, when_staged=when_staged)

    @asynccontextmanager
    async def _pause(self, aborts: bool) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Yield a function that aborts what runs and pauses, unless the trainer has paused; resume what it paused."""
        has_paused = False

        async def pause() -> None:
            nonlocal has_paused
            if aborts and not self.updates.coordinator.paused_by_trainer:
                await self.engine.pause_generation(mode="abort")
                has_paused = True

        try:
            yield pause
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


@contextmanager
def renamed_fields(**names: str) -> Iterator[None]:
    """Name the fields of a request in errors as its sender knows them: ``renamed_fields(path="weight_dir")``."""
    try:
        yield
    except InvalidRequest as error:
        if error.field not in names:
            raise
        raise type(error)(names[error.field], error.message) from error


def vllms_handler(application: FastAPI, path: str) -> Callable[..., Awaitable[Any]] | None:
    """Return vLLM's handler of a path that a dialect's route has too; ``None`` if this server has no such route."""
    found = [route for route in application.routes if isinstance(route, APIRoute) and route.path == path]
    return found[1].dependant.call if len(found) > 1 else None  # ours comes first
