"""``/darts/v1/state``: save and restore learned state with a training checkpoint, as one file."""

from contextlib import ExitStack

import anyio
from anyio.to_thread import run_sync
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from darts_server.exceptions import InvalidRequest, StateDamaged, StateTooNew
from darts_server.http.answers import Readers, respond
from darts_server.http.body import read_body
from darts_server.http.openapi import BYTES, binary_body
from darts_server.rollout.learned.statistics import KIND, Statistics
from darts_server.store import Store

MAX_FILE_BYTES = 1024**3
"""The store's own limit for decompressed files is the same, so no valid file is larger."""
MAX_STATE_READERS = 4
"""Each connection has a copy of the whole state until it was sent, and a trainer needs one connection."""


class StateAnswer(BaseModel):
    """Learned state after a restore."""

    prompts: int = Field(description="Prompts with statistics.")


def add_routes(
    api: APIRouter,
    store: Store,
    statistics: Statistics,
    max_bytes: int = MAX_FILE_BYTES,
) -> None:
    readers = Readers("the learned state", MAX_STATE_READERS)
    # One request of each kind at a time, because it has a whole file in memory.
    restoring = anyio.Lock()
    exporting = anyio.Lock()

    def restore_file(data: bytes) -> int:
        try:
            store.restore(data)
        except (StateDamaged, StateTooNew) as error:
            raise InvalidRequest("body", str(error)) from error
        return store.count(KIND)

    @api.get("/state", response_class=Response, responses={200: {"content": BYTES}})
    async def save() -> Response:
        """Return learned state as one file."""
        with ExitStack() as cleanup:
            cleanup.enter_context(readers.count_connection())
            async with exporting:
                statistics.flush()
                data = await run_sync(store.export)
            response = respond(data, "application/octet-stream", cleanup.pop_all())
        response.headers["Content-Disposition"] = 'attachment; filename="darts-state"'
        return response

    @api.put("/state", openapi_extra=binary_body("A saved file."))
    async def restore(request: Request) -> StateAnswer:
        """Replace learned state by a saved file, or change nothing."""
        async with restoring:
            data = await read_body(request, max_bytes)
            prompts = await run_sync(restore_file, data)
        return StateAnswer(prompts=prompts)
