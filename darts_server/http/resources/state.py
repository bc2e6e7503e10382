"""``/darts/v1/state``: learned state as one file, to save and restore with a training checkpoint."""

from collections.abc import Collection
from typing import Annotated, Protocol

import anyio
from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request, Response

from darts_server.exceptions import Conflict, InvalidRequest, StateDamaged, StateTooNew
from darts_server.http.body import read_body
from darts_server.http.openapi import binary_body
from darts_server.http.resources.groups import StateAnswer
from darts_server.rollout.allocation import auto
from darts_server.rollout.learned import latency
from darts_server.rollout.learned.prompts import KIND

FILE_NAME = "darts-state"
MAX_FILE_BYTES = 1024**3
"""The store's own limit for decompressed files, so no valid file is larger."""


class State(Protocol):
    """The part of the store that these routes use. Its methods block on the disk."""

    def export(self) -> bytes: ...

    def restore(self, data: bytes, *, keep: Collection[str] = ()) -> None: ...

    def count(self, kind: str) -> int: ...


class Learner(Protocol):
    """Says whether this server has learned anything yet, and writes what it has."""

    @property
    def is_new(self) -> bool: ...

    def flush(self) -> None:
        """Put all of it into the store."""
        ...


def routes(state: State, learner: Learner, max_bytes: int = MAX_FILE_BYTES) -> APIRouter:
    """Create the routes. ``max_bytes``: of a file."""
    api = APIRouter()
    restoring, exporting = anyio.Lock(), anyio.Lock()  # each request holds a whole file in memory

    @api.get(
        "/state",
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def save() -> Response:
        """Return learned state as one file."""
        async with exporting:
            learner.flush()  # the file says which groups are in it
            data = await run_sync(state.export)
        return Response(
            data,
            media_type="application/octet-stream",
            headers={"Content-Disposition": f'attachment; filename="{FILE_NAME}"'},
        )

    @api.put("/state", openapi_extra=binary_body("A saved file."))
    async def restore(
        request: Request,
        if_new: Annotated[
            bool,
            Query(
                description="For an ingress: the file is another server's. It is refused with a 409 if this one has "
                "learned anything, and its step times, and what `auto` has measured, are left out."
            ),
        ] = False,
    ) -> StateAnswer:
        """Replace learned state by a saved file, or change nothing."""
        async with restoring:
            data = await read_body(request, max_bytes)
            if if_new and not learner.is_new:
                raise Conflict("if_new", "this server has learned something already; it learns from observations")
            keep = (latency.KIND, auto.KIND) if if_new else ()
            return StateAnswer(prompts=await run_sync(_restore, state, data, keep))

    return api


def _restore(state: State, data: bytes, keep: Collection[str]) -> int:
    try:
        state.restore(data, keep=keep)
    except (StateDamaged, StateTooNew) as error:
        raise InvalidRequest("body", str(error)) from error
    return state.count(KIND)
