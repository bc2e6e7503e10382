"""Cancel work when its caller disconnects."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request

from darts_server.exceptions import GroupAborted

T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, or cancel it when the caller disconnects.

    The request's body must have been read. Starlette cancels only streaming responses.

    Raises:
        GroupAborted: the caller disconnected. No one receives this error.
    """
    working, disconnecting = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise GroupAborted("the caller disconnected")
    finally:
        for task in (working, disconnecting):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
